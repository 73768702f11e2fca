"""GPT-OSS's format: messages, each with a channel: `<|channel|>final<|message|>…<|end|>`.

The channel `final` is for the user and `analysis` for the model's reasoning; a message to `functions.name` is a call,
one to anybody else is not.
"""

import re
from collections.abc import Collection

from ferrum_jax.serve.tools.events import Arguments, CallBegin, Content, Event, Reasoning, ToolParser, joined, settled
from ferrum_jax.serve.tools.json_call import JsonValue

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CONSTRAIN = "<|end|>", "<|constrain|>"
ENDS = (END, "<|call|>", "<|return|>")
_MARKS = (START, CHANNEL, MESSAGE, *ENDS)
_SPACE = re.compile("|".join([r"\s+", *map(re.escape, (CHANNEL, CONSTRAIN, *ENDS))]))  # between a header's words
_FUNCTIONS = "functions."


class HarmonyMessages(ToolParser):
    """Reads messages as they come; the text begins after `<|start|>assistant`, or inside a final message.

    Without tools, a message to a function is content.
    """

    def __init__(self, names: Collection[str], is_continued: bool):
        """Takes the names of the tools, and whether the text begins inside a message."""
        self._may_call = bool(names)
        self._buffer = ""
        self._in_body = is_continued
        self._has_marks = is_continued
        self._channel = "final"  # of the current message
        self._recipient = ""
        self._has_arguments = False
        self._object: JsonValue | None = None  # the current call's arguments, until they are complete

    def read(self, letter: str) -> list[Event]:
        """Takes the next character."""
        self._buffer += letter
        return self._body() if self._in_body else self._header()

    def finish(self) -> list[Event]:
        """Returns the events of the text that was held back: the rest of a body, or a text without marks.

        An incomplete header gives none.
        """
        events: list[Event] = []
        if self._in_body:
            events = self._told(self._buffer) + self._end()
        elif self._buffer.strip() and not self._has_marks:
            events.append(Content(self._buffer))
        self._buffer, self._in_body = "", False
        return joined(events)

    def _header(self) -> list[Event]:
        self._has_marks = self._has_marks or self._buffer.endswith(_MARKS)
        if not self._buffer.endswith(MESSAGE):
            return []
        role, _, rest = self._buffer.removesuffix(MESSAGE).rpartition(START)[-1].partition(CHANNEL)
        before, words = _SPACE.split(role), list(filter(None, _SPACE.split(rest)))
        self._channel = words[0] if words else "final"
        sent = [word.removeprefix("to=") for word in (*before, *words) if word.startswith("to=")]
        names = [one.removeprefix(_FUNCTIONS) for one in sent if one.startswith(_FUNCTIONS) and self._may_call]
        self._recipient = next(filter(None, names), "")
        self._buffer, self._in_body, self._has_arguments, self._object = "", True, False, None
        return [CallBegin(self._recipient)] if self._recipient else []

    def _body(self) -> list[Event]:
        if self._recipient and self._is_in_string(self._buffer[-1]):
            text, self._buffer = self._buffer, ""
            return self._told(text)
        for mark in (*ENDS, START):
            if self._buffer.endswith(mark):
                events = self._told(self._buffer.removesuffix(mark)) + self._end()
                self._buffer, self._in_body = START if mark == START else "", False
                return events
        text = settled(self._buffer, (*ENDS, START))
        self._buffer = self._buffer[len(text) :]
        return self._told(text)

    def _is_in_string(self, letter: str) -> bool:
        """True if a character leaves the arguments inside a JSON string, which may spell marks."""
        if self._object is None and not self._has_arguments and letter == "{":
            self._object = JsonValue()
        if self._object is not None and not self._object.takes(letter):
            self._object = None
        return self._object is not None and self._object.in_text

    def _told(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._recipient:
            self._has_arguments = self._has_arguments or bool(text.strip())
            return [Arguments(text)]
        return [Reasoning(text)] if self._channel == "analysis" else [Content(text)]

    def _end(self) -> list[Event]:
        return [Arguments("{}")] if self._recipient and not self._has_arguments else []

"""Calls after `[TOOL_CALLS]`, as Mistral's models write them.

Older models write a list of objects, newer ones a name and its arguments, `[TOOL_CALLS]name[ARGS]{…}`.
"""

from ferrum_jax.serve.tools.events import Arguments, CallBegin, Content, Event, ToolParser, ends_in_spaces, settled
from ferrum_jax.serve.tools.json_call import SPACES, CallObject, JsonValue, State

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralCalls(ToolParser):
    """Reads calls after their mark; text before it is content, without the spaces at its end."""

    def __init__(self) -> None:
        self._buffer = ""
        self._raw = ""  # text since the mark, until a call is reported
        self._step = self._outside
        self._call = CallObject()
        self._value = JsonValue()
        self._is_list = False
        self._has_called = False

    def read(self, letter: str) -> list[Event]:
        """Takes the next character."""
        return self._step(letter)

    def finish(self) -> list[Event]:
        """Returns the events of the text that was held back."""
        rest = self._raw if self._raw else self._buffer
        self._buffer = self._raw = ""
        is_between = self._has_called and not rest.strip(",]" + SPACES)
        return [Content(rest)] if rest and not is_between else []

    def _outside(self, letter: str) -> list[Event]:
        self._buffer += letter
        if ends_in_spaces(self._buffer):  # still whitespace: keep holding it back
            return []
        if self._buffer.endswith(MARK):
            before, self._buffer = self._buffer[: -len(MARK)].rstrip(), ""
            self._raw, self._step, self._is_list = MARK, self._after_mark, False
            return [Content(before)] if before else []
        text = settled(self._buffer, [MARK]).rstrip()
        self._buffer = self._buffer[len(text) :]
        return [Content(text)] if text else []

    def _after_mark(self, letter: str) -> list[Event]:
        if letter in SPACES or letter == "{":
            return self._between(letter)
        self._raw += letter
        if letter == "[":
            self._is_list, self._step = True, self._between
        else:
            self._buffer, self._step = letter, self._in_name
        return []

    def _between(self, letter: str) -> list[Event]:
        """Reads the text between the objects of a list."""
        self._raw += letter
        if letter in SPACES or (letter == "," and self._has_called):
            return []
        if letter == "{":
            self._call, self._step = CallObject(), self._in_object
            return self._call.push(letter)
        if letter == "]" and self._has_called:
            self._raw, self._buffer, self._step = "", "", self._outside
            return []
        return self._fail()

    def _in_object(self, letter: str) -> list[Event]:
        self._raw += letter
        events = self._call.push(letter)
        if self._call.is_call:
            self._raw, self._has_called = "", True
        if self._call.state is State.DONE:
            self._raw = ""
            self._step = self._between if self._is_list else self._outside
        elif self._call.state is State.FAILED:
            events += self._fail()
        return events

    def _in_name(self, letter: str) -> list[Event]:
        self._raw += letter
        self._buffer += letter
        if letter == "{":
            name = self._buffer[:-1].split(CALL_ID)[0].removesuffix(ARGS).strip()
            self._buffer = ""
            if not name or any(space in name for space in SPACES):
                return self._fail()
            self._value, self._step = JsonValue(), self._in_arguments
            self._value.takes(letter)
            self._raw, self._has_called = "", True
            return [CallBegin(name), Arguments(letter)]
        return self._fail() if letter == "\n" else []

    def _in_arguments(self, letter: str) -> list[Event]:
        if not self._value.takes(letter):
            self._step = self._outside
        return [Arguments(letter)]

    def _fail(self) -> list[Event]:
        """Returns the text since the mark as content, unless a call was reported."""
        text, self._raw, self._buffer, self._step = self._raw, "", "", self._outside
        return [Content(text)] if text else []

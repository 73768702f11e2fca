"""Calls as Llama 3 writes them: the whole answer is a JSON object, or several with semicolons between them."""

from collections.abc import Collection

from ferrum_jax.serve.tools.events import Content, Event, ToolParser, ends_in_spaces
from ferrum_jax.serve.tools.json_call import SPACES, CallObject, State

PYTHON_TAG = "<|python_tag|>"


class LlamaCalls(ToolParser):
    """Reads calls at the beginning of an answer; an object that names no tool, and all text after it, is content."""

    def __init__(self, names: Collection[str]):
        """Takes the names of the tools that the model was shown."""
        self._names = names
        self._buffer = ""  # text before the next call, until it is clear whether there is one
        self._call: CallObject | None = None
        self._has_called = False
        self._is_content = False

    def read(self, letter: str) -> list[Event]:
        """Takes the next character."""
        if self._is_content:
            return [Content(letter)]
        return self._in_call(letter) if self._call is not None else self._before_call(letter)

    def finish(self) -> list[Event]:
        """Returns the events of the text that was held back."""
        events: list[Event] = []
        if self._call is not None and not self._call.is_call:
            events = self._give_up(self._call.raw)
        elif self._call is None and self._buffer and not (self._has_called and not self._buffer.strip(";" + SPACES)):
            events = self._give_up("")
        self._buffer, self._call = "", None
        return events

    def _in_call(self, letter: str) -> list[Event]:
        call = self._call
        assert call is not None
        events = call.push(letter)
        if call.state is State.DONE:
            self._call, self._has_called, self._buffer = None, True, ""
        elif call.state is State.FAILED:
            self._call = None
            if call.is_call:
                self._is_content = True
            else:
                events += self._give_up(call.raw)
        return events

    def _before_call(self, letter: str) -> list[Event]:
        if letter == "{" and self._is_prefix(whole=True):
            self._call = CallObject(self._names)
            return self._call.push(letter)
        self._buffer += letter
        if ends_in_spaces(self._buffer):  # still whitespace: keep holding it back
            return []
        return [] if self._is_prefix(whole=False) else self._give_up("")

    def _is_prefix(self, *, whole: bool) -> bool:
        """True if the buffer may precede a call: spaces, the tag, and a semicolon between two calls."""
        rest = self._buffer.lstrip()
        if self._has_called:
            return rest in ("", ";") or (rest[0] == ";" and not rest[1:].strip())
        if not whole and PYTHON_TAG.startswith(rest):
            return True
        return rest == "" or (rest.startswith(PYTHON_TAG) and not rest.removeprefix(PYTHON_TAG).strip())

    def _give_up(self, raw: str) -> list[Event]:
        text, self._buffer, self._is_content = self._buffer + raw, "", True
        return [Content(text)] if text else []

"""Calls between `<tool_call>` and `</tool_call>`, as Hermes and Qwen write them."""

from ferrum_jax.serve.tools.events import Content, Event, ToolParser, ends_in_spaces, settled
from ferrum_jax.serve.tools.json_call import CallObject, State

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class TaggedCalls(ToolParser):
    """Reads calls in tags; text outside of them is content, without the spaces beside a call."""

    def __init__(self) -> None:
        self._buffer = ""  # content that may still be the beginning of a tag, or spaces before one
        self._call: CallObject | None = None
        self._after_call = False

    def read(self, letter: str) -> list[Event]:
        """Takes the next character."""
        return self._in_call(letter) if self._call is not None else self._outside(letter)

    def finish(self) -> list[Event]:
        """Returns the events of the text that was held back."""
        events: list[Event] = []
        if self._call is not None and not self._call.is_call:
            events.append(Content(OPEN + self._call.raw))
        elif self._buffer and not self._after_call:  # after a call, what is held back may only begin a tag
            events.append(Content(self._buffer))
        self._buffer, self._call = "", None
        return events

    def _in_call(self, letter: str) -> list[Event]:
        call = self._call
        assert call is not None
        events = call.push(letter)
        if call.state is State.DONE:
            self._call, self._after_call = None, True
        elif call.state is State.FAILED:
            self._call, self._after_call = None, call.is_call
            if not call.is_call:
                events.append(Content(OPEN + call.raw[:-1]))
            events += self._outside(letter)  # which may begin a tag
        return events

    def _outside(self, letter: str) -> list[Event]:
        self._buffer += letter
        if ends_in_spaces(self._buffer):  # still whitespace: keep holding it back
            return []
        if self._buffer.endswith(OPEN):
            before, self._buffer, self._call = self._buffer[: -len(OPEN)].rstrip(), "", CallObject()
            return [Content(before)] if before else []
        if self._after_call:
            if self._buffer.endswith(CLOSE) and self._buffer.strip() == CLOSE:
                self._buffer = ""
                return []
            rest = self._buffer.lstrip()
            if CLOSE.startswith(rest) or OPEN.startswith(rest):
                return []
            self._after_call, self._buffer = False, rest
        text = settled(self._buffer, [OPEN]).rstrip()
        self._buffer = self._buffer[len(text) :]
        return [Content(text)] if text else []

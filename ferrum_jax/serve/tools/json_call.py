"""`CallObject`: a JSON object that names a function and its arguments, read one character at a time."""

import json
from collections.abc import Callable, Collection
from enum import Enum, auto

from ferrum_jax.serve.tools.events import Arguments, CallBegin, Event

SPACES = " \t\r\n"


class State(Enum):
    """How far the reading of an object is."""

    READING = auto()
    DONE = auto()
    FAILED = auto()  # the text is not a call


class JsonValue:
    """Finds the end of one JSON value; it counts brackets and does not check what is inside them."""

    def __init__(self) -> None:
        self._depth = 0
        self.in_text = False  # inside a string
        self._escaped = False
        self._begun = False
        self.is_scalar = False  # a number or a word, which the character after it ends

    def takes(self, letter: str) -> bool:
        """Takes the next character and returns whether the value goes on after it.

        A number or a word (`is_scalar`) ends with the character after it, which is not part of the value.
        """
        if not self._begun:
            self._begun = True
            self.in_text = letter == '"'
            self._depth = int(letter in "[{")
            self.is_scalar = not self.in_text and not self._depth
            return True
        if self.is_scalar:
            return letter not in ",}]" + SPACES
        if self.in_text:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self.in_text = False
            return self.in_text or self._depth > 0
        if letter == '"':
            self.in_text = True
        elif letter in "[{":
            self._depth += 1
        elif letter in "]}":
            self._depth -= 1
        return self._depth > 0


class CallObject:
    """Reads `{"name": …, "arguments": {…}}`, in either order; arguments stream once the name is known.

    Arguments may also be named `parameters`, and may be a string that holds their JSON. Other fields are ignored. `raw`
    holds the text read so far, which is content if the object is not a call.
    """

    def __init__(self, names: Collection[str] | None = None):
        """Takes the function names that make an object a call; None: any name does."""
        self.state = State.READING
        self.raw = ""
        self._names = names
        self._name: str | None = None
        self._arguments = ""  # text of them that is read and not reported yet
        self._has_arguments = False
        self._is_told = False
        self._key = ""
        self._part = ""
        self._value = JsonValue()
        self._step: Callable[[str], list[Event]] = self._open

    @property
    def is_call(self) -> bool:
        """True once a call was reported, which cannot be undone."""
        return self._name is not None and (self._has_arguments or self.state is State.DONE)

    def push(self, letter: str) -> list[Event]:
        """Takes the next character."""
        self.raw += letter
        return self._step(letter)

    def _fail(self) -> list[Event]:
        self.state = State.FAILED
        return []

    def _open(self, letter: str) -> list[Event]:
        if letter != "{":
            return [] if letter in SPACES else self._fail()
        self._step = self._before_key
        return []

    def _before_key(self, letter: str) -> list[Event]:
        if letter in SPACES:
            return []
        if letter == "}":
            return self._close()
        if letter != '"':
            return self._fail()
        self._part, self._value, self._step = '"', JsonValue(), self._in_key
        self._value.takes('"')
        return []

    def _in_key(self, letter: str) -> list[Event]:
        self._part += letter
        if not self._value.takes(letter):
            key = _loaded(self._part)
            if not isinstance(key, str):
                return self._fail()
            self._key, self._step = key, self._colon
        return []

    def _colon(self, letter: str) -> list[Event]:
        if letter in SPACES:
            return []
        if letter != ":":
            return self._fail()
        self._step = self._begin_value
        return []

    def _begin_value(self, letter: str) -> list[Event]:
        if letter in SPACES:
            return []
        if letter in ",}]:":
            return self._fail()
        self._part, self._value, self._step = letter, JsonValue(), self._in_value
        self._value.takes(letter)
        if self._key in ("arguments", "parameters") and letter == "{" and not self._has_arguments:
            self._step = self._in_arguments
            self._has_arguments = True
            self._arguments = letter
            return self._tell()
        return []

    def _in_arguments(self, letter: str) -> list[Event]:
        if not self._value.takes(letter):
            self._step = self._after_value
        self._arguments += letter
        return self._tell()

    def _tell(self) -> list[Event]:
        """Returns the new text of the arguments as events, if the name is known."""
        if self._name is None or not self._arguments:
            return []
        text, self._arguments = self._arguments, ""
        return [Arguments(text)] if self._is_told else self._begin(text)

    def _begin(self, text: str) -> list[Event]:
        assert self._name is not None
        self._is_told = True
        return [CallBegin(self._name), Arguments(text)]

    def _in_value(self, letter: str) -> list[Event]:
        goes_on = self._value.takes(letter)
        if goes_on or not self._value.is_scalar:
            self._part += letter
        if goes_on:
            return []
        self._step = self._after_value
        events = self._take_value()
        if self._value.is_scalar and self.state is State.READING:
            events += self._after_value(letter)
        return events

    def _take_value(self) -> list[Event]:
        if self._key == "name":
            name = _loaded(self._part)
            if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
                return self._fail()
            if self._name is None:
                self._name = name
            return self._tell()
        if self._key in ("arguments", "parameters") and not self._has_arguments:
            held = _loaded(self._part)
            if held is None:
                held = "{}"
            if not isinstance(held, str):
                return self._fail()
            self._has_arguments, self._arguments = True, held
            return self._tell()
        return []

    def _after_value(self, letter: str) -> list[Event]:
        if letter in SPACES:
            return []
        if letter == ",":
            self._step = self._before_key
            return []
        return self._close() if letter == "}" else self._fail()

    def _close(self) -> list[Event]:
        if self._name is None:
            return self._fail()
        self.state = State.DONE
        return [] if self._is_told else self._begin("{}")


def _loaded(text: str) -> object:
    """Returns a JSON value; for text that is not JSON, a tuple, which no JSON value is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return ()

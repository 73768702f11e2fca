"""`CallObject`: a JSON object that names a function and its arguments, read one character at a time."""

import json
from collections.abc import Collection, Generator
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


def is_complete(text: str) -> bool:
    """Whether text is not cut off if it is an object, list or string of JSON."""
    text, value = text.lstrip(SPACES), JsonValue()
    if text and text[0] not in '{["':
        return True
    return not all(map(value.takes, text))


class CallObject:
    """Reads `{"name": …, "arguments": {…}}`, in either order; arguments stream once the name is known.

    Arguments may also be named `parameters`, and may be a string that holds their JSON. Other fields are ignored. `raw`
    holds the text read so far, which is content if the object is not a call.
    """

    def __init__(self, names: Collection[str] | None = None):
        """Takes the function names that make an object a call; None: any name does."""
        self.state = State.READING
        self._raw: list[str] = []
        self._names = names
        self._name: str | None = None
        self._arguments: list[str] = []  # text of them that is read and not reported yet
        self._has_arguments = False
        self._is_told = False
        self._events: list[Event] = []  # of the character being read
        self._reading = self._read()
        next(self._reading)

    @property
    def raw(self) -> str:
        """The text read so far."""
        return "".join(self._raw)

    @property
    def is_call(self) -> bool:
        """True once a call was reported, which cannot be undone."""
        return self._name is not None and (self._has_arguments or self.state is State.DONE)

    def push(self, letter: str) -> list[Event]:
        """Takes the next character."""
        self._raw.append(letter)
        self._events = []
        if self.state is not State.READING:
            return []
        try:
            self._reading.send(letter)
        except StopIteration as end:
            self.state = end.value
        return self._events

    def _read(self) -> Generator[None, str, State]:
        """Reads the object; each character is sent."""
        if (yield from _next_letter()) != "{":
            return State.FAILED
        while (letter := (yield from _next_letter())) != "}":
            key = _loaded((yield from _value(letter))[0]) if letter == '"' else None
            if not isinstance(key, str) or (yield from _next_letter()) != ":":
                return State.FAILED
            letter, after = (yield from _next_letter()), ""
            if letter in ",}]:":
                return State.FAILED
            if key in ("arguments", "parameters") and letter == "{" and not self._has_arguments:
                yield from self._stream_arguments(letter)
            else:
                text, after = yield from _value(letter)
                if not self._take_value(key, _loaded(text)):
                    return State.FAILED
            after = after.strip(SPACES) or (yield from _next_letter())
            if after == "}":
                break
            if after != ",":
                return State.FAILED
        if self._name is None:
            return State.FAILED
        if not self._is_told:
            self._tell("{}")
        return State.DONE

    def _stream_arguments(self, letter: str) -> Generator[None, str, None]:
        self._has_arguments, value = True, JsonValue()
        while value.takes(letter):
            self._tell(letter)
            letter = yield
        self._tell(letter)

    def _take_value(self, key: str, value: object) -> bool:
        """Takes a field's value; False if it makes the object no call."""
        if key == "name":
            if not isinstance(value, str) or not value or (self._names is not None and value not in self._names):
                return False
            self._name = self._name or value
            self._tell()
        elif key in ("arguments", "parameters") and not self._has_arguments:
            value = "{}" if value is None else value
            if not isinstance(value, str):
                return False
            self._has_arguments = True
            self._tell(value)
        return True

    def _tell(self, arguments: str = "") -> None:
        """Reports the text of the arguments that is not reported yet, if the name is known."""
        if arguments:
            self._arguments.append(arguments)
        if self._name is not None and self._arguments:
            begin = [] if self._is_told else [CallBegin(self._name)]
            self._events += [*begin, Arguments("".join(self._arguments))]
            self._arguments, self._is_told = [], True


def _next_letter() -> Generator[None, str, str]:
    """Returns the next character that is no space."""
    while (letter := (yield)) in SPACES:
        pass
    return letter


def _value(letter: str) -> Generator[None, str, tuple[str, str]]:
    """Reads a value from its first character on; returns its text, and the character after it if that ended it."""
    value, text = JsonValue(), ""
    while value.takes(letter):
        text += letter
        letter = yield
    return (text, letter) if value.is_scalar else (text + letter, "")


def _loaded(text: str) -> object:
    """Returns a JSON value; for text that is not JSON, a tuple, which no JSON value is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return ()

"""What a parser finds in a text, piece by piece."""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The next call, of a function."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the last call's arguments, which are JSON when they are complete."""

    text: str


Event: TypeAlias = Content | Reasoning | CallBegin | Arguments


class ToolParser(Protocol):
    """Reads one answer as it comes; what it finds does not depend on how the text is cut into pieces."""

    def push(self, text: str) -> list[Event]:
        """Takes the next piece and returns what it settles."""
        return joined(event for letter in text for event in self.read(letter))

    def read(self, letter: str) -> list[Event]:
        """Takes the next letter and returns what it settles."""
        ...

    def finish(self) -> list[Event]:
        """Returns what was held back."""
        ...


@dataclass
class Call:
    """One call, complete once all of the answer is read."""

    name: str
    arguments: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether its arguments are JSON."""
        try:
            json.loads(self.arguments)
        except ValueError:
            return False
        return True


@dataclass
class Parsed:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def take(self, events: Iterable[Event]) -> None:
        """Adds what was found."""
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegin(name):
                    self.calls.append(Call(name))
                case Arguments(text):
                    self.calls[-1].arguments += text


def settled(text: str, marks: Collection[str]) -> str:
    """Returns a text without the end that may be the beginning of a mark."""
    sizes = range(min(max(map(len, marks)) - 1, len(text)), 0, -1)
    held = next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)
    return text[: len(text) - held]


def joined(events: Iterable[Event]) -> list[Event]:
    """Joins neighbours of one kind."""
    made: list[Event] = []
    for event in events:
        if made and type(made[-1]) is type(event) and hasattr(event, "text"):
            made[-1] = type(event)(made[-1].text + event.text)  # type: ignore[union-attr, call-arg]
        else:
            made.append(event)
    return made

"""The events that parsers find in an answer, and the parsers' interface."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The beginning of the next call, with the function's name."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More text of the last call's arguments, which are JSON once complete."""

    text: str


Event: TypeAlias = Content | Reasoning | CallBegin | Arguments


class ToolParser(Protocol):
    """Reads one answer as it comes; its events do not depend on how the text is cut into pieces."""

    def push(self, text: str) -> list[Event]:
        """Takes the next piece and returns the events that are then certain."""
        return joined(event for letter in text for event in self.read(letter))

    def read(self, letter: str) -> list[Event]:
        """Takes the next character and returns the events that are then certain."""
        ...

    def finish(self) -> list[Event]:
        """Returns the events of the text that was held back, at the end of the answer."""
        ...


@dataclass
class Call:
    """One call, complete once the whole answer is read."""

    name: str
    arguments: str = ""


@dataclass
class Parsed:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def take(self, events: Iterable[Event]) -> None:
        """Adds events."""
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
    """Returns a text without the longest suffix that may be the beginning of a mark."""
    sizes = range(min(max(map(len, marks)) - 1, len(text)), 0, -1)
    held = next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)
    return text[: len(text) - held]


def ends_in_spaces(text: str) -> bool:
    """Whether the last two characters are whitespace; takes the same time however long the text is."""
    return len(text) > 1 and text[-2:].isspace()


def joined(events: Iterable[Event]) -> list[Event]:
    """Joins neighbouring text events of the same kind."""
    made: list[Event] = []
    for event in events:
        if made and type(made[-1]) is type(event) and hasattr(event, "text"):
            made[-1] = type(event)(made[-1].text + event.text)  # type: ignore[union-attr, call-arg]
        else:
            made.append(event)
    return made

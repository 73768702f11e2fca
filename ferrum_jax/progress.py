"""A progress bar on standard error for work that takes seconds or more; silent where nobody watches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress

Bar = Callable[[Iterable[Any]], AbstractContextManager[Iterable[Any]]]


def track(what: str) -> Bar:
    """Returns a function that makes a context of items: each that is taken moves a bar, which the end removes."""
    return partial(_tracked, what)


@contextmanager
def _tracked(what: str, items: Iterable[Any]) -> Iterator[Iterable[Any]]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield items
        return
    with Progress(console=console, transient=True) as progress:
        yield progress.track(items, description=what)

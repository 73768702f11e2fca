"""A progress bar on standard error for work that takes seconds or more; silent where nobody watches."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


class Track:
    """Wraps a list so that walking over it moves a bar."""

    def __init__(self, what: str):
        self._what = what

    def __call__(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items one by one."""
        console = Console(stderr=True)
        listed = list(items)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(self._what, total=len(listed))
            for item in listed:
                yield item
                bar.advance(task)

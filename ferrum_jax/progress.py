"""A progress bar on standard error for work that takes seconds or more; silent where nobody watches."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import rich.progress
from rich.console import Console

Bar = Callable[[Iterable[Any]], Iterable[Any]]


def track(what: str) -> Bar:
    """Returns a function that yields the items of a list and moves a bar."""
    console = Console(stderr=True)
    is_seen = console.is_terminal  # elsewhere rich would start a thread all the same
    return partial(
        rich.progress.track,
        description=what,
        console=console,
        transient=True,
        auto_refresh=is_seen,
        disable=not is_seen,
    )

"""Wall-clock times of calls that take turns, behind a fence, with compiling refused."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
PAUSE = 0.02  # seconds before a turn, in which another library's threads stop spinning


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contestant:
    """A call to time, and what puts everything back to where it was before; that is not timed."""

    run: Callable[[], Any]
    restore: Callable[[], None] = _nothing
    burst: int = 1  # calls in a row, each timed


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one contestant."""

    median: float
    p90: float
    p10: float
    count: int


def alternate(contestants: Mapping[str, Contestant], *, rounds: int, pause: float = PAUSE) -> dict[str, Timing]:
    """Times contestants in turn, the first round warms and does not count.

    Raises:
        RuntimeError: JAX compiled something in a round that counts.
    """
    _take_turns(contestants, pause)
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    with refuse_compiles():
        for _ in range(rounds):
            for name, spent in _take_turns(contestants, pause).items():
                samples[name] += spent
    return {name: summarise(spent) for name, spent in samples.items()}


def _take_turns(contestants: Mapping[str, Contestant], pause: float) -> dict[str, list[float]]:
    spent: dict[str, list[float]] = {name: [] for name in contestants}
    for name, contestant in contestants.items():
        time.sleep(pause)
        for _ in range(contestant.burst):
            contestant.restore()
            started = time.perf_counter()
            jax.block_until_ready(contestant.run())
            spent[name].append((time.perf_counter() - started) * 1e3)
    return spent


def summarise(milliseconds: list[float]) -> Timing:
    """Gives the median, the ninetieth percentile and the tenth of some times."""
    ordered = sorted(milliseconds)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.9 * last)], ordered[round(0.1 * last)], len(ordered))


@contextmanager
def refuse_compiles() -> Iterator[None]:
    """Raises at the end of the block if JAX compiled anything in it: such times would be of the compiler."""
    compiled: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    if compiled:
        raise RuntimeError(f"{len(compiled)} compiles took {sum(compiled):.2f} s while something was timed")

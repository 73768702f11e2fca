"""Wall-clock times of calls that take turns, behind a fence, with compiling refused."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.monitoring
import numpy as np

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
PAUSE = 0.02  # seconds before a turn, in which another library's threads stop spinning


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contestant:
    """A call to time, and what puts everything back to where it was before; that is not timed.

    JAX arrays that the call gives are waited for. Looking for them in what has none is not timed either.
    """

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
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    fences = {name: _warm(contestant) for name, contestant in contestants.items()}
    with forbid_compiles():
        for _ in range(rounds):
            for name, contestant in contestants.items():
                time.sleep(pause)
                samples[name] += _burst(contestant, fences[name])
    return {name: summarise(spent) for name, spent in samples.items()}


def _warm(contestant: Contestant) -> Callable[[Any], Any]:
    """Runs a burst that does not count; gives what waits for such results."""
    result = None
    for _ in range(contestant.burst):
        contestant.restore()
        result = jax.block_until_ready(contestant.run())
    has_arrays = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result))
    return jax.block_until_ready if has_arrays else lambda _: None


def _burst(contestant: Contestant, fence: Callable[[Any], Any]) -> list[float]:
    """Returns the milliseconds of each call of a burst."""
    spent = []
    for _ in range(contestant.burst):
        contestant.restore()
        started = time.perf_counter()
        fence(contestant.run())
        spent.append((time.perf_counter() - started) * 1e3)
    return spent


def summarise(milliseconds: list[float]) -> Timing:
    """Returns the median, the ninetieth percentile and the tenth of some times."""
    low, high = percentile(milliseconds, 0.1), percentile(milliseconds, 0.9)
    return Timing(statistics.median(milliseconds), high, low, len(milliseconds))


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value that stands at `share` of the way from the least to the largest, one that was measured."""
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


@dataclass(frozen=True)
class Line:
    """The straight line nearest to some points."""

    slope: float
    intercept: float
    residual: float  # root of the mean square, in the unit of the points


def fit_line(at: Sequence[float], values: Sequence[float]) -> Line:
    """Fits by least squares; two points at least, at different places."""
    slope, intercept = np.polyfit(at, values, 1)
    off = np.asarray(values) - (slope * np.asarray(at) + intercept)
    return Line(float(slope), float(intercept), float(np.sqrt(np.mean(off**2))))


@contextmanager
def count_compiles() -> Iterator[list[float]]:
    """Yields a list that grows by the seconds of everything that JAX compiles in the block."""
    compiled: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextmanager
def forbid_compiles() -> Iterator[None]:
    """Raises at the end of the block if JAX compiled anything in it: such times would be of the compiler."""
    with count_compiles() as compiled:
        yield
    if compiled:
        raise RuntimeError(f"{len(compiled)} compiles took {sum(compiled):.2f} s while something was timed")

"""Requests on their way through one scheduler, and when each of their tokens came."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.timing import percentile
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.scheduler import Scheduler
from ferrum_jax.generate.stops import StopWatcher

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Arrival:
    """A request before it is there."""

    at: float  # seconds from the start
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass
class Served:
    """What became of a request; seconds are from the start."""

    due: float  # when it arrived, whatever the scheduler was doing
    num_prompt: int  # tokens
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from its arrival to its first token."""
        return (self.token_times[0] - self.due) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Milliseconds for each token after the first, on average; 0 where there is none."""
        steps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / steps * 1e3 if steps else 0.0


class Traffic:
    """Drives a scheduler from one thread."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._started = time.perf_counter()
        self._live: list[tuple[Request, Served]] = []
        self.num_tokens = 0  # generated so far

    def __len__(self) -> int:
        return len(self._live)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def submit(self, arrival: Arrival) -> None:
        """Queues a request; it counts from when it was to arrive."""
        params = arrival.params
        assert params.max_tokens is not None, "an answer without an end"
        request = Request(
            cache_id=self._scheduler.new_cache_id(),
            prompt=arrival.prompt,
            params=params,
            seed=params.seed or 0,
            stop_ids=frozenset(),
            limit=params.max_tokens,
            detokenizer=None,
            watcher=StopWatcher(()),
        )
        self._scheduler.submit(request)
        self._live.append((request, Served(arrival.at, len(arrival.prompt))))

    def abort(self, index: int) -> None:
        """Aborts one of the live requests."""
        request, _ = self._live.pop(index)
        self._scheduler.abort(request)

    def step(self) -> list[Served]:
        """Runs one step; gives the requests that it finished. What made one fail is raised."""
        self._scheduler.step()
        now, finished = self.now, []
        for request, served in self._live:
            if request.error is not None:
                raise request.error
            new = len(request.answer) - len(served.token_times)
            served.token_times += [now] * new
            self.num_tokens += new
            if request.is_done:
                finished.append(served)
        self._live = [(request, served) for request, served in self._live if not request.is_done]
        return finished


def serve(scheduler: Scheduler, arrivals: Iterable[Arrival]) -> tuple[list[Served], float]:
    """Serves requests that arrive when they do, ready or not; gives what became of them, and the seconds it took."""
    traffic, coming, finished = Traffic(scheduler), deque(sorted(arrivals, key=lambda arrival: arrival.at)), []
    while coming or len(traffic):
        while coming and coming[0].at <= traffic.now:
            traffic.submit(coming.popleft())
        if len(traffic):
            finished += traffic.step()
        else:
            time.sleep(max(0.0, coming[0].at - traffic.now))
    return finished, traffic.now


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Draws the times, in seconds, of `count` arrivals, each independent of the others, `rate` a second on average."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)).tolist()


def goodput(served: Sequence[Served], seconds: float, *, ttft_ms: float, tpot_ms: float) -> float:
    """Requests a second that kept within both limits."""
    return sum(one.ttft_ms <= ttft_ms and one.tpot_ms <= tpot_ms for one in served) / seconds


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns the median and two percentiles of some milliseconds, as a row's columns."""
    return {f"{name}_{share}_ms": percentile(values, at) for share, at in SHARES.items()}

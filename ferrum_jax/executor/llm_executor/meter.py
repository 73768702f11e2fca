"""What an executor has done, how long it took, and what it is doing now."""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ferrum_jax.contract.execution import ExecutorMemoryUsage, ExecutorMetrics

Kind = Literal["prefill", "decode"]
WINDOW = 1024  # latest calls of a kind, whose latencies give the 95th percentile


@dataclass
class _Tally:
    """Calls of one kind."""

    operations: int = 0
    busy_seconds: float = 0.0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # ms

    @property
    def average_ms(self) -> float:
        return self.busy_seconds * 1000 / self.operations if self.operations else 0.0


class Meter:
    """Counts calls that ran to their end; a latency is the time a call had the model, waiting not included."""

    def __init__(self, max_batch_size: int):
        self._max_batch_size = max_batch_size
        self._mutex = threading.Lock()
        self._tallies: dict[Kind, _Tally] = {"prefill": _Tally(), "decode": _Tally()}
        self._tokens = 0
        self._filled = 0.0  # sum over calls of rows / max_batch_size
        self._running_rows = 0
        self._last_operation: float | None = None

    @contextlib.contextmanager
    def measured(self, kind: Kind, num_rows: int, num_tokens: int) -> Iterator[None]:
        """Shows a call as running, and counts it if it succeeds."""
        begun = time.perf_counter()
        with self._mutex:
            self._running_rows += num_rows
        try:
            yield
        except BaseException:
            with self._mutex:
                self._running_rows -= num_rows
            raise
        seconds = time.perf_counter() - begun
        with self._mutex:
            self._running_rows -= num_rows
            self._last_operation = time.monotonic()
            self._tokens += num_tokens
            self._filled += min(1.0, num_rows / self._max_batch_size)
            tally = self._tallies[kind]
            tally.operations += 1
            tally.busy_seconds += seconds
            tally.latest.append(seconds * 1000)

    @property
    def running_rows(self) -> int:
        """Rows of the call that runs now; 0 when none does."""
        return self._running_rows

    @property
    def last_operation(self) -> float | None:
        """When the last call ended, in seconds of `time.monotonic()`."""
        return self._last_operation

    def operations(self, kind: Kind) -> int:
        """Calls of a kind."""
        return self._tallies[kind].operations

    def average_ms(self, kind: Kind) -> float:
        """Mean latency of all calls of a kind; 0 before the first."""
        with self._mutex:
            return self._tallies[kind].average_ms

    def metrics(self, memory: ExecutorMemoryUsage) -> ExecutorMetrics:
        """Gives everything counted, with the share of allocated memory that is in use."""
        with self._mutex:
            prefill, decode = self._tallies["prefill"], self._tallies["decode"]
            operations = prefill.operations + decode.operations
            seconds = prefill.busy_seconds + decode.busy_seconds
            return ExecutorMetrics(
                total_operations=operations,
                prefill_operations=prefill.operations,
                decode_operations=decode.operations,
                avg_prefill_latency=prefill.average_ms,
                avg_decode_latency=decode.average_ms,
                p95_prefill_latency=percentile_95(prefill.latest),
                p95_decode_latency=percentile_95(decode.latest),
                throughput_tps=self._tokens / seconds if seconds else 0.0,
                memory_efficiency=memory.used_bytes / memory.allocated_bytes if memory.allocated_bytes else 0.0,
                batch_utilization=self._filled / operations if operations else 0.0,
            )


def percentile_95(values: Sequence[float]) -> float:
    """Gives the smallest value that at least 95 % do not exceed (nearest rank); 0 for no values."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else 0.0

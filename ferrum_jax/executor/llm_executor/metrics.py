"""What an executor has done, how long it took, and what it is doing now."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ferrum_jax.contract.execution import ExecutorMemoryUsage, ExecutorMetrics, ExecutorState

Kind = Literal["prefill", "decode"]
WINDOW = 1024  # latest calls of a kind, whose latencies make up the 95th percentile


@dataclass
class Tally:
    """Calls of one kind."""

    operations: int = 0
    busy_seconds: float = 0.0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # ms

    @property
    def average_ms(self) -> float:
        """Mean latency of all calls; 0 before the first."""
        return self.busy_seconds * 1000 / self.operations if self.operations else 0.0

    @property
    def p95_ms(self) -> float:
        """The smallest of the latest latencies that at least 95 % do not exceed (nearest rank); 0 before the first."""
        return float(np.quantile(self.latest, 0.95, method="inverted_cdf")) if self.latest else 0.0


class Meter:
    """Counts successful calls; a latency is the time that a call held the model, without its wait for it.

    Attributes:
        tallies: calls by kind.
        state: Ready between calls; else that of the running call: Busy, or Initializing in a warm-up.
        running_rows: rows of the running call; 0 between calls.
        last_operation: when the last call succeeded, in seconds of `time.monotonic()`.
    """

    def __init__(self, max_batch_size: int):
        self.tallies: dict[Kind, Tally] = {"prefill": Tally(), "decode": Tally()}
        self.state = ExecutorState.Ready
        self.running_rows = 0
        self.last_operation: float | None = None
        self._max_batch_size = max_batch_size
        self._mutex = threading.Lock()
        self._tokens = 0
        self._filled = 0.0  # sum over calls of rows / max_batch_size

    @contextlib.contextmanager
    def measured(
        self, kind: Kind | None, num_rows: int, num_tokens: int, state: ExecutorState = ExecutorState.Busy
    ) -> Iterator[None]:
        """Measures one call, the only one that runs; a call without a kind sets `last_operation` alone."""
        begun = time.perf_counter()
        self.state, self.running_rows = state, num_rows
        try:
            yield
            seconds = time.perf_counter() - begun
            with self._mutex:
                self.last_operation = time.monotonic()
                if kind is not None:
                    tally = self.tallies[kind]
                    tally.operations += 1
                    tally.busy_seconds += seconds
                    tally.latest.append(seconds * 1000)
                    self._tokens += num_tokens
                    self._filled += min(1.0, num_rows / self._max_batch_size)
        finally:
            self.state, self.running_rows = ExecutorState.Ready, 0

    def metrics(self, memory: ExecutorMemoryUsage) -> ExecutorMetrics:
        """Returns everything counted, with the share of allocated memory that is in use."""
        with self._mutex:
            prefill, decode = self.tallies["prefill"], self.tallies["decode"]
            operations = prefill.operations + decode.operations
            seconds = prefill.busy_seconds + decode.busy_seconds
            return ExecutorMetrics(
                total_operations=operations,
                prefill_operations=prefill.operations,
                decode_operations=decode.operations,
                avg_prefill_latency=prefill.average_ms,
                avg_decode_latency=decode.average_ms,
                p95_prefill_latency=prefill.p95_ms,
                p95_decode_latency=decode.p95_ms,
                throughput_tps=self._tokens / seconds if seconds else 0.0,
                memory_efficiency=memory.used_bytes / memory.allocated_bytes if memory.allocated_bytes else 0.0,
                batch_utilization=self._filled / operations if operations else 0.0,
            )

"""Calls on one model: one at a time, in a thread of their own, measured, and taken back when nobody wants them."""

import time
from collections.abc import Callable
from typing import TypeVar

from ferrum_jax.contract.errors import FerrumError
from ferrum_jax.contract.execution import ExecutorMetrics, ExecutorState, ExecutorStatus
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor.llm_executor.ledger import Ledger
from ferrum_jax.executor.llm_executor.meter import Kind, Meter
from ferrum_jax.executor.llm_executor.profile import UNKNOWN_MEMORY
from ferrum_jax.executor.llm_executor.savepoint import Savepoint
from ferrum_jax.executor.llm_executor.worker import Worker

T = TypeVar("T")


class CallQueue:
    """Runs the calls of one executor in order. A call that fails or is cancelled leaves the sequences as they were."""

    def __init__(self, model: DecoderOnlyLLM, max_batch_size: int):
        self.ledger = Ledger(model)
        self._model = model
        self._meter = Meter(max_batch_size)
        self._worker = Worker("llm-executor", self.ledger.lock)
        self._memory = UNKNOWN_MEMORY

    async def run(self, kind: Kind, num_rows: int, num_tokens: int, work: Callable[[Savepoint], T]) -> T:
        """Runs `work` off the event loop, counted as a call of its kind.

        Args:
            kind: which tally it belongs to.
            num_rows: sequences it works on.
            num_tokens: tokens it sends through the model.
            work: changes sequences only as far as its savepoint can put them back.
        """
        self.ledger.refuse_closed()
        point = Savepoint(self.ledger)
        asked = time.perf_counter()

        def call() -> T:
            with self.ledger.held(asked), self._meter.measured(kind, num_rows, num_tokens):
                try:
                    result = work(point)
                except BaseException:
                    point.roll_back()
                    raise
                point.settle()
                return result

        return await self._worker.run(call, lambda _: point.take_back())

    async def run_for_good(self, work: Callable[[], None]) -> None:
        """Runs `work` off the event loop, uncounted; once it has begun it is not taken back."""
        self.ledger.refuse_closed()
        asked = time.perf_counter()

        def call() -> None:
            with self.ledger.held(asked):
                work()

        await self._worker.run(call, lambda _: None)

    async def close(self, last: Callable[[], None]) -> None:
        """Lets the running call finish, refuses those that wait, releases every sequence and runs `last`."""
        self.ledger.close()

        def drop() -> None:
            with self.ledger.lock:
                self.ledger.drop_all()
                last()

        await self._worker.close(drop)

    def status(self) -> ExecutorStatus:
        """How things are now; waits for no call of this executor."""
        state = self._state()
        self._refresh_memory()
        return ExecutorStatus(
            state=state,
            is_ready=state in (ExecutorState.Ready, ExecutorState.Busy),
            current_batch_size=self._meter.running_rows,
            prefill_operations=self._meter.operations("prefill"),
            decode_operations=self._meter.operations("decode"),
            avg_prefill_time_ms=self._meter.average_ms("prefill"),
            avg_decode_time_ms=self._meter.average_ms("decode"),
            memory_usage=self._memory,
            last_operation=self._meter.last_operation,
        )

    def metrics(self) -> ExecutorMetrics:
        """Latencies and rates so far; waits for no call of this executor."""
        self._refresh_memory()
        return self._meter.metrics(self._memory)

    def _state(self) -> ExecutorState:
        if self.ledger.is_closed:
            return ExecutorState.Shutdown
        if self._model.state is not ExecutorState.Ready:
            return self._model.state
        return ExecutorState.Busy if self._meter.running_rows else ExecutorState.Ready

    def _refresh_memory(self) -> None:
        """Asks the model for its memory, unless a call runs or it cannot tell any more."""
        if not self.ledger.lock.acquire(blocking=False):
            return
        try:
            told = None if self.ledger.is_closed else self._model.memory_usage()
        except FerrumError:
            told = None
        finally:
            self.ledger.lock.release()
        self._memory = told or UNKNOWN_MEMORY

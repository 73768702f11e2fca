"""The thread that runs an executor's calls, one after another, and undoes those whose caller was cancelled."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from ferrum_jax.contract.errors import CancelledError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.executor.llm_executor.metrics import Kind, Meter
from ferrum_jax.executor.llm_executor.requests import RowRequest
from ferrum_jax.executor.llm_executor.sequences import SequenceTable, UndoLog

T = TypeVar("T")
Work = Callable[[UndoLog, Sequence[RowRequest]], T]


class _Call(Generic[T]):
    """One call, which its caller may abandon at any time."""

    def __init__(
        self, table: SequenceTable, meter: Meter, kind: Kind | None, rows: Sequence[RowRequest], work: Work[T],
        state: ExecutorState,
    ):  # fmt: skip
        self._log = UndoLog(table)
        self._measured = meter.measured(kind, len(rows), sum(len(row.tokens) for row in rows), state)
        self._rows = rows
        self._work = work
        self._asked = time.perf_counter()
        self._mutex = threading.Lock()
        self._is_done = False
        self._is_abandoned = False

    def run(self) -> T:
        """Runs in the worker thread. Holds the table throughout: no other thread sees what is about to be undone."""
        with self._log.table.held(self._asked):
            with self._measured:
                try:
                    result = self._work(self._log, self._rows)
                except BaseException:
                    self._log.undo()
                    raise
                self._log.seal()
            with self._mutex:
                self._is_done, is_abandoned = True, self._is_abandoned
            if is_abandoned:
                self._log.undo()
        return result

    def abandon(self) -> bool:
        """Has a running call undone when it ends; True if it has ended, so that the caller must call `undo`."""
        with self._mutex:
            self._is_abandoned = True
            return self._is_done

    def undo(self) -> None:
        """Undoes a call that has ended, except for sequences that other calls have changed since."""
        self._log.undo()


class CallWorker:
    """Runs calls one after another in a thread of its own, in order of arrival.

    A caller that is cancelled waits until its call is over and undone; a call that has not begun never begins.
    """

    def __init__(self, table: SequenceTable, meter: Meter):
        """Starts no thread yet."""
        self._table = table
        self._meter = meter
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llm-executor")
        self._mutex = threading.Lock()
        self._closing: Future[None] | None = None

    async def run(
        self, kind: Kind | None, rows: Sequence[RowRequest], work: Work[T], state: ExecutorState = ExecutorState.Busy
    ) -> T:
        """Runs `work(log, rows)` off the event loop and returns its result.

        Args:
            kind: how the call is counted; None is not counted.
            rows: its sequences and tokens.
            work: changes sequences only as its undo log records; without records it is not undone.
            state: of the executor while it runs.
        """
        self._table.check_open()
        call = _Call(self._table, self._meter, kind, rows, work, state)
        with self._mutex:
            if self._closing is not None:
                raise CancelledError("this executor is shut down")
            future = self._pool.submit(call.run)
        try:
            await when_done(future)
        except BaseException as reason:  # cancelled, or the loop is gone and closes its coroutines
            rest = self._abandon(call, future)
            if isinstance(reason, asyncio.CancelledError):
                await wait_through_cancellation(rest)
            raise
        return future.result()

    async def close(self, last: Callable[[], None]) -> None:
        """Finishes the running call, refuses those that wait, releases every sequence, and runs `last` once.

        A second close waits for the first.
        """
        self._table.close()
        with self._mutex:
            if self._closing is None:
                self._closing = self._pool.submit(self._release_all, last)
                self._pool.shutdown(wait=False)
        await when_done(self._closing)
        self._closing.result()

    def _release_all(self, last: Callable[[], None]) -> None:
        with self._table.lock:
            self._table.release_all()
            last()

    def _abandon(self, call: _Call[Any], future: Future[Any]) -> Future[Any]:
        """Returns the future after which the call has left no trace."""
        if future.cancel() or not call.abandon():
            return future
        with self._mutex:
            if self._closing is None:
                return self._pool.submit(call.undo)
        return self._closing  # which releases every sequence


def when_done(future: Future[Any]) -> "asyncio.Future[None]":
    """Returns an awaitable that ends with `future`, whatever its outcome; cancelling it leaves `future` alone."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def report(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result(None))

    future.add_done_callback(report)
    return done


async def wait_through_cancellation(future: Future[Any]) -> None:
    """Waits until `future` is done, however often the caller is cancelled meanwhile."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await when_done(future)

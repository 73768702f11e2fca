"""The thread that runs an executor's calls, one after another, and undoes those whose caller was cancelled."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

from ferrum_jax.contract.checks import check_not_forked, with_thread
from ferrum_jax.contract.errors import CancelledError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.executor.llm_executor.metrics import Kind, Meter
from ferrum_jax.executor.llm_executor.requests import RowRequest
from ferrum_jax.executor.llm_executor.sequences import TrackedSequences, UndoLog

T = TypeVar("T")


class CallWorker:
    """Runs calls one after another in a thread of its own, in order of arrival.

    A caller that is cancelled waits until its call has ended and is undone; a call that has not begun never begins.
    """

    def __init__(self, table: TrackedSequences, meter: Meter):
        """Starts the thread; raises ResourceExhaustedError if it cannot."""
        self._table = table
        self._meter = meter
        self._pool = with_thread(ThreadPoolExecutor(max_workers=1, thread_name_prefix="llm-executor"))
        self._mutex = threading.Lock()
        self._closing: Future[None] | None = None

    async def run(
        self,
        kind: Kind | None,
        rows: Sequence[RowRequest],
        work: Callable[[UndoLog, Sequence[RowRequest]], T],
        state: ExecutorState = ExecutorState.Busy,
    ) -> T:
        """Runs `work(log, rows)` off the event loop and returns its result.

        Args:
            kind: how the call is counted; None is not counted.
            rows: its sequences and tokens; a counted call without any returns `[]` at once.
            work: changes sequences only as its undo log records; without records it is not undone.
            state: of the executor while it runs.
        """
        if kind is not None and not rows:
            return cast(T, [])
        self._table.check_open()
        check_not_forked("executor", self._table.pid)  # there the pool has no thread
        log, asked = UndoLog(self._table), time.perf_counter()

        def call() -> T:
            num_tokens = sum(len(row.tokens) for row in rows)
            # The lock is held throughout: no other thread sees what is about to be undone.
            with self._table.held(asked), self._meter.measured(kind, len(rows), num_tokens, state):
                try:
                    result = work(log, rows)
                    if log.seal():
                        raise CancelledError("the caller was cancelled meanwhile")
                except BaseException:
                    log.undo()
                    raise
                return result

        future = self._submit(call)
        if future is None:
            raise CancelledError("this executor is shut down")
        try:
            await when_done(future)
        except BaseException as reason:  # cancelled, or the loop is gone and closes its coroutines
            rest = future
            if not future.cancel() and log.abandon() and (rest := self._submit(log.undo)) is None:
                rest = self._closing
                assert rest is not None
                rest.add_done_callback(lambda _: log.undo())
            if isinstance(reason, asyncio.CancelledError) and rest is not None:
                await wait_through_cancellation(rest)
            raise
        return future.result()

    async def close(self, last: Callable[[], None]) -> None:
        """Finishes the running call, refuses those that wait, releases every sequence, and runs `last` once.

        A second close waits for the first.
        """
        check_not_forked("executor", self._table.pid)
        self._table.is_closed = True
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

    def _submit(self, work: Callable[[], T]) -> Future[T] | None:
        """Queues work; None once the worker closes."""
        with self._mutex:
            return None if self._closing else self._pool.submit(work)


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

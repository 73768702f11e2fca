"""One thread that runs device calls for event loops, and takes back what its caller no longer wants."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from ferrum_jax.contract.errors import CancelledError

T = TypeVar("T")


class _Job(Generic[T]):
    """One call, which its caller may abandon at any time."""

    def __init__(self, call: Callable[[], T], take_back: Callable[[T], None], lock: AbstractContextManager[Any]):
        self._lock = lock
        self._call = call
        self._take_back = take_back
        self._mutex = threading.Lock()
        self._is_abandoned = False
        self._results: list[T] = []  # of the call, once it is done

    def run(self) -> T:
        with self._lock:  # so that nobody sees what is about to be taken back
            result = self._call()
            with self._mutex:
                self._results.append(result)
                is_abandoned = self._is_abandoned
            if is_abandoned:
                self.take_back()
        return result

    def abandon(self) -> bool:
        """Says whether the call is done already, so that its caller has to have it taken back."""
        with self._mutex:
            self._is_abandoned = True
            return bool(self._results)

    def take_back(self) -> None:
        self._take_back(self._results[0])


class Worker:
    """Runs calls one after another in a thread of its own.

    A caller that is cancelled waits until its call is over and taken back; a call that has not begun never begins.
    """

    def __init__(self, name: str, lock: AbstractContextManager[Any] | None = None):
        """Starts no thread yet.

        Args:
            name: what its thread is called.
            lock: re-entrant; held through a call and its taking back, if given.
        """
        self._lock = contextlib.nullcontext() if lock is None else lock
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._mutex = threading.Lock()
        self._closing: Future[None] | None = None

    async def run(self, call: Callable[[], T], take_back: Callable[[T], None]) -> T:
        """Runs a call in the thread and gives its result.

        Args:
            call: must leave everything as it was if it raises.
            take_back: undoes a call that succeeded, given its result; called in the thread, at most once.
        """
        job = _Job(call, take_back, self._lock)
        with self._mutex:
            if self._closing is not None:
                raise CancelledError("this executor is shut down")
            future = self._pool.submit(job.run)
        try:
            await _end(future)
        except BaseException as reason:  # cancelled, or the loop is gone and closes its coroutines
            rest = self._abandon(job, future)
            if isinstance(reason, asyncio.CancelledError):
                while not rest.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await _end(rest)
            raise
        return future.result()

    async def close(self, last: Callable[[], None]) -> None:
        """Runs `last` after all calls given so far and ends the thread; a second close waits for the first."""
        with self._mutex:
            if self._closing is None:
                self._closing = self._pool.submit(last)
                self._pool.shutdown(wait=False)
        await _end(self._closing)
        self._closing.result()

    def _abandon(self, job: _Job[Any], future: Future[Any]) -> Future[Any]:
        """Gives the future after which the call has left no trace."""
        if future.cancel() or not job.abandon():
            return future
        with self._mutex:
            if self._closing is None:
                return self._pool.submit(job.take_back)
        return self._closing  # which drops everything


async def _end(future: Future[Any]) -> None:
    """Waits until a future is done, whatever its outcome."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def report(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            loop.call_soon_threadsafe(_resolve, over)

    future.add_done_callback(report)
    await over


def _resolve(over: "asyncio.Future[None]") -> None:
    if not over.done():
        over.set_result(None)

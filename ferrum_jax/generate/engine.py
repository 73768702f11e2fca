"""The thread that runs the scheduler: all other threads put messages into its queue and wait on their own queues."""

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from ferrum_jax.contract.checks import check_not_forked, renew_after_fork
from ferrum_jax.contract.errors import (
    CancelledError,
    FerrumError,
    InternalError,
    RequestValidationError,
    ResourceExhaustedError,
    safe_repr,
)
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.scheduler import Scheduler
from ferrum_jax.generate.updates import Update

_log = logging.getLogger(__name__)

T = TypeVar("T")
LINGER = 0.5  # seconds that the thread waits for more work before it ends


class Engine:
    """Runs one scheduler in a thread of its own, which lives while there is work.

    Any thread may call `submit`, `abort` and `call`. `abort` only puts a message into a queue, which is safe in a
    finalizer or a signal handler. No step is ever interrupted.
    """

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self._inbox: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()  # what to call between two steps
        self._lock = threading.RLock()  # of the next three
        renew_after_fork(self, "_lock")
        self._is_putting = False  # True within `_put`
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.pid = os.getpid()
        _ENGINES.add(self)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # last registered, first called: before what ends the model's own threads

    def submit(self, *requests: Request) -> None:
        """Queues requests, which then begin together; the engine's thread calls their `notify`.

        Raises:
            CancelledError: the engine is closed.
            RequestValidationError: the engine's own thread called this, in the middle of a step.
        """
        now = time.perf_counter()
        for request in requests:
            for one in (request, *request.copies):
                one.submitted = now
        self._put(lambda: list(map(self.scheduler.submit, requests)))

    def abort(self, *requests: Request) -> None:
        """Drops requests and frees their slots and blocks after the current step; one that is done is no error."""
        self._inbox.put(partial(self.scheduler.abort, *requests))

    def end(self, requests: Sequence[Request], finish: Callable[[Request], None]) -> None:
        """Ends those requests that are not done, between two steps; `finish` sets the reason or error of one."""

        def end() -> None:
            for request in requests:
                if not request.is_done:
                    finish(request)
                    self.scheduler.abort(request)
                    request.tell()

        self.call(end)

    def call(self, work: Callable[[], T]) -> T:
        """Calls a function between two steps and returns its result; raises as `submit`, and the function's error."""
        waiting: Future[T] = Future()

        def run() -> None:
            try:
                waiting.set_result(work())
            except BaseException as problem:  # noqa: BLE001  the caller gets it
                waiting.set_exception(problem)

        self._put(run)
        return waiting.result()

    def prepare(self, request: Request) -> None:
        """Compiles the programs for answering a request, between two steps: what was aborted has left its slot."""
        model = self.scheduler.model

        def run() -> None:
            try:
                model.prepare(request.cache_id, len(request.prompt))
            finally:
                model.release(request.cache_id)

        self.call(run)

    def begin_update(self, update: Update) -> Future[int]:
        """Queues an update of weights; returns its `done`, which is set when it is applied. Raises as `submit`."""
        self._put(partial(self.scheduler.update, update))
        return update.done

    def update(self, update: Update) -> int:
        """Queues an update, waits for it, and returns the weights' version; raises as `submit` and the update."""
        done = self.begin_update(update)
        try:
            return done.result()
        except BaseException:  # perhaps a KeyboardInterrupt
            done.cancel()
            raise
        finally:  # an error knows this frame, and would keep itself and the refused weights alive
            del done, update

    def settle(self) -> None:
        """Waits until all aborted requests are freed, as they all are once the engine is closed."""
        if not self._inbox.empty() or self._thread is not None:
            with contextlib.suppress(CancelledError):
                self.call(lambda: None)

    def close(self) -> None:
        """Ends every request with a CancelledError, then ends the thread.

        In a signal handler or finalizer that runs within `submit` or `call` of the same thread, it only marks the
        engine as closed and returns: `submit` or `call` ends requests and thread then.
        """
        with self._lock:
            self._is_closed = True
            thread, is_within = self._thread, self._is_putting
        if is_within:
            return
        if thread is not None and thread is not threading.current_thread():
            self._inbox.put(lambda: None)  # wakes it
            thread.join()
        self._drain()

    def _put(self, message: Callable[[], Any]) -> None:
        if threading.current_thread() is self._thread:
            raise RequestValidationError("an LLM was called in the middle of a step of its own")
        if self._thread is not None or isinstance(self.scheduler.model, ModelRunner):
            check_not_forked("LLM", self.pid)
        with self._lock:
            if self._is_closed:
                raise CancelledError("this LLM is closed")
            self._is_putting = True
            try:
                if self._thread is None:
                    self._start()
                self._inbox.put(message)
            finally:
                self._is_putting = False
        if self._is_closed:  # meanwhile, perhaps by a signal handler
            self.close()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="ferrum-engine", daemon=True)
        try:
            thread.start()
        except RuntimeError as problem:
            if thread.is_alive():  # it is an error of a signal handler
                raise
            raise ResourceExhaustedError(f"the engine's thread cannot be started: {problem}") from problem
        finally:  # a signal handler may raise anything, before or after the start
            self._thread = thread if thread.is_alive() else None

    def _run(self) -> None:
        while True:
            try:
                if not self._listen():
                    return
                if self.scheduler.has_work:
                    self.scheduler.step()
            except BaseException as problem:  # noqa: BLE001  the model breaks the contract, or a bug here
                self._fail(problem)

    def _listen(self) -> bool:
        """Takes messages, and waits for one if there is no work; returns False if the thread is to end."""
        self._drain()
        if self._is_closed:
            return False
        if self.scheduler.has_work:
            return True
        try:
            message = self._inbox.get(timeout=LINGER)
        except queue.Empty:
            with self._lock:
                if self._inbox.empty():
                    self._thread = None
                    return False
        else:
            message()
        return True

    def _fail(self, problem: BaseException) -> None:
        """Ends every request after an error that no single request caused; never raises."""
        if not isinstance(problem, FerrumError):
            failure = InternalError(f"a step failed: {safe_repr(problem)}")
            failure.__cause__ = problem
            problem = failure
        try:
            self.scheduler.fail(problem)
        except BaseException:  # noqa: BLE001  callers have their errors, and the thread must go on
            _log.exception("slots and blocks of the ended requests could not be freed; LLM.reset frees them")

    def _drain(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                break
            message()
        if self._is_closed:
            self._fail(CancelledError("this LLM is closed"))


_ENGINES: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def _close_all() -> None:
    """Ends the threads before the interpreter would, perhaps in the middle of a device call."""
    for engine in list(_ENGINES):
        if engine.pid == os.getpid():  # a forked child has none of its parent's threads
            engine.close()

"""The lock and state of a runner: one thread at a time, and no call after a device failure or a close."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from ferrum_jax.contract.checks import check_not_forked, renew_after_fork
from ferrum_jax.contract.errors import CancelledError, DeviceError, FerrumError, RequestValidationError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.sharding.mesh import leave_mesh

_FAILED = "a step failed on the device, only reset() helps: "


class Lifecycle:
    """The lock and the state of an object that has arrays on a device.

    `with life.lock, life:` lets one thread in at a time, and only in the state Ready; an error that loses the arrays
    leaves the state Error. The lock is a context of its own because no interrupt can come between taking it and the
    body, as one could in a method of this class: the lock would stay taken. Inside, the thread's `jax.set_mesh` has no
    effect.
    """

    def __init__(self, noun: str, is_lost: Callable[[], bool]):
        """Begins Ready; `is_lost` says, after an error, whether the arrays on the device are lost."""
        self.lock = threading.RLock()
        renew_after_fork(self, "lock")
        self.state = ExecutorState.Ready
        self.paused = ""  # why calls are refused for now, though the state is Ready; empty: they are not
        self._noun = noun
        self._is_lost = is_lost
        self._failure = ""
        self._pid = os.getpid()
        self._meshes_left: list[contextlib.AbstractContextManager[Any] | None] = []

    def __enter__(self) -> None:
        self.check_ready()
        self._meshes_left.append(leave_mesh())

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, _: object) -> None:
        if (left := self._meshes_left.pop()) is not None:
            left.__exit__(None, None, None)
        if problem is not None and not self.paused and self._is_lost():
            self.state = ExecutorState.Error
            self._failure = str(problem).removeprefix(_FAILED) or type(problem).__name__  # a replica may have said it
            if isinstance(problem, Exception) and not isinstance(problem, FerrumError):
                raise DeviceError(_FAILED + self._failure) from problem

    def check_not_closed(self) -> None:
        """Raises CancelledError after `close`, and UnsupportedError in a forked child."""
        if self.state is ExecutorState.Shutdown:
            raise CancelledError(f"this {self._noun} is closed")
        check_not_forked(self._noun, self._pid)

    def check_ready(self) -> None:
        """Raises after `close`, DeviceError after a failure, and RequestValidationError while it is paused."""
        self.check_not_closed()
        self.check_not_failed()
        if self.paused:
            raise RequestValidationError(self.paused)

    @property
    def is_forked(self) -> bool:
        """True in a child of the process that made it."""
        return self._pid != os.getpid()

    def check_not_failed(self) -> None:
        """Raises DeviceError after a failure."""
        if self.state is ExecutorState.Error:
            raise DeviceError(_FAILED + self._failure)

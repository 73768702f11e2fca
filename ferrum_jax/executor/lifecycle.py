"""One thread at a time, and nothing after a device failure or a close."""

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from ferrum_jax.contract.errors import CancelledError, DeviceError, RequestValidationError
from ferrum_jax.contract.execution import ExecutorState

P = ParamSpec("P")
R = TypeVar("R")


class Lifecycle:
    """The lock of an object that lives on a device, and the state it is in."""

    def __init__(self, noun: str, is_lost: Callable[[], bool]):
        """Begins Ready.

        Args:
            noun: what the object is called in errors.
            is_lost: says, after an error, whether what is on the device is lost.
        """
        self.lock = threading.RLock()
        self.state = ExecutorState.Ready
        self._noun = noun
        self._is_lost = is_lost
        self._failure = ""
        self.paused = ""  # why nothing may be called for now, though the state is Ready

    def refuse_closed(self) -> None:
        """Raises CancelledError after `close`."""
        if self.state is ExecutorState.Shutdown:
            raise CancelledError(f"this {self._noun} is closed")

    def refuse_unless_ready(self) -> None:
        """Raises after `close`, DeviceError after a failure, and RequestValidationError while it is paused."""
        self.refuse_closed()
        self.refuse_failed()
        if self.paused:
            raise RequestValidationError(self.paused)

    def refuse_failed(self) -> None:
        """Raises DeviceError after a failure."""
        if self.state is ExecutorState.Error:
            raise DeviceError(f"a step failed on the device, only reset() helps: {self._failure}")

    def notice(self, problem: BaseException) -> None:
        """Enters the state Error if a problem lost what is on the device."""
        if self._is_lost():
            self.state, self._failure = ExecutorState.Error, str(problem) or type(problem).__name__


class Closing:
    """Something that a `with` block closes at its end."""

    _life: Lifecycle
    close: Callable[..., None]

    def __enter__(self) -> Self:
        self._life.refuse_closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HasLifecycle(Protocol):
    """What `serialised` needs of an object."""

    _life: Lifecycle


S = TypeVar("S", bound=HasLifecycle)


def serialised(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Lets one thread in at a time, and none unless the state is Ready."""

    @functools.wraps(method)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._life.lock:
            self._life.refuse_unless_ready()
            try:
                return method(self, *args, **kwargs)
            except BaseException as problem:
                self._life.notice(problem)
                raise

    return guarded

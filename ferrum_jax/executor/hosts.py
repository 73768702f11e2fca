"""Commands of one model on several hosts: what process 0 does to its devices, every process does to its own.

Process 0 alone checks calls, plans steps, and knows lengths and block tables. It changes the devices only through
`Hosts.run`: one thread sends the command to the other processes and then runs it here, so that an interrupt or a lost
process ends the caller's wait and never leaves a command half sent. The others follow (executor/following.py). With
one process, `run` only calls the function.
"""

import atexit
import contextlib
import functools
import hashlib
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from threading import Thread
from typing import Any, TypeVar

import jax
import numpy as np

from ferrum_jax.compile.block_programs import CopyKey, GatherKey, InstallKey
from ferrum_jax.compile.multi_step import MultiStepKey
from ferrum_jax.compile.sampler import ConfigureKey, DistributionKey, MaskKey, SampleKey, VerifyKey
from ferrum_jax.compile.scores import ProcessedScoreKey
from ferrum_jax.compile.step import StepKey
from ferrum_jax.contract.errors import BackendError, ConfigError, DeviceError, UnsupportedError
from ferrum_jax.models.hooks import Point
from ferrum_jax.sharding.devices import process_of
from ferrum_jax.sharding.mesh import Placement
from ferrum_jax.sharding.processes import END_SECONDS, Channel, Message, open_channel

T = TypeVar("T")
NOTICE_SECONDS = 3.0  # to wait after a device failure until a lost process, its likely cause, is noticed
_KEYS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        ConfigureKey, CopyKey, DistributionKey, GatherKey, InstallKey, MaskKey, MultiStepKey, ProcessedScoreKey,
        SampleKey, StepKey, VerifyKey,
    )
}  # fmt: skip


@dataclass(eq=False)
class _Effect:
    """One command, and its outcome in this process."""

    call: Callable[[], Any]
    message: Message | None  # to the other processes; None: the command concerns this process alone
    number: int  # in the others' answers to it; 0: they do not answer
    result: Any = None
    problem: BaseException | None = None
    is_done: bool = False
    ended: "queue.SimpleQueue[None]" = field(default_factory=queue.SimpleQueue)  # put into when done, or a peer is lost


class Hosts:
    """The processes of one model, seen from one of them; without a channel, it is the only one."""

    def __init__(self, channel: Channel | None = None, *, has_joined: bool = False):
        """In process 0 of several, starts the thread that runs effects.

        Args:
            channel: to the other processes.
            has_joined: this package has called `jax.distributed.initialize`, so that `close` shuts it down.
        """
        self._channel = channel
        self._has_joined = has_joined
        self._effects: queue.SimpleQueue[_Effect | None] = queue.SimpleQueue()
        self._number = 0  # of the last command that the others answer
        self._awaited: _Effect | None = None
        if channel is not None and channel.index == 0:
            channel.on_loss = self._end_wait
            self._worker = Thread(target=self._work, name="effects", daemon=True)
            self._worker.start()
            atexit.register(self._stop)  # a thread that ends within JAX, as the interpreter ends, aborts the process

    @classmethod
    def of(cls, replicas: Sequence[Placement], channel: Channel | None = None) -> "Hosts":
        """Connects the processes that own a model's devices, if there are several and `channel` has not done so.

        Raises:
            ConfigError: a process has none of the devices.
            UnsupportedError: there are several replicas on several processes.
            DeviceError: the processes do not find each other.
        """
        found = sorted({process_of(device) for one in replicas for device in one.devices})
        if channel is None and found == [jax.process_index()]:
            return cls()
        if len(found) != jax.process_count():
            asked = " * ".join(f"{name} {size}" for name, size in replicas[0].sizes.items()) or "none"
            raise ConfigError(
                f"the mesh ({asked}) has devices of the processes {found} of {jax.process_count()}: "
                f"divide the model over devices of all, there are {jax.device_count()}"
            )
        if len(replicas) > 1:
            raise UnsupportedError(
                f"{len(replicas)} replicas on {len(found)} processes: start a job for each, or leave out the axis data"
            )
        opened = channel or open_channel(jax.process_count(), jax.process_index())
        return cls(opened, has_joined=channel is not None)

    @property
    def are_several(self) -> bool:
        """True where other processes have devices of the model."""
        return self._channel is not None

    @property
    def leads(self) -> bool:
        """True in process 0, which alone serves calls."""
        return self._channel is None or self._channel.index == 0

    @property
    def channel(self) -> Channel:
        """The connections to the other processes; only where there are any."""
        assert self._channel is not None
        return self._channel

    @property
    def lost(self) -> str:
        """Why another process counts as lost; empty while none does."""
        return "" if self._channel is None else self._channel.lost

    def run(self, call: Callable[[], T], op: str = "", key: Any = None, *arrays: np.ndarray, **facts: Any) -> T:
        """Runs a command in every process, and returns what `call` returns here; arguments as for `everywhere`.

        Raises:
            DeviceError: a process is lost, or the devices failed: all processes must be started again.
        """
        return self.everywhere(call, op, key, *arrays, **facts)()

    def everywhere(
        self,
        call: Callable[[], T],
        op: str = "",
        key: Any = None,
        *arrays: np.ndarray,
        is_answered: bool = False,
        **facts: Any,
    ) -> Callable[[], T]:
        """Returns a function that runs a command in every process; `call` itself in a single or a following process.

        Args:
            call: runs the command here.
            op: the command's name; empty for what concerns this process alone, such as waiting.
            key: of the program it runs.
            *arrays: the host arrays that the program takes.
            is_answered: wait until the others have run it, too.
            **facts: what else the others need, in values that JSON holds.
        """
        if self._channel is None or self._channel.index:
            return call
        if is_answered:
            self._number += 1
            facts["number"] = self._number
        told = Message(op, facts | ({} if key is None else {"key": packed_key(key)}), arrays)
        return functools.partial(self._do, _Effect(call, told if op else None, self._number if is_answered else 0))

    def _do(self, effect: _Effect) -> Any:
        self._awaited, channel = effect, self.channel
        channel.check()  # a process lost from here on ends the wait
        self._effects.put(effect)
        effect.ended.get()
        if not effect.is_done:
            channel.check()
        if isinstance(effect.problem, jax.errors.JaxRuntimeError):
            deadline = time.monotonic() + NOTICE_SECONDS
            while not channel.lost and time.monotonic() < deadline:  # the end of a peer often shows first as this error
                time.sleep(0.05)
            channel.fail(str(effect.problem))  # the processes may now wait in different collectives
            channel.check()
        self._awaited = None  # the effect holds arrays
        if effect.problem is not None:
            raise effect.problem
        return effect.result

    @contextlib.contextmanager
    def together(self, keys: Sequence[Any], **how: Any) -> Iterator[None]:
        """Has the other processes build programs while this one builds them inside the context.

        Raises:
            BackendError: another process cannot build one.
        """
        if self._channel is None or self._channel.index:
            yield
            return
        self._number = number = self._number + 1
        self.run(lambda: None, "build", keys=[packed_key(key) for key in keys], how=how, number=number)
        yield  # after an error here the answers stay unread, until the next `_read_answers` drops them
        self._read_answers(number)

    def least(self, number: int) -> int:
        """Returns the smallest of the processes' numbers; every process calls this at the same point."""
        if self._channel is None:
            return number
        if self._channel.index:
            self._channel.send(Message("least", {"number": number}))
            return int(self._told("least").facts["number"])
        others = [int(self._channel.receive(peer).facts["number"]) for peer in self._others]
        self._channel.send(Message("least", {"number": (found := min(number, *others))}))
        return found

    def check_placement(self, placement: Placement) -> None:
        """Raises ConfigError in a process with another mesh than process 0, before anything runs on it."""
        self._check_same("a mesh", (placement.sizes, [device.id for device in placement.devices]))

    def check_settings(self, *settings: Any) -> None:
        """Raises ConfigError in a process whose model or settings differ from those of process 0."""
        if self._channel is not None:
            self._channel.is_starting = False
        self._check_same("a model or settings", settings)

    def _check_same(self, what: str, described: Any) -> None:
        if self._channel is None:
            return
        digest = hashlib.sha256(repr(described).encode()).hexdigest()
        if self._channel.index == 0:
            self._channel.send(Message("same", {"digest": digest}))
        elif self._told("same").facts["digest"] != digest:
            raise ConfigError(f"process {self._channel.index} has {what} other than process 0")

    def close(self) -> None:
        """Tells the other processes to end."""
        if self._channel is None or not self.leads:
            return
        atexit.unregister(self._stop)
        self._stop()
        self._channel.close()
        if self._has_joined and not self._channel.lost:
            with contextlib.suppress(RuntimeError):  # a process that takes no part has ended already
                jax.distributed.shutdown()

    @property
    def _others(self) -> range:
        return range(1, self.channel.count)

    def _told(self, op: str) -> Message:
        message = self.channel.receive(0)
        if message.op != op:
            raise DeviceError(f"process 0 ended before the model was loaded in process {self.channel.index}")
        return message

    def _read_answers(self, number: int) -> None:
        """Waits for the answers of all others; raises BackendError with the first problem among them."""
        problems = {}
        for peer in self._others:
            while (answer := self.channel.receive(peer)).facts["number"] != number:
                continue  # the answer to a command that was interrupted here
            problems[peer] = answer.facts["problem"]
        for peer, problem in problems.items():
            if problem:
                raise BackendError(f"process {peer} of {self.channel.count}: {problem}")

    def _work(self) -> None:
        """Sends and runs one effect after another; `_do` raises their errors."""
        channel = self.channel
        while (effect := self._effects.get()) is not None:
            try:
                if effect.message is not None:
                    channel.send(effect.message)
                effect.result = effect.call()
                if effect.number:
                    self._read_answers(effect.number)
            except BaseException as problem:  # noqa: BLE001  # `_do` raises it
                effect.problem = problem
            effect.is_done = True
            effect.ended.put(None)
            del effect

    def _stop(self) -> None:
        """Ends the thread that runs effects, after those it was given; a lost process may hold that up for ever."""
        self._effects.put(None)
        if not self.lost:
            self._worker.join(END_SECONDS)

    def _end_wait(self) -> None:
        if (effect := self._awaited) is not None:
            effect.ended.put(None)


def packed_key(key: Any) -> list[Any]:
    """Returns a program's key in values that JSON holds."""
    return [type(key).__name__, [getattr(key, field.name) for field in fields(key)]]


def unpacked_key(packed: Sequence[Any]) -> Any:
    """Returns the key that `packed_key` packed; raises LookupError for an unknown type of key."""
    name, values = packed
    plain = [tuple(map(_point, value)) if isinstance(value, list) else value for value in values]
    return _KEYS[name](*plain)


def _point(value: Any) -> Any:
    return Point(*value) if isinstance(value, list) else value

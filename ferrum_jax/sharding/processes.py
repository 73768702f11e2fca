"""The processes of one job: how this one joins them, and the connections that carry commands between them.

JAX moves arrays between devices; the commands of process 0 go to every other process over a connection of our own. Both
ends send a heartbeat every second, so that a lost process is noticed even where no device reports it: a collective
with a lost process may wait for ever.
"""

import atexit
import contextlib
import hmac
import json
import math
import os
import queue
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.config.processes import COORDINATOR, COUNT, START_SECONDS, ProcessSettings
from ferrum_jax.contract.errors import ConfigError, DeviceError, UnsupportedError

BEAT_SECONDS = 1.0
SILENT_SECONDS = 15.0  # without a byte from a process, after which it counts as lost
END_SECONDS = 15  # for an orderly end of all processes
PREEMPTION = "jax_enable_preemption_service"  # an option of JAX
STUCK_SECONDS = 10.0  # after a loss while a model is loaded: if no call has raised it by then, the process ends
NEVER = 1 << 30  # seconds
KEY = "ferrum_jax/commands"
_FRAME = struct.Struct(">IQ")  # bytes of the header, and of the arrays after it
_MOST_HEADER = 1 << 24  # bytes
_MOST_HELLO = 1 << 12
_HELLO_SECONDS = 2.0  # for the whole of a hello: others may be waiting behind it
_CHUNK = 1 << 24  # bytes that go to one peer before the next one has its share


def join(asked: Any) -> "Channel | None":
    """Joins the processes that the environment names, if any and if a mesh is asked for, and connects them.

    JAX must not have touched a device before.

    Raises:
        ConfigError: a variable is wrong, no mesh is asked for, or a device was touched already.
        DeviceError: the processes do not find each other.
    """
    settings = ProcessSettings.from_environment()
    if settings is None or jax.distributed.is_initialized():
        return None
    if not asked:
        if settings.is_plain:
            raise ConfigError(
                f"{COUNT}={settings.count}, but no mesh divides the model: give mesh={{'model': …}} or FERRUM_MESH, "
                "with devices of every process"
            )
        return None  # tasks of a launcher that have nothing to do with each other
    who, seconds = f"process {settings.index} of {settings.count}", settings.start_seconds
    where = settings.coordinator or "the address that the launcher gives"
    # JAX would end the process, too, in words of its own.
    watch = threading.Timer(seconds, _end, [f"{who} ends: the others have not come to {where} within {seconds} s"])
    watch.daemon = True
    watch.start()
    own: dict[str, Any] = {"cluster_detection_method": "deactivate"} if settings.is_plain else {}
    preempts = jax.config.values[PREEMPTION]
    try:
        jax.config.update(PREEMPTION, False)  # it would take SIGTERM, and not end the process
        jax.distributed.initialize(
            settings.coordinator,
            settings.count,
            settings.index,
            initialization_timeout=2 * seconds,
            heartbeat_timeout_seconds=NEVER,  # it would end process 0 without an error that can be caught
            shutdown_timeout_seconds=END_SECONDS,
            **own,
        )
    except ValueError as problem:
        raise ConfigError(
            f"the launcher does not say where process 0 is, set {COORDINATOR}, or {COUNT}=1 where this process is "
            f"alone, as in a batch script of SLURM's: {problem}"
        ) from None
    except RuntimeError as problem:  # JaxRuntimeError among them
        if isinstance(problem, jax.errors.JaxRuntimeError):
            raise DeviceError(f"{who} did not find the others at {where}: {problem}") from problem
        raise ConfigError(f"{who} cannot join the others: {problem}") from None
    finally:
        watch.cancel()
        jax.config.update(PREEMPTION, preempts)
    try:
        return open_channel(settings.count, settings.index, SILENT_SECONDS)  # all have just joined
    except DeviceError:
        atexit.register(_end)  # JAX would wait for the lost process
        raise


@contextlib.contextmanager
def telling(channel: "Channel | None") -> Iterator[None]:
    """Tells the other processes of a failure here while a model is loaded, and raises it: they may wait for this one.

    SystemExit is no failure: it ends a process that has followed process 0 to the end.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException as problem:
        if channel is not None:
            channel.abandon(f"{type(problem).__name__}: {problem}")
        raise


@dataclass(frozen=True, eq=False)
class Message:
    """What one process tells another: an operation, facts that JSON can hold, and arrays."""

    op: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()

    def pack(self) -> list[bytes | memoryview]:
        """Returns the bytes to be sent."""
        arrays = [np.asarray(array, order="C") for array in self.arrays]
        described = [[array.dtype.name, list(array.shape)] for array in arrays]
        header = json.dumps([self.op, dict(self.facts), described]).encode()
        size = sum(array.nbytes for array in arrays)
        return [_FRAME.pack(len(header), size) + header, *map(_bytes_of, arrays)]


class Channel:
    """The connections of one process to its peers: of process 0 to all others, of another to process 0.

    A peer that is lost stays lost, `lost` says why, and every call raises DeviceError. A process other than 0 ends when
    its peer is lost, because a collective may be waiting for the peer, which nothing can interrupt.
    """

    def __init__(self, peers: dict[int, socket.socket], names: dict[int, str], index: int, count: int):
        self.index, self.count = index, count
        self.lost = ""  # why a peer counts as lost
        self.is_starting = True  # a model is being loaded
        self.on_loss: Callable[[], None] = lambda: None  # called once, after `lost` is set
        self._peers, self._names = peers, names
        # Queues that an interrupt cannot leave locked; None says that a peer is lost.
        self._inbox: dict[int, queue.SimpleQueue[Message | None]] = {peer: queue.SimpleQueue() for peer in peers}
        self._sending, self._losing = threading.Lock(), threading.Lock()
        self._is_ending = False
        self._is_told = False  # whether a call has raised that a peer is lost
        self._has_abandoned = False  # this process could not load the model, and ends with its own error
        for peer in peers:
            threading.Thread(target=self._listen, args=(peer,), name=f"process {peer}", daemon=True).start()
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()
        atexit.register(self._at_exit)

    def send(self, message: Message) -> None:
        """Sends a message to every peer; raises DeviceError where one is lost."""
        self.check()
        try:
            self._send(message)
        except OSError as problem:
            self._lose(f"{self._called(min(self._peers))} is gone: nothing can be sent to it: {problem}")
            self.check()

    def receive(self, peer: int) -> Message:
        """Waits for the next message of a peer; raises DeviceError once one is lost."""
        message = self._inbox[peer].get()
        if message is None:
            self._inbox[peer].put(None)
            self.check()
        assert message is not None
        return message

    def check(self) -> None:
        """Raises DeviceError once a peer is lost."""
        if self.lost:
            self._is_told = True
            raise DeviceError(f"{self.lost}; all processes must be started again")

    def close(self) -> None:
        """Tells the peers that this process ends in order, so that they do not count it as lost."""
        if self._is_ending:
            return
        self._is_ending = True
        if not self.lost:
            with contextlib.suppress(OSError):
                self._send(Message("end"))

    def fail(self, why: str) -> None:
        """Tells the peers why this process can serve no longer; one other than 0 ends."""
        self._tell(why)
        if self.index:
            _end(f"process {self.index} of {self.count} ends: {why}")
        self._lose(f"process 0 of {self.count} failed: {why}")

    def abandon(self, why: str) -> None:
        """Tells the peers why this process did not load the model; unlike `fail`, it goes on to raise its error."""
        self.is_starting = False
        self._has_abandoned = True
        self._tell(why)
        if self.index == 0:
            self._lose(f"process 0 of {self.count} failed: {why}")

    def _tell(self, why: str) -> None:
        if not self.lost:
            with contextlib.suppress(OSError):
                self._send(Message("failed", {"why": why}))

    def _send(self, message: Message) -> None:
        pieces = message.pack()
        with self._sending:
            for piece in map(memoryview, pieces):
                for start in range(0, len(piece), _CHUNK):  # in turn, so that no peer waits for another's share
                    for connection in self._peers.values():
                        connection.sendall(piece[start : start + _CHUNK])

    def _beat(self) -> None:
        beat = Message("beat")
        while not self.lost and not self._is_ending:
            try:
                self._send(beat)
            except OSError:  # `_listen` finds out why
                return
            time.sleep(BEAT_SECONDS)

    def _listen(self, peer: int) -> None:
        try:
            while True:
                message = read_message(self._peers[peer], SILENT_SECONDS)
                if message.op == "failed":
                    self._lose(f"{self._called(peer)} is gone: {message.facts['why']}")
                    return
                if message.op == "beat":
                    continue
                self._is_ending |= message.op == "end"
                self._inbox[peer].put(message)
                if message.op == "end":
                    return
        except Exception as problem:  # noqa: BLE001  # MemoryError, too: a peer that is not read is lost
            self._lose(f"{self._called(peer)} is gone: {problem or type(problem).__name__}")

    def _called(self, peer: int) -> str:
        return f"process {peer} of {self.count} ({self._names[peer]})"

    def _lose(self, why: str) -> None:
        with self._losing:
            if self._is_ending or self.lost:
                return
            self.lost = why
        for inbox in self._inbox.values():
            inbox.put(None)
        self.on_loss()
        for connection in self._peers.values():  # ends calls that wait to send
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self.index and not self._has_abandoned:
            _end(f"{self.lost}; process {self.index} ends")
        if self.is_starting:  # JAX's backends may be waiting for each other, too
            threading.Thread(target=self._end_if_stuck, name="end", daemon=True).start()

    def _end_if_stuck(self) -> None:
        time.sleep(STUCK_SECONDS)
        if self.is_starting and not self._is_told:
            _end(f"{self.lost}; process 0 ends")

    def _at_exit(self) -> None:
        """Ends the process in order; at once if a peer is lost, because JAX would wait for it."""
        if self.index == 0:
            self.close()
        elif not self._is_ending and not self._has_abandoned:
            self.fail("its program ended before process 0 did")
        if self.lost or self._has_abandoned:
            _end()


def open_channel(count: int, index: int, seconds: float = START_SECONDS) -> Channel:
    """Connects process 0 with every other one; each calls this once.

    Raises:
        DeviceError: a process did not connect in time, or all were connected before: a job serves one model.
        UnsupportedError: this JAX keeps its key-value store elsewhere.
    """
    try:  # not public; the store has deadlines, and compiles nothing
        from jax._src.distributed import global_state
    except ImportError as problem:
        raise UnsupportedError(
            f"several processes need jax._src.distributed.global_state, which JAX {jax.__version__} does not have, as "
            "0.10 has"
        ) from problem
    store, address = global_state.client, global_state.coordinator_address
    if store is None or address is None:
        raise DeviceError(f"process {index} of {count} has left the others, which have ended: start all of them again")
    host = address.rpartition(":")[0].strip("[]")
    try:
        if index:
            return _connect(host, json.loads(store.blocking_key_value_get(KEY, round(seconds * 1000))), index, count)
        return _accept(host, store, count, seconds)
    except (OSError, jax.errors.JaxRuntimeError) as problem:
        raise DeviceError(
            f"process {index} of {count} cannot be connected with the others, each of which serves one model once: "
            f"{problem}"
        ) from problem


def _accept(host: str, store: Any, count: int, seconds: float) -> Channel:
    token, peers, names = secrets.token_hex(32), {}, {}
    if host in ("127.0.0.1", "localhost") or not socket.has_dualstack_ipv6():
        listener = socket.create_server((host if host in ("127.0.0.1", "localhost") else "", 0))
    else:  # every address, as JAX's coordinator: on this host its own name may stand for the loopback
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    with listener:
        store.key_value_set(KEY, json.dumps({"port": listener.getsockname()[1], "token": token}))
        deadline = time.monotonic() + seconds
        while len(peers) < count - 1:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, (where, *_) = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, count)) - peers.keys())
                raise TimeoutError(f"after {seconds:.0f} s the processes {missing} have not connected") from None
            try:
                hello = read_message(connection, _HELLO_SECONDS, _MOST_HELLO)
                mine = hmac.compare_digest(str(hello.facts["token"]), token)
                peer = int(hello.facts["process"]) if mine else 0
                told = where.removeprefix("::ffff:")  # an IPv4 address
                name = f"host {hello.facts['host']}, pid {hello.facts['pid']}, from {told}"
            except Exception:  # noqa: BLE001  # whatever a stranger sends, it is no hello
                mine, peer, name = False, 0, ""
            if not mine or peer not in range(1, count) or peer in peers:  # somebody else's
                connection.close()
                continue
            peers[peer], names[peer] = _kept_alive(connection), name
    return Channel(peers, names, 0, count)


def _connect(host: str, found: Mapping[str, Any], index: int, count: int) -> Channel:
    connection = _kept_alive(socket.create_connection((host, found["port"]), SILENT_SECONDS))
    hello = {"token": found["token"], "process": index, "host": socket.gethostname(), "pid": os.getpid()}
    for piece in Message("hello", hello).pack():
        connection.sendall(piece)
    return Channel({0: connection}, {0: f"host {host}"}, index, count)


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_message(connection: socket.socket, seconds: float, most: int | None = None) -> Message:
    """Reads the next message; with `most`, one without arrays of at most so many bytes, all of it within `seconds`.

    Raises:
        OSError: the connection ended, or nothing came for so long.
        ValueError: it is no message.
    """
    deadline = None if most is None else time.monotonic() + seconds
    header_size, size = _FRAME.unpack(_read(connection, _FRAME.size, seconds, deadline))
    if header_size > (most or _MOST_HEADER) or (most and size):
        raise ValueError(f"a header of {header_size:,} bytes came, at most {most or _MOST_HEADER:,} are expected")
    op, facts, described = json.loads(bytes(_read(connection, header_size, seconds, deadline)))
    kinds = [(jnp.dtype(name), tuple(shape)) for name, shape in described]
    wanted = sum(math.prod(shape) * kind.itemsize for kind, shape in kinds)
    if wanted != size:
        raise ValueError(f"{size:,} bytes came for arrays of {wanted:,}")
    arrays = [np.empty(shape, kind) for kind, shape in kinds]
    for array in arrays:
        _read_into(connection, _bytes_of(array), seconds)
    return Message(op, facts, arrays)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read(connection: socket.socket, size: int, seconds: float, deadline: float | None = None) -> bytearray:
    data = bytearray(size)
    _read_into(connection, memoryview(data), seconds, deadline)
    return data


def _read_into(connection: socket.socket, data: memoryview, seconds: float, deadline: float | None = None) -> None:
    at = 0
    with selectors.DefaultSelector() as selector:  # `select.select` takes no descriptor above 1023
        selector.register(connection, selectors.EVENT_READ)
        while at < len(data):
            left = seconds if deadline is None else max(0.0, deadline - time.monotonic())
            if not selector.select(left):
                raise TimeoutError(f"it has sent nothing for {seconds:.0f} s")
            count = connection.recv_into(data[at:])
            if count == 0:
                raise ConnectionError("its connection was closed")
            at += count


def _end(why: str = "") -> None:
    """Ends this process at once: a thread that waits for a lost peer cannot be ended in order."""
    if why:
        print(f"ferrum_jax: {why}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

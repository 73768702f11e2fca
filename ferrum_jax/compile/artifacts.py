"""Compiled steps on disk, so that a later start compiles nothing.

A file is `MAGIC`, the SHA-256 of the rest, one line of JSON that says what it is, and the executable: pickled, then
compressed. Unpickling runs code, so nothing is unpickled before owner, permissions and checksum were found right.
"""

import hashlib
import json
import logging
import pickle
import re
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental import serialize_executable
from platformdirs import user_cache_dir

from ferrum_jax.compile.fingerprint import Facts, describe_code, describe_settings, digest, is_edited
from ferrum_jax.compile.private_folder import TEMPORARY, PrivateFolder
from ferrum_jax.config.engine import CompilerOptions
from ferrum_jax.contract.errors import ConfigError, first_line, safe_repr
from ferrum_jax.sharding.devices import JaxDevice

_log = logging.getLogger(__name__)
MAGIC = b"ferrum_jax step 1\n"
SUFFIX = ".step"
PROGRAM = re.compile(r"[0-9a-f]{32}")  # name of a program's folder
FACTS = "program.json"  # what a folder's steps depend on, for people to read
CACHE_HIT = "/jax/compilation_cache/cache_hits"
_PROBE = "/ferrum_jax/is_listening"
# What JAX, pickle and a compressor raise for what they cannot write or read, unless the allocation failed.
_UNUSABLE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, EOFError,
             pickle.PickleError, zlib.error)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Artifact:
    """One step as read from disk, verified to be whole and this user's own; none of its code has run."""

    name: str
    program: str  # digest of what it depends on
    platform: str
    device_ids: tuple[int, ...]  # in the order of its mesh
    memory: dict[str, int]  # bytes
    content: bytes

    def load(self) -> jax.stages.Compiled:
        """Makes the step callable; this runs code of the artifact.

        Raises:
            RuntimeError, ValueError, …: one of `_UNUSABLE`; it does not suit this process.
        """
        there = {one.id: one for one in jax.devices(self.platform)}
        if not there.keys() >= set(self.device_ids):
            raise ValueError(f"it was compiled for {self.platform} {self.device_ids}, found {list(there.values())}")
        devices = [there[one] for one in self.device_ids]
        serialised, in_tree, out_tree = pickle.loads(zlib.decompress(self.content))
        return serialize_executable.deserialize_and_load(
            serialised, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )


class Artifacts:
    """The compiled steps of one program in a folder of this user's."""

    def __init__(self, root: Path, facts: Facts, options: CompilerOptions = None):
        """Touches no file yet; `facts` are all that steps depend on, except JAX's settings and `options`."""
        self.root = root
        self.facts = facts | {"compiler_options": dict(options or ())}
        self._folder = PrivateFolder(root)
        self.num_saved = 0  # in this process
        self.num_unwritten = 0  # for example because the disk was full
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._prepared: set[str] = set()  # digests of programs whose folder is ready to be written
        self._proven: set[str] = set()  # kinds of programs of which one could be loaded after it was packed
        self._coming: dict[tuple[str, str], Future[jax.stages.Compiled | None]] = {}  # by program and name

    @property
    def folder(self) -> PrivateFolder:
        """The folder of steps that are compiled under this thread's settings of JAX."""
        return self._folder.child(self._program()[:32])

    def find(self, name: str) -> Artifact | None:
        """Returns a step on disk that is whole and this user's own, or None; warns of one that must not be used."""
        return self._find(self._program(), name)

    def _find(self, program: str, name: str) -> Artifact | None:
        try:
            data = self._folder.child(program[:32]).read(_file_name(name))
        except FileNotFoundError:
            return None
        except OSError as problem:
            self._warn(f"compiled steps on disk are not used: {problem}")
            return None
        try:
            return _verified(data, program, name)
        except (LookupError, TypeError, ValueError) as problem:
            where = self._folder.child(program[:32]).path
            self._warn(f"{_file_name(name)} in {where} is not used, {name} is compiled: {problem}")
            return None

    def preload(self, names: Iterable[str]) -> None:
        """Begins to load steps that will be asked for soon, one after another in a thread of its own."""
        program = self._program()

        def load(name: str) -> jax.stages.Compiled | None:
            artifact = self._find(program, name)
            return None if artifact is None else artifact.load()

        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="artifacts")
        with self._lock:
            for name in names:
                self._coming[program, name] = pool.submit(load, name)
        pool.shutdown(wait=False)

    def load(self, artifact: Artifact) -> jax.stages.Compiled | None:
        """Makes a step callable, or warns why it cannot be and returns None; waits for it if it is being preloaded."""
        with self._lock:
            coming = self._coming.pop((artifact.program, artifact.name), None)
        try:
            ready = None if coming is None or coming.cancel() else coming.result()
            return artifact.load() if ready is None else ready
        except _UNUSABLE as problem:
            self._warn(f"the step {artifact.name} on disk cannot be loaded and is compiled: {first_line(problem)}")
            return None

    def save(self, name: str, executable: jax.stages.Compiled) -> Artifact | None:
        """Writes a step and returns it as written; if that fails, warns once and returns None."""
        program = self._program()
        folder = self._folder.child(program[:32])
        try:
            artifact = _packed(program, name, executable)
            kind = name.split("(")[0]
            if kind not in self._proven:  # a step that cannot be loaded here cannot be loaded by a later start
                artifact.load()
                self._proven.add(kind)
        except _UNUSABLE as problem:
            self._warn(
                "this backend's compiled steps cannot be kept, every start compiles them; "
                f"JAX_COMPILATION_CACHE_DIR may help: {first_line(problem)}"
            )
            return None
        try:
            self._prepare(folder, program)
            header = _header(artifact)
            folder.write(_file_name(name), MAGIC, _checksum(header, artifact.content), header, artifact.content)
        except OSError as problem:
            self._warn(f"compiled steps are not kept for the next start: {problem}")
            with self._lock:
                self.num_unwritten += 1
            return None
        with self._lock:
            self.num_saved += 1
        return artifact

    def warn_of_cached(self) -> None:
        """Counts a step that comes from JAX's compilation cache, which cannot be kept, and warns once."""
        self._warn(
            "steps that JAX's compilation cache has cannot be kept, every start traces them again: unset "
            "JAX_COMPILATION_CACHE_DIR (jax_compilation_cache_dir) for one start, unless this backend's steps cannot "
            "be kept at all"
        )
        with self._lock:
            self.num_unwritten += 1

    def check_writable(self) -> None:
        """Raises OSError, PermissionError among them, where no step could be kept."""
        self._prepare(self.folder, self._program())

    def listed(self) -> dict[str, int]:
        """Bytes of each step on disk, by file name; empty if the folder must not be used."""
        try:
            return {name: size for name, size in self.folder.sizes().items() if name.endswith(SUFFIX)}
        except OSError:
            return {}

    def _program(self) -> str:
        return digest(self.facts | {"settings": describe_settings()})

    def _prepare(self, folder: PrivateFolder, program: str) -> None:
        with self._lock:
            if program in self._prepared:
                return
        facts = self.facts | {"settings": describe_settings()}
        folder.write(FACTS, json.dumps(facts, indent=1, sort_keys=True).encode())
        folder.remove_abandoned()
        with self._lock:
            self._prepared.add(program)

    def _warn(self, text: str) -> None:
        with self._lock:
            if text in self._warned:
                return
            self._warned.add(text)
        _log.warning(text)


def artifacts_folder(asked: str | bool | None) -> Path | None:
    """Returns where compiled steps are kept: a folder, the user's cache folder for None and True, nowhere for False.

    Raises:
        ConfigError: the folder that was asked for cannot be one.
    """
    if asked is False:
        return None
    try:
        if is_edited():
            _log.warning(
                "compiled steps on disk are not used: this package's source has changed since the process began"
            )
            return None
        describe_code()
    except (OSError, PackageNotFoundError) as problem:
        _log.warning("compiled steps on disk are not used, what they depend on cannot be read: %s", problem)
        return None
    if isinstance(asked, str):
        try:
            return Path(asked).expanduser().absolute()
        except RuntimeError as problem:
            raise ConfigError(f"artifacts is {safe_repr(asked)}: {problem}") from None
    try:
        return Path(user_cache_dir("ferrum_jax"), "artifacts")
    except RuntimeError as problem:  # without HOME, for a user whom the system does not know
        _log.warning("compiled steps on disk are not used: %s", problem)
        return None


def check_compiler_options(options: CompilerOptions, device: JaxDevice) -> None:
    """Raises ConfigError for options that the compiler refuses, before any step is compiled."""
    if not options:
        return
    nothing = jax.ShapeDtypeStruct((), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(jax.numpy.negative).lower(nothing).compile(compiler_options=dict[str, Any](options))
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as problem:  # JAX's own, and those of its binding
        given = safe_repr(dict(options))
        raise ConfigError(f"compiler_options {given} on {device}: {first_line(problem)}") from problem


def build(
    name: str, lower: Callable[[], jax.stages.Lowered], artifacts: Artifacts | None, options: CompilerOptions = None
) -> jax.stages.Compiled:
    """Loads a program, or compiles and saves it."""
    artifact = None if artifacts is None else artifacts.find(name)
    loaded = None if artifacts is None or artifact is None else artifacts.load(artifact)
    return compile_and_save(name, lower, artifacts, options)[0] if loaded is None else loaded


def compile_and_save(
    name: str, lower: Callable[[], jax.stages.Lowered], artifacts: Artifacts | None, options: CompilerOptions = None
) -> tuple[jax.stages.Compiled, Artifact | None]:
    """Compiles a program and saves it in `artifacts`, which have the same options; returns both forms."""
    hits = _HITS.count()
    executable = lower().compile(compiler_options=dict[str, Any](options) if options else None)
    if artifacts is None:
        return executable, None
    if _HITS.count() == hits:
        return executable, artifacts.save(name, executable)
    # An executable from JAX's persistent cache serialises without its functions, and fails when it is called.
    artifacts.warn_of_cached()
    return executable, None


def clear(root: Path) -> int:
    """Removes every step below a folder; returns the bytes that were freed.

    Raises:
        PermissionError: somebody else owns or may write it.
        OSError: it cannot be removed.
    """
    freed = 0
    for program in PrivateFolder(root).children():
        sizes = program.sizes()
        ours = [name for name in sizes if name == FACTS or name.endswith((SUFFIX, TEMPORARY))]
        if PROGRAM.fullmatch(program.path.name) and len(ours) == len(sizes):  # a folder with other files is not ours
            freed += sum(sizes.values())
            program.remove_all()
    return freed


def _file_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32] + SUFFIX


def _packed(program: str, name: str, executable: jax.stages.Compiled) -> Artifact:
    loaded = executable.runtime_executable()
    if loaded is None:
        raise ValueError("it has no executable of the runtime")
    sharding = jax.tree.leaves(executable.output_shardings)[0]
    mesh = getattr(sharding, "mesh", None)
    devices = [*sharding.device_set] if mesh is None else [*mesh.devices.flat]  # one, or a mesh's in its order
    content = zlib.compress(pickle.dumps(serialize_executable.serialize(executable)), 1)
    ids = tuple(one.id for one in devices)
    return Artifact(name, program, devices[0].platform, ids, memory_of(executable), content)


def _header(artifact: Artifact) -> bytes:
    """Returns the line before the content: what `_verified` reads."""
    facts = {one.name: getattr(artifact, one.name) for one in fields(artifact) if one.name != "content"}
    return json.dumps(facts).encode() + b"\n"


def _verified(data: bytes, program: str, name: str) -> Artifact:
    """Parses a file; raises ValueError if it is not whole, or not this step of this program."""
    start = len(MAGIC) + hashlib.sha256().digest_size
    if not data.startswith(MAGIC):
        raise ValueError(f"it is no step of this format ({len(data)} bytes)")
    body = memoryview(data)[start:]
    if _checksum(body) != data[len(MAGIC) : start]:
        raise ValueError(f"its checksum differs, it is damaged or cut short ({len(data)} bytes)")
    end = data.index(b"\n", start)
    header: dict[str, Any] = json.loads(data[start:end])
    if (header["program"], header["name"]) != (program, name):
        raise ValueError(f"it is the step {header['name']} of the program {header['program']}")
    header["device_ids"] = tuple(header["device_ids"])
    return Artifact(**header, content=data[end + 1 :])


def _checksum(*pieces: bytes | memoryview) -> bytes:
    total = hashlib.sha256()
    for piece in pieces:
        total.update(piece)
    return total.digest()


def memory_of(executable: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of a step's temporaries, outputs and reused inputs, where the backend reports them; else empty."""
    analysis = executable.memory_analysis()
    if analysis is None:
        return {}
    return {
        "temporary_bytes": analysis.temp_size_in_bytes,
        "alias_bytes": analysis.alias_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
    }


class _CacheHits:
    """Counts the hits of JAX's persistent cache in each thread.

    Its one listener is never removed: JAX iterates over its list of listeners while other threads compile, and would
    skip one if the one before it were removed.
    """

    def __init__(self):
        self._counts = threading.local()
        self._lock = threading.Lock()
        self._is_listening = False

    def count(self) -> int:
        """Returns this thread's hits so far."""
        with self._lock:
            self._is_listening = False
            jax.monitoring.record_event(_PROBE)
            if not self._is_listening:  # for the first time, or since somebody has cleared JAX's listeners
                jax.monitoring.register_event_listener(self._listen)
        return getattr(self._counts, "hits", 0)

    def _listen(self, event: str, **_: str | int) -> None:
        if event == CACHE_HIT:
            self._counts.hits = getattr(self._counts, "hits", 0) + 1
        elif event == _PROBE:
            self._is_listening = True


_HITS = _CacheHits()

"""Compiled programs by key: lowered and compiled ahead of time, so that none can recompile in silence."""

import contextlib
import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from ferrum_jax.compile.artifacts import Artifact, Artifacts, compile_and_save, memory_of
from ferrum_jax.compile.fingerprint import describe_host, describe_settings
from ferrum_jax.config.engine import CompilerOptions
from ferrum_jax.contract.errors import BackendError

_log = logging.getLogger(__name__)
Key = Any  # hashable; its repr names what is kept on disk
Together = Callable[..., contextlib.AbstractContextManager[None]]  # takes keys and, as keywords, how they are built
RETRY_SECONDS = 10.0  # before a step that did not compile is tried again
MOST_THREADS = 16  # that compile at once; each may take gigabytes


class ProgramCache:
    """Executables by key. A missing one is compiled and counted; after `warmup` also logged, or refused if strict.

    With `artifacts`, programs on disk are loaded instead, and compiled ones are saved there.
    """

    def __init__(
        self,
        lower: Callable[[Key], jax.stages.Lowered],
        *,
        strict: bool = False,
        artifacts: Artifacts | None = None,
        options: CompilerOptions = None,
        together: Together = lambda *_, **__: contextlib.nullcontext(),
    ):
        """Compiles nothing yet; within `together`, other processes build the same programs as this one."""
        self._together = together
        self._lower = lower
        self._strict = strict  # yet a program that was compiled here and cannot be loaded is compiled again
        self._artifacts = artifacts
        self._options = options
        self._lock = threading.Lock()
        self._steps: dict[Key, jax.stages.Compiled] = {}
        self._held: dict[Key, Artifact] = {}  # verified by `warmup`, loaded when first asked for
        self._compile_seconds: dict[Key, float] = {}
        self._load_seconds: dict[Key, float] = {}  # to find and to load it
        self._memory: dict[Key, dict[str, int]] = {}  # bytes, of what was loaded or asked for
        self._failures: dict[Key, tuple[float, str]] = {}  # when a step did not compile, and why
        self._warm = False
        self._compiled_late = 0

    def get(self, key: Key) -> jax.stages.Compiled:
        """Returns the executable of a program.

        Raises:
            BackendError: it does not compile; or, in strict mode, it is missing after `warmup`.
        """
        found = self._steps.get(key)
        if found is not None:
            return found
        self._check_declared(key)
        with self._as_one([key]):
            return self._build(key, late=self._warm)

    def warmup(
        self, keys: Iterable[Key], track: Callable[[list[Key]], Any] | None = None, *, load: bool = False
    ) -> None:
        """Makes sure, on all cores, that each given step is compiled, or on disk, whole and this user's own.

        Args:
            keys: the steps.
            track: makes a context of the missing keys, to show progress, as `progress.track` does.
            load: steps that are on disk are loaded now, not when first asked for.
        """
        missing = [key for key in dict.fromkeys(keys) if key not in self._steps and (load or key not in self._held)]
        compiled = len(self._compile_seconds)
        self._failures.clear()
        with self._together(missing, is_warmup=True, load=load):
            self._do_all(missing, self._build if load else self._make_sure, track)
        self._warm = True
        if len(self._compile_seconds) > compiled:
            trim_heap()

    def drop(self) -> None:
        """Forgets every executable."""
        with self._lock:
            self._steps, self._held, self._memory, self._compile_seconds, self._load_seconds = {}, {}, {}, {}, {}
        self._failures.clear()  # there may be more memory now

    def ensure(self, keys: Iterable[Key]) -> None:
        """Makes the given steps ready, several at a time; raises as `get` does."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._steps]
        for key in missing:
            self._check_declared(key)
        if missing:
            with self._as_one(missing):
                self._do_all(missing, functools.partial(self._build, late=self._warm))

    @contextlib.contextmanager
    def _as_one(self, missing: list[Key]) -> Iterator[None]:
        """Builds steps within in all processes or in none: where one fails, the next call asks all of them again."""
        is_built = False
        try:
            with self._together(missing):
                yield
                is_built = True
        except BaseException:
            with self._lock:
                for key in missing if is_built else ():
                    self._steps.pop(key, None)
            raise

    def _do_all(
        self, keys: list[Key], do: Callable[[Key], Any], track: Callable[[list[Key]], Any] | None = None
    ) -> None:
        """Calls `do` for each key on all cores, or in this thread alone if it has settings of JAX of its own."""
        if not keys:
            return
        with ThreadPoolExecutor(max_workers=min(MOST_THREADS, describe_host()["cores"] or 1)) as pool:
            is_alone = pool.submit(describe_settings).result() != describe_settings()
            jobs = {} if is_alone else {key: pool.submit(do, key) for key in keys}
            try:
                with contextlib.nullcontext(keys) if track is None else track(keys) as tracked:
                    for key in tracked:
                        do(key) if is_alone else jobs[key].result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def stats(self) -> dict[str, Any]:
        """Counts of `compile_stats()`: a step is `compiled` here, or `loaded`; `steps` has its seconds and bytes.

        A step that `warmup` has found on disk counts as loaded; `on_disk` are those that nobody has asked for yet.
        """
        with self._lock:
            seconds = self._load_seconds | self._compile_seconds
            for key in self._steps.keys() - self._memory.keys():  # once each: XLA takes 10 ms to report it
                self._memory[key] = memory_of(self._steps[key])
            memory = self._memory | {key: artifact.memory for key, artifact in self._held.items()}
            ready = sorted(self._steps.keys() | self._held.keys(), key=str)
            return {
                "compiled": len(self._compile_seconds),
                "loaded": len(self._load_seconds.keys() - self._compile_seconds.keys()),
                "on_disk": len(self._held),
                "compile_seconds": sum(self._compile_seconds.values()),
                "load_seconds": sum(self._load_seconds.values()),
                "compiles_after_warmup": self._compiled_late,
                "steps": {str(key): {"seconds": seconds[key]} | memory[key] for key in ready},
            }

    def _check_declared(self, key: Key) -> None:
        if self._strict and self._warm and key not in self._held and key not in self._steps:
            raise BackendError(f"step {key} was not compiled by warmup, and strict mode compiles nothing afterwards")

    def _make_sure(self, key: Key) -> None:
        """Finds a step on disk, or compiles it; until its first use, it takes only the bytes of its file in memory."""
        started = time.perf_counter()
        artifact = None if self._artifacts is None else self._artifacts.find(repr(key))
        if artifact is not None:
            self._count_load(key, started)
        else:
            executable, artifact = self._compile(key)
            if artifact is None:
                self._keep(key, executable)
                return
        with self._lock:
            self._held[key] = artifact

    def _build(self, key: Key, *, late: bool = False) -> jax.stages.Compiled:
        """Loads a step, or compiles it; `late`: not for a warm-up."""
        if self._artifacts is not None:
            started = time.perf_counter()
            artifact = self._held.get(key) or self._artifacts.find(repr(key))
            executable = None if artifact is None else self._artifacts.load(artifact)
            if executable is not None:
                trim_heap()
                assert artifact is not None
                self._count_load(key, started)
                with self._lock:
                    self._memory[key] = artifact.memory  # to ask XLA for it takes 25 MB for each step
                return self._keep(key, executable)
        if late and self._strict and key not in self._compile_seconds:
            raise BackendError(f"step {key} on disk cannot be loaded, and strict mode compiles nothing after warmup")
        return self._keep(key, self._compile(key, late=late)[0])

    def _count_load(self, key: Key, started: float) -> None:
        with self._lock:
            self._load_seconds[key] = self._load_seconds.get(key, 0.0) + time.perf_counter() - started

    def _compile(self, key: Key, *, late: bool = False) -> tuple[jax.stages.Compiled, Artifact | None]:
        if late:
            _log.warning("compiling step %s after warmup: declare it in the buckets", key)
        started = time.perf_counter()
        since, told = self._failures.get(key, (-RETRY_SECONDS, ""))
        if told and started - since < RETRY_SECONDS:  # a caller may ask again at every token
            raise BackendError(told)
        try:
            built = compile_and_save(repr(key), lambda: self._lower(key), self._artifacts, self._options)
        except jax.errors.JaxRuntimeError as problem:
            told = f"step {key} does not compile: {problem}"
            self._failures[key] = time.perf_counter(), told  # not the error, which keeps its callers' arrays alive
            raise BackendError(told) from problem
        self._failures.pop(key, None)
        with self._lock:
            self._compiled_late += late
            self._compile_seconds.setdefault(key, time.perf_counter() - started)
        return built

    def _keep(self, key: Key, executable: jax.stages.Compiled) -> jax.stages.Compiled:
        with self._lock:
            self._held.pop(key, None)
            return self._steps.setdefault(key, executable)  # another thread may have been first


def trim_heap() -> None:
    """Returns to the operating system the memory that was freed and that the C library keeps (glibc).

    Compiling a dozen steps leaves some 400 MB, which take a tenth of a second to return; loading one leaves 50 MB, and
    reading a GGUF 40.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)

"""Compiled steps by shape: lowered and compiled ahead of time, so that none can recompile in silence."""

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from ferrum_jax.compile.buckets import StepKey
from ferrum_jax.compile.packing import packed_size, unpack
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import BackendError
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree

_log = logging.getLogger(__name__)
Key = TypeVar("Key", bound=Hashable)
MOST_THREADS = 16  # that compile at once; each may take gigabytes


@flax.struct.dataclass
class StepOutputs:
    """What a step hands back; what was not asked for is None."""

    logits: jax.Array | None = None  # float32 [R, V]
    token_ids: jax.Array | None = None  # int32 [R]
    logprobs: jax.Array | None = None  # float32 [R], of `token_ids`


def step(
    params: ParamTree, kv: KvState[jax.Array], buffer: jax.Array, *, cfg: ModelConfig, key: StepKey
) -> tuple[StepOutputs, KvState[jax.Array]]:
    """Runs the new tokens of one packed batch through the model. `kv` is donated."""
    logits, kv = family(cfg).forward(params, kv, unpack(buffer, key), cfg)
    return StepOutputs(logits=logits), kv


def lower_step(cfg: ModelConfig, params: Any, kv: Any, key: StepKey) -> jax.stages.Lowered:
    """Lowers one step for parameters and a KV given as arrays or as their shapes."""
    buffer = jax.ShapeDtypeStruct((packed_size(key),), jnp.int32)
    pure = functools.partial(step, cfg=cfg, key=key)
    functools.update_wrapper(pure, step)
    return jax.jit(pure, donate_argnums=1).lower(params, kv, buffer)


class StepCache(Generic[Key]):
    """Keys to executables. A key that is missing is compiled, counted and logged; in strict mode, refused."""

    def __init__(self, lower: Callable[[Key], jax.stages.Lowered], *, strict: bool = False):
        self._lower = lower
        self._strict = strict
        self._lock = threading.Lock()
        self._steps: dict[Key, jax.stages.Compiled] = {}
        self._seconds: dict[Key, float] = {}
        self._warm = False
        self._compiled_late = 0

    def get(self, key: Key) -> jax.stages.Compiled:
        """Gives the executable of a step.

        Raises:
            BackendError: it does not compile; or it is not there after `warmup`, in strict mode.
        """
        found = self._steps.get(key)
        if found is not None:
            return found
        if self._strict and self._warm:
            raise BackendError(f"step {key} was not compiled by warmup, and strict mode compiles nothing afterwards")
        if not self._warm:
            return self._build(key)
        _log.warning("compiling step %s after warmup: declare it in the ladders", key)
        built = self._build(key)
        self._compiled_late += 1
        return built

    def warmup(self, keys: Iterable[Key], track: Callable[[list[Key]], Any] | None = None) -> None:
        """Compiles the given steps on all cores; `track` wraps the list of what is left to show progress."""
        self._build_all([key for key in keys if key not in self._steps], track)
        self._warm = True

    def drop(self) -> None:
        """Forgets every executable."""
        with self._lock:
            self._steps, self._seconds = {}, {}

    def ensure(self, keys: Iterable[Key]) -> None:
        """Makes the given steps ready, several at a time; raises as `get` does."""
        if self._warm:
            for key in keys:
                self.get(key)
        else:
            self._build_all([key for key in keys if key not in self._steps])

    def _build_all(self, missing: list[Key], track: Callable[[list[Key]], Any] | None = None) -> None:
        with ThreadPoolExecutor(max_workers=min(MOST_THREADS, _num_cores())) as pool:
            jobs = {key: pool.submit(self._build, key) for key in missing}
            try:
                for key in missing if track is None else track(missing):
                    jobs[key].result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def stats(self) -> dict[str, Any]:
        """Counts of `compile_stats()`; `steps` maps each step to its seconds and bytes."""
        with self._lock:
            steps = {
                str(key): {"seconds": self._seconds[key]} | _memory(c)
                for key, c in sorted(self._steps.items(), key=str)
            }
            return {
                "compiled": len(steps),
                "loaded": 0,
                "compile_seconds": sum(self._seconds.values()),
                "compiles_after_warmup": self._compiled_late,
                "steps": steps,
            }

    def _build(self, key: Key) -> jax.stages.Compiled:
        started = time.perf_counter()
        try:
            executable = self._lower(key).compile()
        except jax.errors.JaxRuntimeError as problem:
            raise BackendError(f"step {key} does not compile: {problem}") from problem
        with self._lock:
            self._seconds[key] = time.perf_counter() - started
            return self._steps.setdefault(key, executable)


def _num_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no such call
        return os.cpu_count() or 1


def _memory(executable: jax.stages.Compiled) -> dict[str, int]:
    analysis = executable.memory_analysis()
    if analysis is None:
        return {}
    return {"temporary_bytes": analysis.temp_size_in_bytes, "alias_bytes": analysis.alias_size_in_bytes}

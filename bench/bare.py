"""A compiled step without the engine around it: its arguments are on the device before it starts."""

import time
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from bench.models import TOKEN
from ferrum_jax.compile.buckets import StepKey
from ferrum_jax.compile.packing import blank
from ferrum_jax.compile.steps import lower_step
from ferrum_jax.config import ModelConfig
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models.specs import ParamTree


class BareStep:
    """One step with a KV of its own that goes round."""

    def __init__(self, cfg: ModelConfig, params: ParamTree, spec: CacheSpec, key: StepKey):
        self._params, self._spec, self._key = params, spec, key
        started = time.perf_counter()
        lowered = lower_step(cfg, params, state.shapes(spec), key)
        self.trace_seconds = time.perf_counter() - started
        self.executable = lowered.compile()
        self.compile_seconds = time.perf_counter() - started - self.trace_seconds
        self._kv = state.empty(spec)

    @classmethod
    def of(cls, runner: ModelRunner, rows: int) -> Self:
        """Makes the step that decodes so many rows, as the runner has it."""
        key = StepKey(rows, 0, 0, runner.plan.ladders.table_columns)
        return cls(runner.model_config, runner.params, runner.plan.cache, key)

    def at(self, context: int) -> Callable[[], Any]:
        """Gives the call that runs new tokens of every row after `context` positions; its outputs stay where they are.

        The rows' blocks differ as far as the pool has so many.
        """
        buffer, groups = blank(self._key)
        given = 0
        for group in groups:
            rows, tokens = group.tokens.shape
            group.tokens[:], group.counts[:], group.lengths[:] = TOKEN, tokens, context
            used = -(-(context + tokens) // self._spec.block_size)
            blocks = (given + np.arange(rows * used)) % self._spec.num_blocks
            group.tables[:, :used] = blocks.reshape(-1, used)
            given += rows * used
        packed = jax.device_put(buffer, jax.tree.leaves(self._params)[0].sharding)

        def run() -> Any:
            outputs, self._kv = self.executable(self._params, self._kv, packed)
            return jax.block_until_ready(outputs)

        return run

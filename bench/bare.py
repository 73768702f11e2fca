"""Compiled steps and loops without the engine around them: their arguments are on the device before they start."""

import time
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from bench.models import TOKEN
from ferrum_jax.compile.buckets import LoopKey, StepKey
from ferrum_jax.compile.looping import LoopRow, pack_loop
from ferrum_jax.compile.lowering import lower
from ferrum_jax.compile.packing import blank
from ferrum_jax.compile.steps import lower_step
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.decoding import Sampling
from ferrum_jax.executor.adapters import NONE
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models.specs import ParamTree


class BareStep:
    """One step with a KV of its own that goes round."""

    def __init__(self, cfg: ModelConfig, params: ParamTree, spec: CacheSpec, key: StepKey):
        self._params, self._spec, self._key = params, spec, key
        started = time.perf_counter()
        lowered = lower_step(cfg, params, state.shapes(spec), key, attention=spec.attention)
        self.trace_seconds = time.perf_counter() - started
        self.executable = lowered.compile()
        self.compile_seconds = time.perf_counter() - started - self.trace_seconds
        self._kv = state.empty(spec)

    @classmethod
    def of(cls, runner: ModelRunner, rows: int) -> Self:
        """Makes the step that decodes so many rows, as the runner has it."""
        key = StepKey(rows, 0, 0, runner.plan.ladders.table_columns)
        return cls(runner.model_config, runner.params, runner.plan.cache, key)

    def at(self, context: int, ids: np.ndarray | int = TOKEN) -> Callable[[], Any]:
        """Gives the call that runs new tokens of every row after `context` positions; its outputs stay where they are.

        The rows' blocks differ as far as the pool has so many; their tokens are all one, or as `ids` says.
        """
        buffer, groups = blank(self._key)
        given = 0
        for group in groups:
            rows, tokens = group.tokens.shape
            group.tokens[:], group.counts[:], group.lengths[:] = ids, tokens, context
            used = -(-(context + tokens) // self._spec.block_size)
            blocks = (given + np.arange(rows * used)) % self._spec.num_blocks
            group.tables[:, :used] = blocks.reshape(-1, used)
            given += rows * used
        packed = jax.device_put(buffer, jax.tree.leaves(self._params)[0].sharding)

        def run() -> Any:
            outputs, self._kv = self.executable(self._params, self._kv, packed)
            return outputs

        return run


class BareLoop:
    """One loop of greedy rows, as the runner has it, with a KV of its own that goes round."""

    def __init__(self, runner: ModelRunner, rows: int):
        plan = runner.plan
        self._runner, self._spec = runner, plan.cache
        self._key = LoopKey(rows, plan.ladders.loop_tokens, plan.ladders.table_columns)
        shapes = state.shapes(self._spec)
        self._executable = lower(runner.model_config, runner.params, shapes, None, self._key).compile()
        self._kv = state.empty(self._spec)

    def at(self, context: int) -> Callable[[], Any]:
        """Gives the call that chooses all the loop's tokens for every row after `context` positions."""
        key = self._key
        used = -(-(context + key.tokens) // self._spec.block_size)
        tables = np.zeros((key.rows, key.table_columns), np.int32)
        tables[:, :used] = (np.arange(key.rows * used) % self._spec.num_blocks).reshape(-1, used)
        rows = [
            LoopRow(
                token=TOKEN,
                length=context,
                limit=key.tokens,
                table=table,
                stop_ids=(),
                sampling=Sampling(),
                seed=0,
                adapter=NONE,
                seen=np.zeros(0, np.int32),
            )
            for table in tables
        ]
        buffer = pack_loop(rows, key, self._runner.model_config.vocab_size, until_one_ends=False)
        packed = jax.device_put(buffer, self._runner.device)

        def run() -> Any:
            outputs, self._kv = self._executable(self._runner.params, self._kv, packed)
            return outputs

        return run

"""Compiled programs without the engine around them: their arguments are on the device before they start."""

import time
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from bench.models import TOKEN
from ferrum_jax.compile import multi_step, sampler
from ferrum_jax.compile.multi_step import MultiStepKey
from ferrum_jax.compile.sampler import BRANCHES, ConfigureKey, SampleKey, SamplerSpec, SlotSettings
from ferrum_jax.compile.step import ProgramContext, StepKey, blank
from ferrum_jax.config import ModelConfig
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec, KvState
from ferrum_jax.models.specs import ParamTree


def random_kv(spec: CacheSpec, seed: int) -> KvState[jax.Array]:
    """Draws normal numbers for every position, the same ones in every layout; all layers keep everything."""
    rng, kv = np.random.default_rng(seed), state.empty(spec)
    block_ids, offsets = (axis.ravel() for axis in np.indices((spec.num_blocks, spec.block_size)))
    for layer in range(spec.num_layers):
        k, v = rng.standard_normal((2, len(offsets), spec.num_kv_heads, spec.head_dim), np.float32)
        kv = state.write(kv, layer, jnp.asarray(block_ids), jnp.asarray(offsets), jnp.asarray(k), jnp.asarray(v))
    return kv


class BareStep:
    """One step with a KV, of zeros unless it is given, and a sampler of its own that go round."""

    def __init__(
        self,
        cfg: ModelConfig,
        params: ParamTree,
        spec: CacheSpec,
        key: StepKey,
        sizes: SamplerSpec | None = None,
        kv: KvState[jax.Array] | None = None,
    ):
        self._leaves, self._spec, self._key = jax.tree.leaves(params), spec, key
        capacity = key.table_columns * spec.block_size
        rows = key.decode_rows + key.blocks
        self._sizes = sizes or SamplerSpec(num_slots=rows, vocab_size=cfg.vocab_size, capacity=capacity)
        placed = self._leaves[0].sharding
        self._sampler = jax.device_put(sampler.initial(self._sizes), placed)
        self._context = ProgramContext(cfg, params, state.shapes(spec), self._sampler, attention=spec.attention)
        started = time.perf_counter()
        lowered = key.lower(self._context)
        self.trace_seconds = time.perf_counter() - started
        self.executable = lowered.compile()
        self.compile_seconds = time.perf_counter() - started - self.trace_seconds
        self._kv = state.empty(spec) if kv is None else kv

    @classmethod
    def of(cls, runner: ModelRunner, rows: int) -> Self:
        """Returns the step that decodes so many rows, as the runner has it."""
        plan = runner.plan
        return cls(runner.model_config, runner.params, plan.cache, plan.buckets.decode(rows), plan.sampler)

    def at(self, context: int, ids: np.ndarray | int = TOKEN) -> Callable[[], Any]:
        """Returns the call that runs new tokens after `context` positions; its outputs stay where they are.

        Decode rows are a sequence each, in blocks that differ as far as the pool has so many; query blocks are one
        prompt. Their tokens are all one, or as `ids` says.
        """
        packed = self._pack(context, ids)

        def run() -> Any:
            outputs, self._kv = self.executable(self._leaves, self._kv, self._sampler.last_tokens, packed)
            return outputs

        return run

    def sampled_at(self, context: int, settings: SlotSettings) -> Callable[[], Any]:
        """As `at` for decode rows, with the sampler chained on the logits: each row's token is chosen as asked for."""
        packed = self._pack(context, TOKEN)
        is_gpu = next(iter(self._leaves[0].devices())).platform == "gpu"
        way = settings.way if is_gpu else BRANCHES  # as the engine has it
        sample = SampleKey(self._key.logit_rows, way).lower(self._context).compile()
        configure = ConfigureKey(self._sizes.capacity).lower(self._context).compile()
        for slot in range(self._key.decode_rows):
            self._sampler = configure(self._sampler, sampler.pack_settings(slot, settings, self._sizes))

        def run() -> Any:
            outputs, self._kv = self.executable(self._leaves, self._kv, self._sampler.last_tokens, packed)
            self._sampler, found = sample(self._sampler, outputs.logits, outputs.rows)
            return found.packed

        return run

    def _pack(self, context: int, ids: np.ndarray | int) -> jax.Array:
        key, block_size = self._key, self._spec.block_size
        buffer, packed = blank(key, self._sizes.num_slots)
        given = 0
        if packed.decode is not None:
            group, rows = packed.decode, key.decode_rows
            group.tokens[:], group.counts[:], group.lengths[:] = ids, 1, context
            used = -(-(context + 1) // block_size)
            _fill_tables(group.tables, self._spec, used)
            given = rows * used
            packed.decode_slots[:] = packed.sample_slots[:rows] = packed.logit_index[:rows] = np.arange(rows)
            packed.sample_positions[:rows] = context + 1
        if packed.blocks is not None:
            group, tokens = packed.blocks, key.block_tokens
            group.tokens[:], group.counts[:] = ids, tokens
            group.lengths[:] = context + tokens * np.arange(key.blocks)
            used = -(-(context + tokens * key.blocks) // block_size)
            _fill_tables(group.tables[:1], self._spec, used, given, key.decode_rows)
            group.tables[:] = group.tables[0]
            if key.outputs == "last":
                packed.logit_index[-1] = key.num_tokens - 1
        return jax.device_put(buffer, self._leaves[0].sharding)


def _fill_tables(tables: np.ndarray, spec: CacheSpec, used: int, first_block: int = 0, first_slot: int = 0) -> None:
    """Gives each row `used` blocks and, in the last columns, the blocks of one slot of the sliding-window cache.

    Rows share blocks only where the pool has too few.
    """
    rows, window = len(tables), spec.window_blocks
    tables[:, :used] = ((first_block + np.arange(rows * used)) % spec.num_blocks).reshape(-1, used)
    if window:
        slots = (first_slot + np.arange(rows)) % spec.window_slots
        tables[:, -window:] = slots[:, None] * window + np.arange(window)


class BareLoop:
    """One multi-step program of greedy rows, as the runner has it, with a KV and a sampler of its own."""

    def __init__(self, runner: ModelRunner, rows: int):
        plan = runner.plan
        self._runner, self._spec = runner, plan.cache
        self._key = MultiStepKey(rows, plan.buckets.multi_step_tokens, plan.buckets.table_columns)
        self._sampler = jax.device_put(sampler.initial(plan.sampler), runner.device)
        shapes = state.shapes(self._spec)
        context = ProgramContext(
            runner.model_config, runner.params, shapes, self._sampler, attention=self._spec.attention
        )
        self._executable = self._key.lower(context).compile()
        self._kv = state.empty(self._spec)

    def at(self, context: int) -> Callable[[], Any]:
        """Returns the call that chooses all the program's tokens for every row after `context` positions."""
        key = self._key
        buffer, rows = multi_step.blank(key, until_one_ends=False)
        used = -(-(context + key.tokens) // self._spec.block_size)
        _fill_tables(rows.tables, self._spec, used)
        rows.tokens[:], rows.lengths[:], rows.limits[:] = TOKEN, context, key.tokens
        rows.slots[:] = np.arange(key.rows)
        packed, leaves = jax.device_put(buffer, self._runner.device), jax.tree.leaves(self._runner.params)

        def run() -> Any:
            chosen, self._kv, self._sampler = self._executable(leaves, self._kv, self._sampler, packed)
            return chosen

        return run

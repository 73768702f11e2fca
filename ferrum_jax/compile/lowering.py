"""Every device call of the engine, lowered for one model and its KV."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ferrum_jax.compile.bits import num_words
from ferrum_jax.compile.buckets import AnyKey, CopyKey, InstallKey, LoopKey, ScoreKey, SelectKey, StepKey
from ferrum_jax.compile.looping import decode_loop, loop_size
from ferrum_jax.compile.scoring import score
from ferrum_jax.compile.selecting import select
from ferrum_jax.compile.steps import lower_step
from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache import state
from ferrum_jax.models import adapters, specs
from ferrum_jax.models.adapters import LoraSpec


def lower(
    cfg: ModelConfig, params: Any, kv: Any, loras: Any, key: AnyKey, attention: str = "xla"
) -> jax.stages.Lowered:
    """Lowers the call that a key stands for.

    Parameters, KV and stacks of adapters are arrays or their shapes; where the KV's shapes lie, the call runs.
    `attention` is the backend whose layout the KV has.
    """
    if isinstance(key, StepKey):
        return lower_step(cfg, params, kv, key, loras, attention)
    if isinstance(key, LoopKey):
        pure = functools.partial(decode_loop, cfg=cfg, key=key, attention=attention)
        functools.update_wrapper(pure, decode_loop)
        buffer = _ints(loop_size(key, cfg.vocab_size))
        return jax.jit(pure, donate_argnums=1).lower(params, kv, buffer, *([loras] if key.adapters else []))
    if isinstance(key, InstallKey):
        dtype = jax.tree.leaves(loras)[0].dtype.name
        spec = LoraSpec(max_loras=key.max_loras, max_rank=key.max_rank)
        return jax.jit(adapters.install).lower(loras, specs.shapes(adapters.adapter_specs(cfg, spec), dtype), _ints())
    if isinstance(key, SelectKey | ScoreKey):
        placed = jax.tree.leaves(kv)[0].sharding
        logits = jax.ShapeDtypeStruct((key.logit_rows, cfg.vocab_size), jnp.float32, sharding=placed)
        if isinstance(key, ScoreKey):
            return jax.jit(score).lower(logits, _ints(key.logit_rows))
        return jax.jit(select).lower(logits, _ints(1 + key.logit_rows * (1 + 2 * num_words(cfg.vocab_size))))
    if isinstance(key, CopyKey):
        return jax.jit(state.copy_blocks, donate_argnums=0).lower(kv, _ints(key.blocks, 2), _ints())
    return jax.jit(state.gather_sequence).lower(kv, _ints(), _ints(key.table_columns))


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)

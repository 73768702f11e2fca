"""The attention block of a layer: parameters, heads, and the cache.

A family with this attention uses `self_attention` whole; others compose the same steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.projections import Lora, linear_specs, project, project_all
from ferrum_jax.models.specs import ParamSpec, ParamTree, norm_specs
from ferrum_jax.ops.attention import attend, attention_weights
from ferrum_jax.ops.batch import Batch
from ferrum_jax.ops.norm import rms_norm
from ferrum_jax.ops.rope import rotate

Norm = Callable[[jax.Array, jax.Array, float], jax.Array]  # of the last axis: numbers, weight and epsilon
Weights = tuple[jax.Array, ...]  # of attention: float32 [B, N, T, S] of each group of rows, or empty if not captured
LayerOutput = tuple[jax.Array, KvState[jax.Array], Weights]  # [X, D], and the KV written
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}  # name of the joined weight, and its parts


class LayerContext(NamedTuple):
    """What a layer needs of its step beside its parameters, activations and KV."""

    layer: int | jax.Array  # index into the first axis of its KV
    window: int | jax.Array | None  # positions a token sees, or None for all
    rope: tuple[jax.Array, jax.Array]  # cosines and sines of each token, [X, 1, H / 2] each
    slot_mapping: tuple[jax.Array, jax.Array]  # block and offset each token is written to, [X] each
    batch: Batch[jax.Array]
    backend: str  # of attention
    captures_weights: bool = False


def attention_specs(cfg: ModelConfig, norm_init: str = "ones") -> ParamTree:
    """Specs of the four products, and of sinks and norms of query and key heads where the model has them."""
    model = (cfg.hidden_size, "embed")
    queries = (cfg.num_attention_heads * cfg.head_dim, "heads")
    keys = (cfg.num_key_value_heads * cfg.head_dim, "kv_heads")
    specs: ParamTree = {
        "q_proj": linear_specs(queries, model, cfg.attention_bias),
        "k_proj": linear_specs(keys, model, cfg.attention_bias),
        "v_proj": linear_specs(keys, model, cfg.attention_bias),
        "o_proj": linear_specs(model, queries, cfg.attention_out_bias),
    }
    if cfg.attention_sinks:
        specs["sinks"] = ParamSpec((cfg.num_attention_heads,), ("heads",))
    if cfg.qk_norm:
        specs |= {name: norm_specs(cfg.head_dim, "head", norm_init) for name in ("q_norm", "k_norm")}
    return specs


@jax.named_scope("attention")
def self_attention(
    block: ParamTree,
    lora: Lora,
    x: jax.Array,  # [X, D]
    kv: KvState[jax.Array],
    context: LayerContext,
    cfg: ModelConfig,
    norm: Norm = rms_norm,
) -> LayerOutput:
    """Attends with grouped query heads; with `cfg.qk_norm`, after a norm of every query and key head."""
    q, k, v = (split_heads(y, cfg) for y in project_qkv(block, lora, x, cfg))
    if cfg.qk_norm:
        q = norm(q, block["q_norm"]["weight"], cfg.rms_norm_eps)
        k = norm(k, block["k_norm"]["weight"], cfg.rms_norm_eps)
    mixed, kv, weights = attend_with_cache(q, k, v, kv, context, cfg, block.get("sinks"))
    return project(mixed, block, lora, "o_proj"), kv, weights


def project_qkv(block: ParamTree, lora: Lora, x: jax.Array, cfg: ModelConfig) -> list[jax.Array]:
    """Projects to queries, keys and values, `[X, N*H]` and twice `[X, K*H]`."""
    num_heads = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.num_key_value_heads
    return project_all(x, block, lora, "qkv_proj", FUSED["qkv_proj"], num_heads)


def split_heads(y: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Splits a projection into heads, `[X, heads*H]` to `[X, heads, H]`."""
    return y.reshape(len(y), -1, cfg.head_dim)


def attend_with_cache(
    q: jax.Array,  # [X, N, H]
    k: jax.Array,  # [X, K, H]
    v: jax.Array,
    kv: KvState[jax.Array],
    context: LayerContext,
    cfg: ModelConfig,
    sinks: jax.Array | None = None,  # [N]
) -> LayerOutput:
    """Rotates queries and keys, writes keys and values, then attends to the cache; outputs of heads are `[X, N*H]`."""
    q, k = rotate(q, *context.rope), rotate(k, *context.rope)
    kv = state.write(kv, context.layer, *context.slot_mapping, k, v)
    scale = cfg.head_dim**-0.5 if cfg.attention_multiplier is None else cfg.attention_multiplier
    window, softcap = context.window, cfg.attn_logit_softcapping
    outs, weights, start = [], [], 0
    for rows in context.batch.groups:
        size = rows.tokens.size
        own = q[start : start + size].reshape(*rows.tokens.shape, -1, cfg.head_dim)
        out = attend(
            own, kv, context.layer, rows,
            scale=scale, window=window, softcap=softcap, sinks=sinks, backend=context.backend,
        )  # fmt: skip
        outs.append(out.reshape(size, -1))
        start += size
        if context.captures_weights:
            weights.append(attention_weights(own, kv, context.layer, rows, scale=scale, window=window, softcap=softcap))
    return jnp.concatenate(outs), kv, tuple(weights)

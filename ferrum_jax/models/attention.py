"""The attention block of a layer: its parameters, its heads, and its use of the KV cache."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.hooks import NO_TAPS, Taps
from ferrum_jax.models.projections import Lora, linear_specs, project, project_all
from ferrum_jax.models.specs import ParamSpec, ParamTree, norm_specs
from ferrum_jax.ops.attention import attend, attend_dense, attend_new, cached_keys, rotate_and_write
from ferrum_jax.ops.batch import Batch, Rows
from ferrum_jax.ops.norm import wide_rms_norm
from ferrum_jax.ops.rope import rotate
from ferrum_jax.ops.shards import WHOLE, Shards, mean_squares

Norm = Callable[[jax.Array, jax.Array, float], jax.Array]  # of x over its last axis, given x, weight and epsilon
Held = TypeVar("Held", KvState[jax.Array], None)
Cache = KvState[jax.Array] | None  # None: every row begins in this forward, which keeps no keys and values
LayerOutput = tuple[jax.Array, Cache, dict[str, Any]]  # [X, D], the updated KV, and captures by name of hook point


class LayerContext(NamedTuple):
    """A layer's inputs from the step, beside parameters, activations and KV."""

    layer: int | jax.Array  # index into the first axis of the KV
    window: int | jax.Array | None  # positions a token sees, or None for all
    rope: tuple[jax.Array, jax.Array]  # cosines and sines of each token, [X, 1, H / 2] each
    slot_mapping: tuple[jax.Array, jax.Array]  # block and offset to which each token is written, [X] each
    batch: Batch[jax.Array]
    backend: str  # of attention
    taps: Taps = NO_TAPS
    shards: Shards = WHOLE  # how heads are divided


def attention_specs(cfg: ModelConfig, norm_init: str = "ones") -> ParamTree:
    """Specs of the four projections, and of sinks and norms of query and key heads where the model has them."""
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


def wide_norm_attention_specs(cfg: ModelConfig, norm_init: str = "ones") -> ParamTree:
    """As `attention_specs`, with one norm over all query heads and one over all key heads of a token, as in OLMo 2."""
    return attention_specs(cfg) | {
        "q_norm": norm_specs(cfg.num_attention_heads * cfg.head_dim, "heads", norm_init),
        "k_norm": norm_specs(cfg.num_key_value_heads * cfg.head_dim, "kv_heads", norm_init),
    }


def fused_attention_specs(cfg: ModelConfig, norm_init: str = "ones") -> ParamTree:
    """As `attention_specs`, with the projections q, k and v fused in the checkpoint itself, as in Phi-3."""
    keys = ("kv_heads", cfg.num_key_value_heads * cfg.head_dim)
    parts = ("heads", cfg.num_attention_heads * cfg.head_dim), keys, keys
    qkv = linear_specs((sum(size for _, size in parts), "fused"), (cfg.hidden_size, "embed"), parts=parts)
    return {"qkv_proj": qkv, "o_proj": attention_specs(cfg, norm_init)["o_proj"]}


@jax.named_scope("attention")
def self_attention(
    block: ParamTree,
    lora: Lora,
    x: jax.Array,  # [X, D]
    kv: Cache,
    context: LayerContext,
    cfg: ModelConfig,
    norm: Norm,
) -> LayerOutput:
    """Writes keys and values to the KV, then attends with grouped query heads.

    Norms of queries and keys are over each head (`cfg.qk_norm`) or over all heads of a token together. With `shards`,
    the heads are this device's, and the output is this device's term of a sum over devices.
    """
    num_heads = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.num_key_value_heads
    parts = project_all(x, block, lora, "qkv_proj", ("q_proj", "k_proj", "v_proj"), num_heads)
    projected = {
        name: context.taps.changed(name, y.reshape(len(x), -1, cfg.head_dim))
        for name, y in zip("qkv", parts, strict=True)
    }
    q, k, v = (y.reshape(len(x), -1) for y in projected.values())
    if "q_norm" in block and not cfg.qk_norm:
        of_q, of_k = mean_squares(q, k, cfg.head_dim, context.shards)
        q = wide_rms_norm(q, block["q_norm"]["weight"], cfg.rms_norm_eps, of_q)
        k = wide_rms_norm(k, block["k_norm"]["weight"], cfg.rms_norm_eps, of_k)
    q, k, v = (y.reshape(len(x), -1, cfg.head_dim) for y in (q, k, v))
    if cfg.qk_norm:
        q, k = (norm(y, block[name]["weight"], cfg.rms_norm_eps) for y, name in ((q, "q_norm"), (k, "k_norm")))
    if kv is None:
        q, k = rotate(q, *context.rope), rotate(k, *context.rope)
    else:
        q, kv = rotate_and_write(
            q, k, v, context.rope, kv, context.layer, *context.slot_mapping, backend=context.backend
        )
    scale = cfg.head_dim**-0.5 if cfg.attention_multiplier is None else cfg.attention_multiplier
    mixed, weights = attend_rows(q, kv, (k, v), context, scale, cfg.attn_logit_softcapping, block.get("sinks"))
    mixed = context.taps.changed("z", mixed)
    captured = context.taps.captured(**projected, z=mixed) | weights
    return project(mixed.reshape(len(x), -1), block, lora, "o_proj"), kv, captured


def attend_rows(
    q: jax.Array,  # [X, N, H]
    kv: Cache,
    new: tuple[jax.Array, jax.Array],  # keys and values of the new tokens, [X, K, H] each; read where there is no KV
    context: LayerContext,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
) -> tuple[jax.Array, dict[str, Any]]:
    """Attends, one group of rows after another; returns heads' outputs `[X, N, H]`, and captured scores and weights.

    Captured scores and weights are computed for the whole group at once, beside the backend's attention. Where
    interventions change them, this dense attention replaces the backend's.
    """
    taps, outs, start = context.taps, [], 0
    found: dict[str, tuple[jax.Array, ...]] = {name: () for name in ("attn_scores", "pattern") if taps.wants(name)}
    asked: dict[str, Any] = {"scale": scale, "window": context.window, "softcap": softcap, "sinks": sinks}
    is_changed = taps.changes("attn_scores", "pattern")
    for rows in context.batch.groups:
        size = rows.tokens.size

        def of_rows(x: jax.Array, rows: Rows[jax.Array] = rows, part: slice = slice(start, start + size)) -> jax.Array:
            return x[part].reshape(*rows.tokens.shape, *x.shape[1:])

        own, keys = of_rows(q), (of_rows(new[0]), of_rows(new[1]))
        out = None
        if not is_changed:
            out = (
                attend_new(own, *keys, **asked)
                if kv is None
                else attend(own, kv, context.layer, rows, **asked, backend=context.backend)
            )
        if found or out is None:
            keys = keys if kv is None else cached_keys(kv, context.layer, rows)
            mixed, scores, weights = attend_dense(
                own,
                *keys,
                rows,
                **asked,
                on_scores=partial(taps.changed, "attn_scores") if is_changed else None,
                on_weights=partial(taps.changed, "pattern") if is_changed else None,
            )
            out = mixed if out is None else out
            found = {name: (*known, {"attn_scores": scores, "pattern": weights}[name]) for name, known in found.items()}
        outs.append(out.reshape(size, *out.shape[2:]))
        start += size
    return jnp.concatenate(outs), found

"""The attention of a layer: its parameters, its heads, and their way through the KV.

A family whose attention is `self_attention` takes it whole; others put theirs together from the same steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.products import Lora, linear_specs, project, project_all
from ferrum_jax.models.specs import ParamSpec, ParamTree, norm_specs
from ferrum_jax.ops.attention import attend
from ferrum_jax.ops.attention_weights import attention_weights
from ferrum_jax.ops.batch import Batch
from ferrum_jax.ops.norm import rms_norm
from ferrum_jax.ops.rope import rotate

Norm = Callable[[jax.Array, jax.Array, float], jax.Array]  # of the last axis: numbers, weight and epsilon
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}  # products of one input, and what their joined weight is called


class Site(NamedTuple):
    """Where a layer stands: which one it is, and what all layers of the step share."""

    layer: int | jax.Array
    window: int | jax.Array | None  # positions it sees, or None for all
    turn: tuple[jax.Array, jax.Array]  # cosines and sines of each token, [X, 1, H/2] each
    places: tuple[jax.Array, jax.Array]  # of each token in the KV: block and offset, [X] each
    batch: Batch[jax.Array]
    backend: str  # of attention
    weights: list[jax.Array] | None = None  # of attention, one for each group of rows, where somebody wants to see them

    def at(self, layer: int, window: int | None, turn: tuple[jax.Array, jax.Array]) -> "Site":
        """Gives where another layer stands."""
        return self._replace(layer=layer, window=window, turn=turn)


def attention_specs(cfg: ModelConfig, norm_init: str = "ones") -> ParamTree:
    """Describes four products, and where there are some, the norms of query and key heads and their sinks."""
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
    site: Site,
    cfg: ModelConfig,
    norm: Norm = rms_norm,
) -> tuple[jax.Array, KvState[jax.Array]]:
    """Attends with grouped heads, after a norm of every query and key head where `cfg.qk_norm`."""
    q, k, v = (split_heads(y, cfg) for y in project_qkv(block, lora, x, cfg))
    if cfg.qk_norm:
        q = norm(q, block["q_norm"]["weight"], cfg.rms_norm_eps)
        k = norm(k, block["k_norm"]["weight"], cfg.rms_norm_eps)
    mixed, kv = turn_and_attend(q, k, v, kv, site, cfg, block.get("sinks"))
    return project(mixed, block, lora, "o_proj"), kv


def project_qkv(block: ParamTree, lora: Lora, x: jax.Array, cfg: ModelConfig) -> list[jax.Array]:
    """Projects to queries, keys and values, `[X, N*H]` and twice `[X, K*H]`."""
    num_heads = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.num_key_value_heads
    return project_all(x, block, lora, "qkv_proj", FUSED["qkv_proj"], num_heads)


def split_heads(y: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Cuts what was projected into heads, `[X, heads*H]` to `[X, heads, H]`."""
    return y.reshape(len(y), -1, cfg.head_dim)


def turn_and_attend(
    q: jax.Array,  # [X, N, H]
    k: jax.Array,  # [X, K, H]
    v: jax.Array,
    kv: KvState[jax.Array],
    site: Site,
    cfg: ModelConfig,
    sinks: jax.Array | None = None,  # [N]
) -> tuple[jax.Array, KvState[jax.Array]]:
    """Rotates queries and keys, writes keys and values, and attends to what is written: heads mixed to `[X, N*H]`."""
    q, k = rotate(q, *site.turn), rotate(k, *site.turn)
    kv = state.write(kv, site.layer, *site.places, k, v)
    scale = cfg.head_dim**-0.5 if cfg.attention_multiplier is None else cfg.attention_multiplier
    outs, start = [], 0
    for rows in site.batch.groups:
        size = rows.tokens.size
        mine = q[start : start + size].reshape(*rows.tokens.shape, -1, cfg.head_dim)
        out = attend(
            mine,
            kv,
            site.layer,
            rows,
            scale=scale,
            window=site.window,
            softcap=cfg.attn_logit_softcapping,
            sinks=sinks,
            backend=site.backend,
        )
        outs.append(out.reshape(size, -1))
        start += size
        if site.weights is not None and sinks is None:  # what goes to a sink is not shown
            seen = attention_weights(
                mine, kv, site.layer, rows, scale=scale, window=site.window, softcap=cfg.attn_logit_softcapping
            )
            site.weights.append(seen)
    return jnp.concatenate(outs), kv

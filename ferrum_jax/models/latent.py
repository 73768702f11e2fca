"""Multi-head latent attention: the KV holds one compressed latent per position instead of the heads' keys and values.

DeepSeek-AI 2024, "DeepSeek-V2", section 2.1. The KV holds `kv_lora_rank + qk_rope_head_dim` numbers per position: the
latent, normed, and the rotated part of the key, which all heads share. Keys and values are never expanded. Instead,
queries are multiplied by the keys' up-projection and attention outputs by the values' (the section calls this absorbing
the projections), so attention has one kv head, whose values are its keys.
"""

import jax
import jax.numpy as jnp

from ferrum_jax.config import LatentConfig, ModelConfig
from ferrum_jax.models.attention import Cache, LayerContext, LayerOutput, Norm, attend_rows
from ferrum_jax.models.projections import Lora, linear_specs, project
from ferrum_jax.models.specs import ParamTree, norm_specs
from ferrum_jax.ops.attention import write
from ferrum_jax.ops.linear import StackedWeight, linear, precision
from ferrum_jax.ops.quantised import QuantisedWeight, dequantise_weight
from ferrum_jax.ops.rope import rotate

EPSILON = 1e-6  # of the latents' norms; `rms_norm_eps` does not apply to them


def latent_attention_specs(cfg: ModelConfig, norm_init: str) -> ParamTree:
    """Specs of the down- and up-projections and of the latents' norms."""
    latent, model, heads = cfg.latent, (cfg.hidden_size, "embed"), cfg.num_attention_heads
    assert latent is not None
    queries = (heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim), "heads")
    both = (heads * (latent.qk_nope_head_dim + latent.v_head_dim), "heads")
    specs = {
        "kv_a_proj_with_mqa": linear_specs((latent.cached_dim, "latent"), model, cfg.attention_bias),
        "kv_a_layernorm": norm_specs(latent.kv_lora_rank, "latent", norm_init),
        "kv_b_proj": linear_specs(both, (latent.kv_lora_rank, "latent")),
        "o_proj": linear_specs(model, (heads * latent.v_head_dim, "heads"), cfg.attention_bias),
    }
    if latent.q_lora_rank is None:
        return specs | {"q_proj": linear_specs(queries, model)}
    return specs | {
        "q_a_proj": linear_specs((latent.q_lora_rank, "latent"), model, cfg.attention_bias),
        "q_a_layernorm": norm_specs(latent.q_lora_rank, "latent", norm_init),
        "q_b_proj": linear_specs(queries, (latent.q_lora_rank, "latent")),
    }


def latent_attention(
    block: ParamTree,
    lora: Lora,
    x: jax.Array,
    kv: Cache,
    context: LayerContext,
    cfg: ModelConfig,
    norm: Norm,
) -> LayerOutput:
    """Writes the new tokens' latents to the KV, then attends over all latents, `[X, D]` to `[X, D]`."""
    latent, heads = cfg.latent, cfg.num_attention_heads
    assert latent is not None
    assert cfg.attention_multiplier is not None
    rank, fixed = latent.kv_lora_rank, latent.qk_nope_head_dim
    projected = context.taps.changed("q", _queries(block, lora, x, norm).reshape(len(x), heads, -1))
    q = projected  # [X, N, fixed + rotated]
    down = linear(x, block["kv_a_proj_with_mqa"]["weight"], block["kv_a_proj_with_mqa"].get("bias"))
    cached = norm(down[:, :rank], block["kv_a_layernorm"]["weight"], EPSILON)
    key = _rotate(down[:, None, rank:], latent, context)
    new = jnp.concatenate([cached[:, None], key], axis=-1)
    if kv is not None:
        kv = write(kv, context.layer, *context.slot_mapping, new, backend=context.backend)
    weight = block["kv_b_proj"]["weight"]
    if isinstance(weight, StackedWeight):
        weight = weight.copy()
    if isinstance(weight, QuantisedWeight):
        weight = dequantise_weight(weight, x.dtype)
    weight = weight.reshape(heads, -1, rank)  # [N, fixed + V, R]
    high = precision(x.dtype)
    absorbed = jnp.einsum("XNH,NHR->XNR", q[..., :fixed], weight[:, :fixed], precision=high)
    q = jnp.concatenate([absorbed, _rotate(q[..., fixed:], latent, context)], axis=-1)
    latents, weights = attend_rows(q, kv, (new, new), context, cfg.attention_multiplier)
    mixed = jnp.einsum("XNR,NHR->XNH", latents[..., :rank], weight[:, fixed:], precision=high)
    mixed = context.taps.changed("z", mixed)
    captured = context.taps.captured(q=projected, z=mixed) | weights
    return project(mixed.reshape(len(x), -1), block, lora, "o_proj"), kv, captured


def _queries(block: ParamTree, lora: Lora, x: jax.Array, norm: Norm) -> jax.Array:
    if "q_proj" in block:
        return project(x, block, lora, "q_proj")
    down = linear(x, block["q_a_proj"]["weight"], block["q_a_proj"].get("bias"))
    return linear(norm(down, block["q_a_layernorm"]["weight"], EPSILON), block["q_b_proj"]["weight"])


def _rotate(x: jax.Array, latent: LatentConfig, context: LayerContext) -> jax.Array:
    """Rotates `[X, heads, H]`; interleaved pairs are first moved half a head apart, in queries and keys alike."""
    if latent.rope_interleave:
        x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    return rotate(x, *context.rope)

"""OLMo 2: norms after the blocks instead of before them, and over all query or all key heads of a token together.

OLMo Team 2024, "2 OLMo 2 Furious", section 3.1. Norms scale in float32.
Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from functools import partial

import jax

from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models import attention, decoder, feed_forward
from ferrum_jax.models.attention import (
    LayerContext,
    LayerOutput,
    attend_with_cache,
    attention_specs,
    project_qkv,
    split_heads,
)
from ferrum_jax.models.decoder import Adapted, decoder_specs
from ferrum_jax.models.feed_forward import gated_mlp, mlp_specs
from ferrum_jax.models.projections import Lora, project
from ferrum_jax.models.specs import ParamTree, norm_specs
from ferrum_jax.ops.norm import wide_rms_norm

FUSED = {"self_attn": attention.FUSED, "mlp": feed_forward.FUSED}


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Specs of every parameter."""
    return decoder_specs(cfg, [_layer_specs(cfg) for _ in range(cfg.num_hidden_layers)])


def _layer_specs(cfg: ModelConfig) -> ParamTree:
    norms = {
        "q_norm": norm_specs(cfg.num_attention_heads * cfg.head_dim, "heads"),
        "k_norm": norm_specs(cfg.num_key_value_heads * cfg.head_dim, "kv_heads"),
    }
    return {
        "self_attn": attention_specs(cfg) | norms,
        "post_attention_layernorm": norm_specs(cfg.hidden_size),
        "mlp": mlp_specs(cfg),
        "post_feedforward_layernorm": norm_specs(cfg.hidden_size),
    }


def _layer(
    layer: ParamTree, adapted: Adapted, x: jax.Array, kv: KvState[jax.Array], context: LayerContext, cfg: ModelConfig
) -> LayerOutput:
    mixed, kv, weights = _attention(layer["self_attn"], adapted["self_attn"], x, kv, context, cfg)
    x = x + wide_rms_norm(mixed, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
    y = gated_mlp(layer["mlp"], adapted["mlp"], x)
    return x + wide_rms_norm(y, layer["post_feedforward_layernorm"]["weight"], cfg.rms_norm_eps), kv, weights


def _attention(
    block: ParamTree, lora: Lora, x: jax.Array, kv: KvState[jax.Array], context: LayerContext, cfg: ModelConfig
) -> LayerOutput:
    q, k, v = project_qkv(block, lora, x, cfg)
    q = wide_rms_norm(q, block["q_norm"]["weight"], cfg.rms_norm_eps)
    k = wide_rms_norm(k, block["k_norm"]["weight"], cfg.rms_norm_eps)
    q, k, v = (split_heads(y, cfg) for y in (q, k, v))
    mixed, kv, weights = attend_with_cache(q, k, v, kv, context, cfg)
    return project(mixed, block, lora, "o_proj"), kv, weights


forward = partial(decoder.forward, _layer, norm=wide_rms_norm)
head = partial(decoder.head, norm=wide_rms_norm)

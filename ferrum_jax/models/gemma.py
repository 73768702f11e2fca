"""Gemma 2 and the text models of Gemma 3: norms before and after each block, and windows on some layers.

Gemma Team 2024, "Gemma 2", section 2 (soft caps); 2025, "Gemma 3", section 2 (norms of query and key heads instead, and
another RoPE base in layers with a window). Norms scale by 1 + weight, embeddings by the square root of their width.
Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from functools import partial

import jax

from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models import attention, decoder, feed_forward
from ferrum_jax.models.attention import LayerContext, LayerOutput, attention_specs, self_attention
from ferrum_jax.models.decoder import Adapted, decoder_specs
from ferrum_jax.models.feed_forward import gated_mlp, mlp_specs
from ferrum_jax.models.specs import ParamTree, norm_specs
from ferrum_jax.ops.norm import offset_rms_norm

FUSED = {"self_attn": attention.FUSED, "mlp": feed_forward.FUSED}


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Specs of every parameter."""
    return decoder_specs(cfg, [_layer_specs(cfg) for _ in range(cfg.num_hidden_layers)], norm_init="zeros")


def _layer_specs(cfg: ModelConfig) -> ParamTree:
    norm = norm_specs(cfg.hidden_size, init="zeros")
    return {
        "input_layernorm": norm,
        "self_attn": attention_specs(cfg, norm_init="zeros"),
        "post_attention_layernorm": norm,
        "pre_feedforward_layernorm": norm,
        "mlp": mlp_specs(cfg),
        "post_feedforward_layernorm": norm,
    }


def _layer(
    layer: ParamTree, adapted: Adapted, x: jax.Array, kv: KvState[jax.Array], context: LayerContext, cfg: ModelConfig
) -> LayerOutput:
    def norm(y: jax.Array, name: str) -> jax.Array:
        return offset_rms_norm(y, layer[name]["weight"], cfg.rms_norm_eps)

    mixed, kv, weights = self_attention(
        layer["self_attn"], adapted["self_attn"], norm(x, "input_layernorm"), kv, context, cfg, norm=offset_rms_norm
    )
    x = x + norm(mixed, "post_attention_layernorm")
    y = gated_mlp(layer["mlp"], adapted["mlp"], norm(x, "pre_feedforward_layernorm"), jax.nn.gelu)
    return x + norm(y, "post_feedforward_layernorm"), kv, weights


forward = partial(decoder.forward, _layer, norm=offset_rms_norm)
head = partial(decoder.head, norm=offset_rms_norm)

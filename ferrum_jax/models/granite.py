"""Granite 3, the dense models: Llama with factors on embeddings, scores, what each block adds, and logits.

IBM 2024, "Granite 3.0 Language Models", section 3; the factors are those of maximal update parametrisation (Yang et al.
2022, "Tensor Programs V"). Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from functools import partial

import jax
import jax.numpy as jnp

from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models import attention, decoder, mlp
from ferrum_jax.models.attention import Site, attention_specs, self_attention
from ferrum_jax.models.decoder import Adapted, decoder_specs
from ferrum_jax.models.mlp import gated_mlp, mlp_specs
from ferrum_jax.models.specs import ParamTree, norm_specs
from ferrum_jax.ops.norm import rms_norm

FUSED = {"self_attn": attention.FUSED, "mlp": mlp.FUSED}


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Describes every parameter."""
    return decoder_specs(cfg, [_layer_specs(cfg) for _ in range(cfg.num_hidden_layers)])


def _layer_specs(cfg: ModelConfig) -> ParamTree:
    return {
        "input_layernorm": norm_specs(cfg.hidden_size),
        "self_attn": attention_specs(cfg),
        "post_attention_layernorm": norm_specs(cfg.hidden_size),
        "mlp": mlp_specs(cfg),
    }


def _layer(
    layer: ParamTree, adapted: Adapted, x: jax.Array, kv: KvState[jax.Array], site: Site, cfg: ModelConfig
) -> tuple[jax.Array, KvState[jax.Array]]:
    normed = rms_norm(x, layer["input_layernorm"]["weight"], cfg.rms_norm_eps)
    mixed, kv = self_attention(layer["self_attn"], adapted["self_attn"], normed, kv, site, cfg)
    x = x + _times(mixed, cfg.residual_multiplier)
    normed = rms_norm(x, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
    return x + _times(gated_mlp(layer["mlp"], adapted["mlp"], normed), cfg.residual_multiplier), kv


def _times(x: jax.Array, factor: float) -> jax.Array:
    """Multiplies in float32, so that the factor is not rounded to the dtype of x."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


forward = partial(decoder.forward, _layer)
head = decoder.head

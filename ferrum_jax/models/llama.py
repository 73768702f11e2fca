"""Llama 2 to 3.2, and the families whose forward is the same up to a setting: Mistral, Qwen2, Qwen3, SmolLM3.

Touvron et al. 2023, "Llama 2"; Jiang et al. 2023, "Mistral 7B" (sliding window); Qwen2 (biases of q, k and v); Qwen3
(RMSNorm of query and key heads); SmolLM3 (layers without rotary embeddings).
Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from functools import partial

import jax

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
    x = x + mixed
    normed = rms_norm(x, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
    return x + gated_mlp(layer["mlp"], adapted["mlp"], normed), kv


forward = partial(decoder.forward, _layer)
head = decoder.head

"""Mixtral: Mistral's attention, and experts in every layer.

Jiang et al. 2024, "Mixtral of Experts". Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from functools import partial

import jax

from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models import attention, decoder
from ferrum_jax.models.attention import Site, attention_specs, self_attention
from ferrum_jax.models.decoder import Adapted, decoder_specs
from ferrum_jax.models.experts import expert_specs, mix_experts, router_specs
from ferrum_jax.models.specs import ParamTree, norm_specs
from ferrum_jax.ops.norm import rms_norm

FUSED = {"self_attn": attention.FUSED}
NAMES = "w1", "w3", "w2"  # gate, up and down


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Describes every parameter."""
    return decoder_specs(cfg, [_layer_specs(cfg) for _ in range(cfg.num_hidden_layers)])


def _layer_specs(cfg: ModelConfig) -> ParamTree:
    assert cfg.experts is not None
    return {
        "input_layernorm": norm_specs(cfg.hidden_size),
        "self_attn": attention_specs(cfg),
        "post_attention_layernorm": norm_specs(cfg.hidden_size),
        "block_sparse_moe": {
            "gate": router_specs(cfg.experts.num_experts, cfg.hidden_size),
            "experts": expert_specs(cfg.experts, cfg.hidden_size, NAMES),
        },
    }


def _layer(
    layer: ParamTree, adapted: Adapted, x: jax.Array, kv: KvState[jax.Array], site: Site, cfg: ModelConfig
) -> tuple[jax.Array, KvState[jax.Array]]:
    assert cfg.experts is not None
    normed = rms_norm(x, layer["input_layernorm"]["weight"], cfg.rms_norm_eps)
    mixed, kv = self_attention(layer["self_attn"], adapted["self_attn"], normed, kv, site, cfg)
    x = x + mixed
    normed = rms_norm(x, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
    return x + mix_experts(layer["block_sparse_moe"], normed, cfg.experts, NAMES), kv


forward = partial(decoder.forward, _layer)
head = decoder.head

"""Qwen2-MoE and Qwen3-MoE: layers with experts, and between them layers without.

Yang et al. 2024, "Qwen2 Technical Report", section 2.2.2 (an expert that every token goes through, times the sigmoid of
a gate); Yang et al. 2025, "Qwen3 Technical Report", section 2 (none, and RMSNorm of query and key heads). Parity with
Hugging Face transformers: tests/models/test_parity.py.
"""

from dataclasses import replace
from functools import partial

import jax

from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models import attention, decoder, mlp
from ferrum_jax.models.attention import Site, attention_specs, self_attention
from ferrum_jax.models.decoder import Adapted, decoder_specs
from ferrum_jax.models.experts import expert_specs, mix_experts, router_specs
from ferrum_jax.models.mlp import gated_mlp, mlp_specs
from ferrum_jax.models.products import Lora
from ferrum_jax.models.specs import ParamTree, norm_specs
from ferrum_jax.ops.linear import linear
from ferrum_jax.ops.norm import rms_norm

FUSED = {"self_attn": attention.FUSED, "mlp": mlp.FUSED}


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Describes every parameter."""
    sparse = (False,) * cfg.num_hidden_layers if cfg.experts is None else cfg.experts.sparse_layers
    return decoder_specs(cfg, [_layer_specs(cfg, has_experts) for has_experts in sparse])


def _layer_specs(cfg: ModelConfig, has_experts: bool) -> ParamTree:
    return {
        "input_layernorm": norm_specs(cfg.hidden_size),
        "self_attn": attention_specs(cfg),
        "post_attention_layernorm": norm_specs(cfg.hidden_size),
        "mlp": _sparse_specs(cfg) if has_experts else mlp_specs(cfg),
    }


def _sparse_specs(cfg: ModelConfig) -> ParamTree:
    experts, size = cfg.experts, cfg.hidden_size
    assert experts is not None
    specs = {"gate": router_specs(experts.num_experts, size), "experts": expert_specs(experts, size)}
    if experts.shared_expert_intermediate_size is not None:
        shared = replace(cfg, intermediate_size=experts.shared_expert_intermediate_size)
        specs |= {"shared_expert": mlp_specs(shared), "shared_expert_gate": router_specs(1, size)}
    return specs


def _layer(
    layer: ParamTree, adapted: Adapted, x: jax.Array, kv: KvState[jax.Array], site: Site, cfg: ModelConfig
) -> tuple[jax.Array, KvState[jax.Array]]:
    normed = rms_norm(x, layer["input_layernorm"]["weight"], cfg.rms_norm_eps)
    mixed, kv = self_attention(layer["self_attn"], adapted["self_attn"], normed, kv, site, cfg)
    x = x + mixed
    normed = rms_norm(x, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
    return x + _mlp(layer["mlp"], adapted["mlp"], normed, cfg), kv


def _mlp(block: ParamTree, lora: Lora, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    if "experts" not in block:
        return gated_mlp(block, lora, x)
    assert cfg.experts is not None
    y = mix_experts(block, x, cfg.experts)
    if "shared_expert" in block:
        y = y + jax.nn.sigmoid(linear(x, block["shared_expert_gate"]["weight"])) * gated_mlp(
            block["shared_expert"], None, x
        )
    return y


forward = partial(decoder.forward, _layer)
head = decoder.head

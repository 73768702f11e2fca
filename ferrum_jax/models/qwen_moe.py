"""Qwen2-MoE and Qwen3-MoE: layers with experts, and between them layers without.

Yang et al. 2024, "Qwen2 Technical Report", section 2.2.2 (a shared expert for every token, times the sigmoid of a
gate); Yang et al. 2025, "Qwen3 Technical Report", section 2 (no shared expert, and RMSNorm of query and key heads).
Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from dataclasses import replace
from functools import partial

import jax

from ferrum_jax.config import ModelConfig
from ferrum_jax.models import attention, decoder, feed_forward
from ferrum_jax.models.decoder import Adapted, decoder_specs, dense, pre_norm_layer, pre_norm_specs
from ferrum_jax.models.feed_forward import expert_specs, gated_mlp, mix_experts, mlp_specs, router_specs
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops.linear import linear

FUSED = {"self_attn": attention.FUSED, "mlp": feed_forward.FUSED}


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Specs of every parameter."""
    sparse = (False,) * cfg.num_hidden_layers if cfg.experts is None else cfg.experts.sparse_layers
    blocks = [_sparse_specs(cfg) if has_experts else mlp_specs(cfg) for has_experts in sparse]
    return decoder_specs(cfg, [pre_norm_specs(cfg, mlp=block) for block in blocks])


def _sparse_specs(cfg: ModelConfig) -> ParamTree:
    experts, size = cfg.experts, cfg.hidden_size
    assert experts is not None
    specs = {"gate": router_specs(experts.num_experts, size), "experts": expert_specs(experts, size)}
    if experts.shared_expert_intermediate_size is not None:
        shared = replace(cfg, intermediate_size=experts.shared_expert_intermediate_size)
        specs |= {"shared_expert": mlp_specs(shared), "shared_expert_gate": router_specs(1, size)}
    return specs


def _mlp(layer: ParamTree, adapted: Adapted, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    block = layer["mlp"]
    if "experts" not in block:
        return dense(layer, adapted, x, cfg)
    assert cfg.experts is not None
    y = mix_experts(block, x, cfg.experts)
    if "shared_expert" in block:
        gate = jax.nn.sigmoid(linear(x, block["shared_expert_gate"]["weight"]))
        y = y + gate * gated_mlp(block["shared_expert"], None, x)
    return y


forward = partial(decoder.forward, partial(pre_norm_layer, feed_forward=_mlp))
head = decoder.head

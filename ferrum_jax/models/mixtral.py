"""Mixtral: Mistral's attention, and experts in every layer.

Jiang et al. 2024, "Mixtral of Experts". Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from functools import partial

import jax

from ferrum_jax.config import ModelConfig
from ferrum_jax.models import attention, decoder
from ferrum_jax.models.decoder import Adapted, decoder_specs, pre_norm_layer, pre_norm_specs
from ferrum_jax.models.feed_forward import expert_specs, mix_experts, router_specs
from ferrum_jax.models.specs import ParamTree

FUSED = {"self_attn": attention.FUSED}
NAMES = "w1", "w3", "w2"  # gate, up and down


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Specs of every parameter."""
    assert cfg.experts is not None
    experts = {
        "gate": router_specs(cfg.experts.num_experts, cfg.hidden_size),
        "experts": expert_specs(cfg.experts, cfg.hidden_size, NAMES),
    }
    return decoder_specs(cfg, [pre_norm_specs(cfg, block_sparse_moe=experts) for _ in range(cfg.num_hidden_layers)])


def _experts(layer: ParamTree, adapted: Adapted, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    assert cfg.experts is not None
    return mix_experts(layer["block_sparse_moe"], x, cfg.experts, NAMES)


forward = partial(decoder.forward, partial(pre_norm_layer, feed_forward=_experts))
head = decoder.head

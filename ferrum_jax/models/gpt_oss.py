"""GPT-OSS: attention with sinks, windows in every other layer, and experts with a clamped SwiGLU and biases.

OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", sections 2.2 and 2.3. Rows of the experts' first product are gate
and up in turn, as in the checkpoint. Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from functools import partial

import jax

from ferrum_jax.config import ModelConfig
from ferrum_jax.config.experts import ExpertsConfig
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models import attention, decoder
from ferrum_jax.models.attention import Site, attention_specs, self_attention
from ferrum_jax.models.decoder import Adapted, decoder_specs
from ferrum_jax.models.experts import router_specs
from ferrum_jax.models.specs import ParamSpec, ParamTree, norm_specs
from ferrum_jax.ops.linear import linear
from ferrum_jax.ops.moe import clamped_swiglu, weigh_experts
from ferrum_jax.ops.moe_routing import route
from ferrum_jax.ops.norm import rms_norm

FUSED = {"self_attn": attention.FUSED}


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Describes every parameter."""
    return decoder_specs(cfg, [_layer_specs(cfg) for _ in range(cfg.num_hidden_layers)])


def _layer_specs(cfg: ModelConfig) -> ParamTree:
    experts, size = cfg.experts, cfg.hidden_size
    assert experts is not None
    bias = ParamSpec((experts.num_experts,), ("router",), "zeros")
    return {
        "input_layernorm": norm_specs(size),
        "self_attn": attention_specs(cfg),
        "post_attention_layernorm": norm_specs(size),
        "mlp": {
            "router": router_specs(experts.num_experts, size) | {"bias": bias},
            "experts": _expert_specs(experts, size),
        },
    }


def _expert_specs(experts: ExpertsConfig, size: int) -> ParamTree:
    count, wide, turned = experts.num_experts, experts.moe_intermediate_size, (0, 2, 1)
    return {
        "gate_up_proj": ParamSpec((count, 2 * wide, size), ("expert", "mlp", "embed"), stored=turned),
        "gate_up_proj_bias": ParamSpec((count, 2 * wide), ("expert", "mlp"), "zeros", stored=(0, 1)),
        "down_proj": ParamSpec((count, size, wide), ("expert", "embed", "mlp"), stored=turned),
        "down_proj_bias": ParamSpec((count, size), ("expert", "embed"), "zeros", stored=(0, 1)),
    }


def _layer(
    layer: ParamTree, adapted: Adapted, x: jax.Array, kv: KvState[jax.Array], site: Site, cfg: ModelConfig
) -> tuple[jax.Array, KvState[jax.Array]]:
    assert cfg.experts is not None
    normed = rms_norm(x, layer["input_layernorm"]["weight"], cfg.rms_norm_eps)
    mixed, kv = self_attention(layer["self_attn"], adapted["self_attn"], normed, kv, site, cfg)
    x = x + mixed
    normed = rms_norm(x, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
    return x + _mlp(layer["mlp"], normed, cfg.experts), kv


@jax.named_scope("mlp")
def _mlp(block: ParamTree, x: jax.Array, experts: ExpertsConfig) -> jax.Array:
    logits = linear(x, block["router"]["weight"], block["router"]["bias"])
    chosen, shares = route(logits, experts.num_experts_per_tok, renormalise=experts.norm_topk_prob)
    return weigh_experts(x, chosen, shares, block["experts"], partial(_expert, experts))


def _expert(experts: ExpertsConfig, own: ParamTree, x: jax.Array) -> jax.Array:
    assert experts.swiglu_limit is not None
    both = linear(x, own["gate_up_proj"], own["gate_up_proj_bias"])
    inner = clamped_swiglu(both[:, ::2], both[:, 1::2], experts.swiglu_alpha, experts.swiglu_limit)
    return linear(inner, own["down_proj"], own["down_proj_bias"])


forward = partial(decoder.forward, _layer)
head = decoder.head

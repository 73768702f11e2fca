"""GPT-OSS: attention with sinks, windows in every other layer, and experts with a clamped SwiGLU and biases.

OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", sections 2.2 and 2.3. The rows of the experts' first product
alternate between gate and up, as in the checkpoint. Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from functools import partial

import jax

from ferrum_jax.config import ExpertsConfig, ModelConfig
from ferrum_jax.models import attention, decoder
from ferrum_jax.models.decoder import Adapted, decoder_specs, pre_norm_layer, pre_norm_specs
from ferrum_jax.models.feed_forward import router_specs
from ferrum_jax.models.specs import ParamSpec, ParamTree
from ferrum_jax.ops.linear import linear
from ferrum_jax.ops.moe import clamped_swiglu, route, weigh_experts

FUSED = {"self_attn": attention.FUSED}


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Specs of every parameter."""
    assert cfg.experts is not None
    bias = ParamSpec((cfg.experts.num_experts,), ("router",), "zeros")
    mlp = {
        "router": router_specs(cfg.experts.num_experts, cfg.hidden_size) | {"bias": bias},
        "experts": _expert_specs(cfg.experts, cfg.hidden_size),
    }
    return decoder_specs(cfg, [pre_norm_specs(cfg, mlp=mlp) for _ in range(cfg.num_hidden_layers)])


def _expert_specs(experts: ExpertsConfig, size: int) -> ParamTree:
    count, wide, transposed = experts.num_experts, experts.moe_intermediate_size, (0, 2, 1)
    return {
        "gate_up_proj": ParamSpec((count, 2 * wide, size), ("expert", "mlp", "embed"), stored=transposed),
        "gate_up_proj_bias": ParamSpec((count, 2 * wide), ("expert", "mlp"), "zeros", stored=(0, 1)),
        "down_proj": ParamSpec((count, size, wide), ("expert", "embed", "mlp"), stored=transposed),
        "down_proj_bias": ParamSpec((count, size), ("expert", "embed"), "zeros", stored=(0, 1)),
    }


@jax.named_scope("mlp")
def _mlp(layer: ParamTree, adapted: Adapted, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    block, experts = layer["mlp"], cfg.experts
    assert experts is not None
    logits = linear(x, block["router"]["weight"], block["router"]["bias"])
    chosen, shares = route(logits, experts.num_experts_per_tok, renormalise=experts.norm_topk_prob)
    return weigh_experts(x, chosen, shares, block["experts"], partial(_expert, experts))


def _expert(experts: ExpertsConfig, own: ParamTree, x: jax.Array) -> jax.Array:
    assert experts.swiglu_limit is not None
    both = linear(x, own["gate_up_proj"], own["gate_up_proj_bias"])
    inner = clamped_swiglu(both[:, ::2], both[:, 1::2], experts.swiglu_alpha, experts.swiglu_limit)
    return linear(inner, own["down_proj"], own["down_proj_bias"])


forward = partial(decoder.forward, partial(pre_norm_layer, feed_forward=_mlp))
head = decoder.head

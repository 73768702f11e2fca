"""DeepSeek V2, V3 and R1: latent attention, and experts chosen in groups beside a shared one.

DeepSeek-AI 2024, "DeepSeek-V2" (sections 2.1 and 2.2) and "DeepSeek-V3" (section 2.1.2: sigmoid scores, and a bias that
affects only the choice). Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from ferrum_jax.config import ExpertsConfig, ModelConfig
from ferrum_jax.models import decoder
from ferrum_jax.models.decoder import Adapted, decoder_specs, dense, pre_norm_layer, pre_norm_specs
from ferrum_jax.models.feed_forward import NAMES, expert_specs, gated_mlp, mlp_specs, router_specs
from ferrum_jax.models.latent import latent_attention, latent_attention_specs
from ferrum_jax.models.specs import ParamSpec, ParamTree
from ferrum_jax.ops.linear import vocabulary_logits
from ferrum_jax.ops.moe import choose_in_groups, swiglu_experts

FUSED: dict[str, dict[str, tuple[str, ...]]] = {}


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Specs of every parameter."""
    assert cfg.latent is not None
    attention = latent_attention_specs(cfg, cfg.latent)
    sparse = (False,) * cfg.num_hidden_layers if cfg.experts is None else cfg.experts.sparse_layers
    blocks = [_sparse_specs(cfg) if has_experts else mlp_specs(cfg) for has_experts in sparse]
    return decoder_specs(cfg, [pre_norm_specs(cfg, attention, mlp=block) for block in blocks])


def _sparse_specs(cfg: ModelConfig) -> ParamTree:
    experts = cfg.experts
    assert experts is not None
    assert experts.shared_expert_intermediate_size is not None
    router = router_specs(experts.num_experts, cfg.hidden_size)
    if experts.scoring_func == "sigmoid":
        router["e_score_correction_bias"] = ParamSpec((experts.num_experts,), ("router",), "zeros", dtype="float32")
    return {
        "gate": router,
        "experts": expert_specs(experts, cfg.hidden_size),
        "shared_experts": mlp_specs(replace(cfg, intermediate_size=experts.shared_expert_intermediate_size)),
    }


def _mlp(layer: ParamTree, adapted: Adapted, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    block = layer["mlp"]
    if "experts" not in block:
        return dense(layer, adapted, x, cfg)
    assert cfg.experts is not None
    chosen, shares = _route(block["gate"], x, cfg.experts)
    routed = swiglu_experts(x, chosen, shares, *(block["experts"][name]["weight"] for name in NAMES))
    return routed + gated_mlp(block["shared_experts"], None, x)


def _route(router: ParamTree, x: jax.Array, experts: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """Scores experts in float32 and chooses within the best groups; a bias affects the choice, not the share."""
    logits = vocabulary_logits(x, router["weight"])
    is_corrected = experts.scoring_func == "sigmoid"
    scores = jax.nn.sigmoid(logits) if is_corrected else jax.nn.softmax(logits, axis=-1)
    chosen = choose_in_groups(
        scores + router["e_score_correction_bias"] if is_corrected else scores,
        experts.num_experts_per_tok,
        num_groups=experts.n_group,
        num_kept=experts.topk_group,
        num_best=2 if is_corrected else 1,
    )
    shares = jnp.take_along_axis(scores, chosen, axis=1)
    if experts.norm_topk_prob:
        shares = shares / (jnp.sum(shares, axis=-1, keepdims=True) + 1e-20)
    return chosen, shares * experts.routed_scaling_factor


forward = partial(decoder.forward, partial(pre_norm_layer, attention=latent_attention, feed_forward=_mlp))
head = decoder.head

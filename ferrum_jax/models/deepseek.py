"""DeepSeek V2, V3 and R1: latent attention, and experts that are chosen in groups beside one that everybody shares.

DeepSeek-AI 2024, "DeepSeek-V2" (sections 2.1 and 2.2) and "DeepSeek-V3" (section 2.1.2: sigmoids, and a bias that only
the choice sees). Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from ferrum_jax.config import ModelConfig
from ferrum_jax.config.experts import ExpertsConfig
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models import decoder
from ferrum_jax.models.attention import Site
from ferrum_jax.models.decoder import Adapted, decoder_specs
from ferrum_jax.models.experts import NAMES, expert_specs, router_specs
from ferrum_jax.models.latent import latent_attention, latent_attention_specs
from ferrum_jax.models.mlp import gated_mlp, mlp_specs
from ferrum_jax.models.products import Lora
from ferrum_jax.models.specs import ParamSpec, ParamTree, norm_specs
from ferrum_jax.ops.linear import vocabulary_logits
from ferrum_jax.ops.moe import swiglu_experts
from ferrum_jax.ops.moe_routing import choose_in_groups
from ferrum_jax.ops.norm import rms_norm

FUSED: dict[str, dict[str, tuple[str, ...]]] = {}


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Describes every parameter."""
    sparse = (False,) * cfg.num_hidden_layers if cfg.experts is None else cfg.experts.sparse_layers
    return decoder_specs(cfg, [_layer_specs(cfg, has_experts) for has_experts in sparse])


def _layer_specs(cfg: ModelConfig, has_experts: bool) -> ParamTree:
    assert cfg.latent is not None
    return {
        "input_layernorm": norm_specs(cfg.hidden_size),
        "self_attn": latent_attention_specs(cfg, cfg.latent),
        "post_attention_layernorm": norm_specs(cfg.hidden_size),
        "mlp": _sparse_specs(cfg) if has_experts else mlp_specs(cfg),
    }


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


def _layer(
    layer: ParamTree, adapted: Adapted, x: jax.Array, kv: KvState[jax.Array], site: Site, cfg: ModelConfig
) -> tuple[jax.Array, KvState[jax.Array]]:
    normed = rms_norm(x, layer["input_layernorm"]["weight"], cfg.rms_norm_eps)
    mixed, kv = latent_attention(layer["self_attn"], adapted["self_attn"], normed, kv, site, cfg)
    x = x + mixed
    normed = rms_norm(x, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
    return x + _mlp(layer["mlp"], adapted["mlp"], normed, cfg), kv


def _mlp(block: ParamTree, lora: Lora, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    if "experts" not in block:
        return gated_mlp(block, lora, x)
    assert cfg.experts is not None
    chosen, shares = _route(block["gate"], x, cfg.experts)
    routed = swiglu_experts(x, chosen, shares, *(block["experts"][name]["weight"] for name in NAMES))
    return routed + gated_mlp(block["shared_experts"], None, x)


def _route(router: ParamTree, x: jax.Array, experts: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """Scores experts in float32 and chooses within the best groups; a bias counts for the choice alone."""
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


forward = partial(decoder.forward, _layer)
head = decoder.head

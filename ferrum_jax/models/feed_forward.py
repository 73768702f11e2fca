"""The feed-forward blocks of a layer: the gated MLP, and each family's router with experts.

Shazeer 2020, "GLU Variants Improve Transformer"; Shazeer et al. 2017, "Outrageously Large Neural Networks". A weight of
all experts is one leaf, `[E, out, in]`; its name is that of one expert's weight in the checkpoint, less the number.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ferrum_jax.config import ExpertsConfig, ModelConfig
from ferrum_jax.models.hooks import NO_TAPS, Taps
from ferrum_jax.models.projections import Lora, linear_specs, project, project_all
from ferrum_jax.models.specs import ParamSpec, ParamTree
from ferrum_jax.ops.linear import linear, vocabulary_logits
from ferrum_jax.ops.moe import choose_in_groups, clamped_swiglu, swiglu, weigh_experts
from ferrum_jax.ops.shards import WHOLE, Shards, first_expert

BlockOutput = tuple[jax.Array, dict[str, Any]]  # [X, D], and captures by name of hook point

NAMES = "gate_proj", "up_proj", "down_proj"
MIXTRAL_NAMES = "w1", "w3", "w2"  # gate, up and down


def mlp_specs(cfg: ModelConfig, width: int | None = None) -> ParamTree:
    """Specs of the three projections of a gated MLP; `width` is F, `cfg.intermediate_size` if None."""
    model, wide = (cfg.hidden_size, "embed"), (width or cfg.intermediate_size, "mlp")
    return {
        "gate_proj": linear_specs(wide, model, cfg.mlp_bias),
        "up_proj": linear_specs(wide, model, cfg.mlp_bias),
        "down_proj": linear_specs(model, wide, cfg.mlp_bias),
    }


def fused_mlp_specs(cfg: ModelConfig) -> ParamTree:
    """As `mlp_specs`, with gate and up fused in the checkpoint itself, as in Phi-3."""
    model, wide = (cfg.hidden_size, "embed"), (cfg.intermediate_size, "mlp")
    both = linear_specs((2 * cfg.intermediate_size, "fused"), model, parts=(("mlp", cfg.intermediate_size),) * 2)
    return {"gate_up_proj": both, "down_proj": linear_specs(model, wide)}


@jax.named_scope("mlp")
def gated_mlp(
    block: ParamTree,
    lora: Lora,
    x: jax.Array,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    taps: Taps = NO_TAPS,
) -> BlockOutput:
    """Computes `down(activation(gate(x)) * up(x))`, `[X, D]` to `[X, D]`."""
    gate, up = project_all(x, block, lora, "gate_up_proj", NAMES[:2], (1, 1))
    gate, up = taps.changed("mlp_pre", gate), taps.changed("mlp_pre_linear", up)
    inner = taps.changed("mlp_post", activation(gate) * up)
    captured = taps.captured(mlp_pre=gate, mlp_pre_linear=up, mlp_post=inner)
    return project(inner, block, lora, "down_proj"), captured


def mixtral_specs(cfg: ModelConfig, experts: ExpertsConfig, names: tuple[str, str, str] = MIXTRAL_NAMES) -> ParamTree:
    """Specs of a router and of all experts' gate, up and down projections, which are named `names`."""
    count, wide, size = experts.num_experts, experts.moe_intermediate_size, cfg.hidden_size
    gate, up, down = names
    into = ParamSpec((count, wide, size), ("expert", "mlp", "embed"))
    back = ParamSpec((count, size, wide), ("expert", "embed", "mlp"))
    return {
        "gate": _router_specs(count, size),
        "experts": {gate: {"weight": into}, up: {"weight": into}, down: {"weight": back}},
    }


def mix_experts(
    block: ParamTree,
    x: jax.Array,
    experts: ExpertsConfig,
    shards: Shards = WHOLE,
    taps: Taps = NO_TAPS,
    names: tuple[str, str, str] = NAMES,
) -> BlockOutput:
    """Applies to each token the experts that the router `gate` chooses for it, `[X, D]` to `[X, D]`.

    Here and below, with `shards` the output is this device's term of a sum over the devices that divide the experts.
    """
    logits = taps.changed("router_logits", linear(x, block["gate"]["weight"]))
    chosen, shares, captured = route(logits, experts, taps)
    return _swiglu_experts(block, x, chosen, shares, names, shards), captured


def route(
    logits: jax.Array, experts: ExpertsConfig, taps: Taps = NO_TAPS, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns each token's experts and their shares, float32, after interventions, and the captured arrays.

    Shares are scores among all experts or, with `norm_topk_prob`, among the chosen ones; `bias` is added to the scores
    for the choice alone. Intervened ids of no expert become 0, with the share NaN; the token's other shares then mean
    nothing.
    """
    is_sigmoid, wide = experts.scoring_func == "sigmoid", logits.astype(jnp.float32)
    scores = jax.nn.sigmoid(wide) if is_sigmoid else jax.nn.softmax(wide, axis=-1)
    chosen = choose_in_groups(
        scores if bias is None else scores + bias,
        experts.num_experts_per_tok,
        num_groups=experts.n_group,
        num_kept=experts.topk_group,
        num_best=2 if is_sigmoid else 1,
    )
    is_known = None
    if taps.changes("expert_indices"):
        chosen = taps.changed("expert_indices", chosen)
        is_known = (chosen >= 0) & (chosen < experts.num_experts)
        chosen = jnp.where(is_known, chosen, 0)
    shares = jnp.take_along_axis(scores, chosen, axis=1)
    if experts.norm_topk_prob:
        shares = shares / (jnp.sum(shares, axis=-1, keepdims=True) + 1e-20)
    if is_known is not None:
        shares = jnp.where(is_known, shares, jnp.nan)
    shares = taps.changed("expert_weights", shares * experts.routed_scaling_factor)
    return chosen, shares, taps.captured(router_logits=logits, expert_indices=chosen, expert_weights=shares)


def _swiglu_experts(
    block: ParamTree, x: jax.Array, chosen: jax.Array, shares: jax.Array, names: tuple[str, ...], shards: Shards
) -> jax.Array:
    stacks = tuple(block["experts"][name]["weight"] for name in names)
    return weigh_experts(x, chosen, shares, stacks, swiglu, first_expert(stacks[0].shape[0], shards))


def qwen_specs(cfg: ModelConfig, experts: ExpertsConfig) -> ParamTree:
    """Specs as Mixtral's with other names; Qwen2 also has a shared expert, which runs for every token, and its gate."""
    specs, shared = mixtral_specs(cfg, experts, NAMES), experts.shared_expert_intermediate_size
    if shared is None:
        return specs
    return specs | {"shared_expert": mlp_specs(cfg, shared), "shared_expert_gate": _router_specs(1, cfg.hidden_size)}


def qwen_experts(
    block: ParamTree, x: jax.Array, experts: ExpertsConfig, shards: Shards = WHOLE, taps: Taps = NO_TAPS
) -> BlockOutput:
    """As `mix_experts`; the shared expert's output is multiplied by the sigmoid of its gate."""
    y, captured = mix_experts(block, x, experts, shards, taps)
    if "shared_expert" not in block:
        return y, captured
    gate = jax.nn.sigmoid(linear(x, block["shared_expert_gate"]["weight"]))
    return y + gate * gated_mlp(block["shared_expert"], None, x)[0], captured


def deepseek_specs(cfg: ModelConfig, experts: ExpertsConfig) -> ParamTree:
    """Specs as Qwen's, without a gate for the shared experts; V3's router has a bias."""
    assert experts.shared_expert_intermediate_size is not None
    specs = mixtral_specs(cfg, experts, NAMES)
    if experts.scoring_func == "sigmoid":
        bias = ParamSpec((experts.num_experts,), ("router",), "zeros", dtype="float32")
        specs["gate"]["e_score_correction_bias"] = bias
    return specs | {"shared_experts": mlp_specs(cfg, experts.shared_expert_intermediate_size)}


def deepseek_experts(
    block: ParamTree, x: jax.Array, experts: ExpertsConfig, shards: Shards = WHOLE, taps: Taps = NO_TAPS
) -> BlockOutput:
    """Chooses experts within the best groups, by scores in float32; a bias affects the choice, not the share.

    DeepSeek-AI 2024, "DeepSeek-V2" (section 2.2) and "DeepSeek-V3" (section 2.1.2).
    """
    logits = taps.changed("router_logits", vocabulary_logits(x, block["gate"]["weight"]))
    chosen, shares, captured = route(logits, experts, taps, block["gate"].get("e_score_correction_bias"))
    routed = _swiglu_experts(block, x, chosen, shares, NAMES, shards)
    return routed + gated_mlp(block["shared_experts"], None, x)[0], captured


def gpt_oss_specs(cfg: ModelConfig, experts: ExpertsConfig) -> ParamTree:
    """Specs of experts with biases; rows of `gate_up_proj` alternate between gate and up, as in the checkpoint."""
    count, wide, size, transposed = experts.num_experts, experts.moe_intermediate_size, cfg.hidden_size, (0, 2, 1)
    bias = ParamSpec((count,), ("router",), "zeros")
    return {
        "router": _router_specs(count, size) | {"bias": bias},
        "experts": {
            "gate_up_proj": ParamSpec((count, 2 * wide, size), ("expert", "mlp_pairs", "embed"), stored=transposed),
            "gate_up_proj_bias": ParamSpec((count, 2 * wide), ("expert", "mlp_pairs"), "zeros", stored=(0, 1)),
            "down_proj": ParamSpec((count, size, wide), ("expert", "embed", "mlp"), stored=transposed),
            "down_proj_bias": ParamSpec((count, size), ("expert", "sum"), "zeros", stored=(0, 1)),
        },
    }


@jax.named_scope("mlp")
def gpt_oss_experts(
    block: ParamTree, x: jax.Array, experts: ExpertsConfig, shards: Shards = WHOLE, taps: Taps = NO_TAPS
) -> BlockOutput:
    """Mixes experts with a clamped SwiGLU. OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2."""
    logits = taps.changed("router_logits", linear(x, block["router"]["weight"], block["router"]["bias"]))
    chosen, shares, captured = route(logits, experts, taps)
    first = first_expert(block["experts"]["down_proj"].shape[0], shards)
    return weigh_experts(x, chosen, shares, block["experts"], partial(_gpt_oss_expert, experts), first), captured


def _gpt_oss_expert(experts: ExpertsConfig, own: ParamTree, x: jax.Array) -> jax.Array:
    assert experts.swiglu_limit is not None
    both = linear(x, own["gate_up_proj"], own["gate_up_proj_bias"])
    inner = clamped_swiglu(both[:, ::2], both[:, 1::2], experts.swiglu_alpha, experts.swiglu_limit)
    return linear(inner, own["down_proj"], own["down_proj_bias"])


def _router_specs(num_outputs: int, model_size: int) -> ParamTree:
    """Specs of a router or gate, whose weight is never quantised."""
    return {"weight": ParamSpec((num_outputs, model_size), ("router", "embed"))}

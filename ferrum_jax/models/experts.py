"""The experts of a layer: their parameters, and a token's way to those it is sent to.

Products of all experts are one leaf, `[E, out, in]`, named as those of one expert without its number.
"""

import jax

from ferrum_jax.config.experts import ExpertsConfig
from ferrum_jax.models.specs import ParamSpec, ParamTree
from ferrum_jax.ops.linear import linear
from ferrum_jax.ops.moe import swiglu_experts
from ferrum_jax.ops.moe_routing import route

NAMES = "gate_proj", "up_proj", "down_proj"


def router_specs(num_outputs: int, model_size: int) -> ParamTree:
    """Describes a product whose outputs say how tokens are sent; it is never quantised."""
    return {"weight": ParamSpec((num_outputs, model_size), ("router", "embed"))}


def expert_specs(experts: ExpertsConfig, model_size: int, names: tuple[str, str, str] = NAMES) -> ParamTree:
    """Describes the three products of all experts: gate, up and down, called as `names` say."""
    count, wide = experts.num_experts, experts.moe_intermediate_size
    gate, up, down = names
    into = ParamSpec((count, wide, model_size), ("expert", "mlp", "embed"))
    back = ParamSpec((count, model_size, wide), ("expert", "embed", "mlp"))
    return {gate: {"weight": into}, up: {"weight": into}, down: {"weight": back}}


def mix_experts(
    block: ParamTree, x: jax.Array, experts: ExpertsConfig, names: tuple[str, str, str] = NAMES
) -> jax.Array:
    """Sends each token to the experts that the router `gate` chooses for it, `[X, D]` to `[X, D]`."""
    logits = linear(x, block["gate"]["weight"])
    chosen, shares = route(logits, experts.num_experts_per_tok, renormalise=experts.norm_topk_prob)
    gate, up, down = (block["experts"][name]["weight"] for name in names)
    return swiglu_experts(x, chosen, shares, gate, up, down)

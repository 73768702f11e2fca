"""The feed-forward blocks of a layer: the gated MLP, and a router with experts.

Shazeer 2020, "GLU Variants Improve Transformer"; Shazeer et al. 2017, "Outrageously Large Neural Networks". The
products of all experts are one leaf, `[E, out, in]`, named as one expert's in the checkpoint, without its number.
"""

from collections.abc import Callable

import jax

from ferrum_jax.config import ExpertsConfig, ModelConfig
from ferrum_jax.models.projections import Lora, linear_specs, project, project_all
from ferrum_jax.models.specs import ParamSpec, ParamTree
from ferrum_jax.ops.linear import linear
from ferrum_jax.ops.moe import route, swiglu_experts

FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}  # name of the joined weight, and its parts
NAMES = "gate_proj", "up_proj", "down_proj"


def mlp_specs(cfg: ModelConfig) -> ParamTree:
    """Specs of the three products of a gated MLP."""
    model, wide = (cfg.hidden_size, "embed"), (cfg.intermediate_size, "mlp")
    return {
        "gate_proj": linear_specs(wide, model, cfg.mlp_bias),
        "up_proj": linear_specs(wide, model, cfg.mlp_bias),
        "down_proj": linear_specs(model, wide, cfg.mlp_bias),
    }


@jax.named_scope("mlp")
def gated_mlp(
    block: ParamTree, lora: Lora, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
) -> jax.Array:
    """Computes `down(activation(gate(x)) * up(x))`, `[X, D]` to `[X, D]`."""
    gate, up = project_all(x, block, lora, "gate_up_proj", FUSED["gate_up_proj"], (1, 1))
    return project(activation(gate) * up, block, lora, "down_proj")


def router_specs(num_outputs: int, model_size: int) -> ParamTree:
    """Specs of a router or gate: a product that is never quantised."""
    return {"weight": ParamSpec((num_outputs, model_size), ("router", "embed"))}


def expert_specs(experts: ExpertsConfig, model_size: int, names: tuple[str, str, str] = NAMES) -> ParamTree:
    """Specs of the three products of all experts; `names` are those of gate, up and down."""
    count, wide = experts.num_experts, experts.moe_intermediate_size
    gate, up, down = names
    into = ParamSpec((count, wide, model_size), ("expert", "mlp", "embed"))
    back = ParamSpec((count, model_size, wide), ("expert", "embed", "mlp"))
    return {gate: {"weight": into}, up: {"weight": into}, down: {"weight": back}}


def mix_experts(
    block: ParamTree, x: jax.Array, experts: ExpertsConfig, names: tuple[str, str, str] = NAMES
) -> jax.Array:
    """Sends each token through the experts that the router `gate` chooses for it, `[X, D]` to `[X, D]`."""
    logits = linear(x, block["gate"]["weight"])
    chosen, shares = route(logits, experts.num_experts_per_tok, renormalise=experts.norm_topk_prob)
    gate, up, down = (block["experts"][name]["weight"] for name in names)
    return swiglu_experts(x, chosen, shares, gate, up, down)

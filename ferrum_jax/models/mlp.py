"""The gated feed-forward block of a layer.

Shazeer 2020, "GLU Variants Improve Transformer".
"""

from collections.abc import Callable

import jax

from ferrum_jax.config import ModelConfig
from ferrum_jax.models.products import Lora, linear_specs, project, project_all
from ferrum_jax.models.specs import ParamTree

FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}  # products of one input, and what their joined weight is called


def mlp_specs(cfg: ModelConfig) -> ParamTree:
    """Describes its three products."""
    model, wide = (cfg.hidden_size, "embed"), (cfg.intermediate_size, "mlp")
    return {
        "gate_proj": linear_specs(wide, model, cfg.mlp_bias),
        "up_proj": linear_specs(wide, model, cfg.mlp_bias),
        "down_proj": linear_specs(model, wide, cfg.mlp_bias),
    }


def gated_mlp(
    block: ParamTree, lora: Lora, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
) -> jax.Array:
    """Computes `down(activation(gate(x)) * up(x))`, `[X, D]` to `[X, D]`."""
    gate, up = project_all(x, block, lora, "gate_up_proj", FUSED["gate_up_proj"], (1, 1))
    return project(activation(gate) * up, block, lora, "down_proj")

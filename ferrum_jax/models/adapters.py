"""LoRA adapters: stacks beside a model's parameters, one row for each adapter.

A tree of stacks has the parameters' paths down to the projection: `model.layers.3.self_attn.q_proj` holds `down`
`[A, R, D]` and `up` `[F, A, R]`. The tree of one adapter has the same paths, with `down` `[R, D]` and `up` `[F, R]`.
Ranks below R are padded with zeros, which change no result; the scale (alpha / r) is part of `up`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import check_no_problems, differences
from ferrum_jax.contract.errors import ConfigError
from ferrum_jax.models import specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamSpec, ParamTree
from ferrum_jax.ops.linear import uses

PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Capacity of the adapter stacks of a model."""

    max_loras: int  # A: adapters loaded at once
    max_rank: int  # R

    def __post_init__(self):
        for name, value in (("max_loras", self.max_loras), ("max_lora_rank", self.max_rank)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}, expected an integer of at least 1 where adapters are used")


def stack_specs(cfg: ModelConfig, spec: LoraSpec) -> ParamTree:
    """Specs of every stack; `specs.initialise` draws initial values for LoRA tuning: `down` normal and `up` zero."""

    def stack(weight: ParamSpec) -> ParamTree:
        (out_size, in_size), (out_axis, in_axis) = weight.shape, weight.axes
        adapters, rank = spec.max_loras, spec.max_rank
        return {
            "down": ParamSpec((adapters, rank, in_size), ("adapter", "rank", in_axis)),
            "up": ParamSpec((out_size, adapters, rank), (out_axis, "adapter", "rank"), "zeros", parts=weight.parts),
        }

    return _map_projections(cfg, stack)


def adapter_specs(cfg: ModelConfig, spec: LoraSpec) -> ParamTree:
    """Specs of the tree of one adapter, its rank padded to `spec.max_rank`."""

    def row(_: str, stack: ParamSpec) -> ParamSpec:
        at = stack.axes.index("adapter")
        shape, axes = ((*sizes[:at], *sizes[at + 1 :]) for sizes in (stack.shape, stack.axes))
        return replace(stack, shape=shape, axes=axes)

    return specs.map_specs(row, stack_specs(cfg, spec))


def checked_stacks(stacks: ParamTree, cfg: ModelConfig) -> ParamTree:
    """Returns stacks of every projection: those given, and of rank 0 for projections that a layer leaves out.

    Projections may have ranks of their own.

    Raises:
        InvalidParameterError: the arrays are not those of as many adapters of this model.
    """
    leaves = specs.named_leaves(stacks)
    downs = [leaf for name, leaf in leaves.items() if name.endswith(".down") and jnp.ndim(leaf) == 3]
    count, wanted, absent = downs[0].shape[0] if downs else "A", {}, []
    may_lack = bool(downs) and _num_layers(stacks) == cfg.num_hidden_layers
    for name, weight in projections(cfg).items():
        (out_size, in_size), down = weight.shape, jnp.shape(leaves.get(f"{name}.down", 0))
        if may_lack and leaves.keys().isdisjoint({f"{name}.down", f"{name}.up"}):
            absent.append((name, out_size, in_size))
            continue
        rank = down[1] if len(down) == 3 else "R"
        wanted[f"{name}.down"] = f"[{count}, {rank}, {in_size}]"
        wanted[f"{name}.up"] = f"[{out_size}, {count}, {rank}]"
    given = {name: specs.shape_of_numbers(leaf) for name, leaf in leaves.items()}
    check_no_problems("these are not stacks of adapters of this model", differences(given, wanted))
    for name, out_size, in_size in absent:
        leaves[f"{name}.down"] = jnp.zeros((count, 0, in_size), downs[0].dtype)
        leaves[f"{name}.up"] = jnp.zeros((out_size, count, 0), downs[0].dtype)
    return specs.from_names(stack_specs(cfg, LoraSpec(max_loras=1, max_rank=1)), leaves)


def _num_layers(stacks: ParamTree) -> int:
    try:
        return len(stacks["model"]["layers"])
    except (KeyError, IndexError, TypeError):
        return 0


def without_unused(stacks: ParamTree | None, adapters: Int[Array, " B"] | None) -> ParamTree | None:
    """Returns the stacks with zeros for adapters that no row uses.

    What is not finite there would spread from `up` to logits and from `down` to gradients.
    """
    if stacks is None or adapters is None:
        return None
    size = next(leaf.shape[0] for path, leaf in specs.named_leaves(stacks).items() if path.endswith(".down"))
    is_used = jnp.any(uses(adapters, size), axis=0)

    def kept(path: Any, leaf: jax.Array) -> jax.Array:
        mask = is_used[:, None, None] if specs.name_of(path[-1:]) == "down" else is_used[:, None]
        return jnp.where(mask, leaf, jnp.zeros((), leaf.dtype))

    return jax.tree_util.tree_map_with_path(kept, stacks)


def install(stacks: ParamTree, adapter: ParamTree, index: int | Int[Array, ""]) -> ParamTree:
    """Writes an adapter's tree into row `index` of the stacks, 0 to A - 1, which may be traced.

    Pure: donate `stacks` to update them in place. Leaves of `adapter` may be NumPy arrays.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, stack, own: stack.at[_row(path, index)].set(own), stacks, adapter
    )


def _row(path: tuple[Any, ...], index: int | Int[Array, ""]) -> tuple[Any, ...]:
    """Returns where an adapter is in a stack: an index into the first axis of `down`, the second of `up`."""
    return (index,) if specs.name_of(path[-1:]) == "down" else (slice(None), index)


def projections(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Maps the name of every adaptable projection, such as `model.layers.3.mlp.up_proj`, to the spec of its weight."""
    weights = specs.named_leaves(_map_projections(cfg, lambda weight: {"weight": weight}))
    return {name.removesuffix(".weight"): weight for name, weight in weights.items()}


def _map_projections(cfg: ModelConfig, function: Callable[[ParamSpec], ParamTree]) -> ParamTree:
    def block(layer: ParamTree, name: str) -> ParamTree:
        found = layer.get(name, {})
        return {name: function(found[name]["weight"]) for name in PROJECTIONS if name in found}

    layers = family(cfg).param_specs(cfg)["model"]["layers"]
    return {"model": {"layers": [{name: block(layer, name) for name in ("self_attn", "mlp")} for layer in layers]}}

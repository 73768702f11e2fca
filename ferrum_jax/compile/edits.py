"""Interventions as arguments of a step: for each hook point of its key, a stack of one edit per slot."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.models.hooks import ATTENTION, Edit, Point, edited

Leaf = TypeVar("Leaf")


@flax.struct.dataclass
class EditStacks(Generic[Leaf]):
    """The stacked edits of sequences' tokens; row S, one past the last slot, changes nothing."""

    spans: Leaf  # int32 [S + 1, 2]: first position that is changed, and one past the last
    scale: dict[Point, Leaf]  # [S + 1, ...] of one token's array
    add: dict[Point, Leaf]

    @staticmethod
    def neutral(cfg: ModelConfig, num_slots: int, points: tuple[Point, ...]) -> "EditStacks[NDArray[Any]]":
        """Returns stacks that change nothing, to be filled in."""
        tails = {point: tail_of(point, cfg) for point in points}
        return EditStacks(
            spans=np.zeros((num_slots + 1, 2), np.int32),
            scale={point: np.ones((num_slots + 1, *shape), dtype) for point, (shape, dtype) in tails.items()},
            add={point: np.zeros((num_slots + 1, *shape), dtype) for point, (shape, dtype) in tails.items()},
        )


def tail_of(point: Point, cfg: ModelConfig) -> tuple[tuple[int, ...], Any]:
    """Returns shape and dtype of the edits of one token at a point.

    Raises:
        UnsupportedError: they depend on how many tokens there are.
    """
    if point.name in ATTENTION:
        raise UnsupportedError(f"{point.name!r} has no edits of single tokens: models.run changes it")
    if point.name.startswith("resid") or point.name in ("attn_out", "mlp_out"):
        return (cfg.hidden_size,), np.float32
    if point.name in ("k", "v"):
        return (cfg.num_key_value_heads, cfg.head_dim), np.float32
    if point.name in ("q", "z"):
        width, latent = cfg.head_dim, cfg.latent
        if latent is not None:
            width = latent.v_head_dim if point.name == "z" else latent.qk_nope_head_dim + latent.qk_rope_head_dim
        return (cfg.num_attention_heads, width), np.float32
    if point.name.startswith("mlp_"):
        return (cfg.intermediate_size,), np.float32
    assert cfg.experts is not None
    if point.name == "router_logits":
        return (cfg.experts.num_experts,), np.float32
    return (cfg.experts.num_experts_per_tok,), np.int32 if point.name == "expert_indices" else np.float32


def of_tokens(
    stacks: EditStacks[jax.Array], rows: Int[Array, " X"]
) -> dict[Point, Callable[[jax.Array, jax.Array], jax.Array]]:
    """Returns the function to apply at each point, given every token's row of the stacks."""

    def at(point: Point) -> Callable[[jax.Array, jax.Array], jax.Array]:
        def change(x: jax.Array, positions: jax.Array) -> jax.Array:
            edit, spans = Edit(scale=stacks.scale[point][rows], add=stacks.add[point][rows]), stacks.spans[rows]
            here = (positions >= spans[:, 0]) & (positions < spans[:, 1])
            return jnp.where(here.reshape(-1, *(1,) * (x.ndim - 1)), edited(x, edit), x)

        return change

    return {point: at(point) for point in stacks.scale}

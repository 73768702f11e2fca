"""One device's part of a model that is divided over a mesh, and the collectives that combine the parts.

Tensor parallelism as in Shoeybi et al. 2019, "Megatron-LM", section 3: the first product of a block is divided by its
outputs, the second by its inputs, and the partial sums are added once per block. Experts are divided by number over the
axis `expert`; every device computes its own experts for all tokens.

These functions run inside a `jax.shard_map`, where every array is one device's part. Without axes, as on one device,
they have no effect.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The mesh axes over which a forward is divided, outermost first; none on one device."""

    axes: tuple[str, ...] = ()
    expert_axis: str | None = None  # the axis that divides experts by number; None: every device has all experts
    num_query_heads: int = 0  # over all devices, without padding; for norms over all heads
    num_key_heads: int = 0  # over all devices, without padding, with copies

    def __bool__(self) -> bool:
        return bool(self.axes)


WHOLE = Shards()


def add_parts(x: Float[Array, "*axes"], shards: Shards) -> Float[Array, "*axes"]:
    """Returns the sum of all devices' terms."""
    return lax.psum(x, shards.axes) if shards else x


def join_columns(x: Float[Array, "R V"], shards: Shards, size: int) -> Float[Array, "R W"]:
    """Joins the columns of all devices and drops padding: keeps the first `size`."""
    return lax.all_gather(x, shards.axes, axis=1, tiled=True)[:, :size] if shards else x


def own_rows(ids: Int[Array, " X"], num_rows: int, shards: Shards) -> tuple[Int[Array, " X"], Array | None]:
    """Returns the indices of rows in this device's part of a divided table, and a mask of the rows that are in it.

    Other rows have the index 0. On one device the mask is None: all rows are there.
    """
    if not shards:
        return ids, None
    local = ids - lax.axis_index(shards.axes).astype(ids.dtype) * num_rows
    is_here = (local >= 0) & (local < num_rows)
    return jnp.where(is_here, local, 0), is_here


def first_expert(num_experts: int, shards: Shards) -> Int[Array, ""] | None:
    """Returns the id of this device's first expert, given how many it has; None if it has all experts."""
    if shards.expert_axis is None:
        return None
    return lax.axis_index(shards.expert_axis).astype(jnp.int32) * num_experts


def mean_squares(
    q: Float[Array, "X Q"], k: Float[Array, "X K"], head_dim: int, shards: Shards
) -> tuple[Float[Array, "X 1"], Float[Array, "X 1"]]:
    """Returns each token's mean square over all query heads and over all key heads, float32, by one collective."""
    wide = [side.astype(jnp.float32) for side in (q, k)]
    if not shards:
        q_mean, k_mean = (jnp.mean(side * side, axis=-1, keepdims=True) for side in wide)
        return q_mean, k_mean
    sums = add_parts(jnp.concatenate([jnp.sum(side * side, axis=-1, keepdims=True) for side in wide], axis=1), shards)
    return sums[:, :1] / (shards.num_query_heads * head_dim), sums[:, 1:] / (shards.num_key_heads * head_dim)


def local_ids(chosen: jax.Array, num_experts: int, first: jax.Array | None) -> tuple[Int[Array, "X U"], Array | None]:
    """Converts expert ids to indices on this device; experts of other devices become E, one past its last.

    Returns also a mask of this device's experts; None if it has all.
    """
    ids = chosen.astype(jnp.int32)
    if first is None:
        return ids, None
    ids = ids - first
    is_here = (ids >= 0) & (ids < num_experts)
    return jnp.where(is_here, ids, num_experts), is_here

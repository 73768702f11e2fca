"""One device's part of a model that is divided over a mesh, and the collectives that put parts together.

Tensor parallelism as in Shoeybi et al. 2019, "Megatron-LM", section 3: the first product of a block is divided by its
outputs, the second by its inputs, and the partial sums are added once a block. Experts are divided by number over the
axis `expert`; every device computes what its own experts give for all tokens.

The functions are for the inside of a `jax.shard_map`, where every array is one device's part. With no axes, as on one
device, they do nothing.
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
    expert_axis: str | None = None  # the one of them that divides experts by number; None: each device has all
    num_query_heads: int = 0  # that hold numbers of the model, over all devices; for norms over all heads
    num_key_heads: int = 0  # the same of key heads, copies counted

    def __bool__(self) -> bool:
        return bool(self.axes)


WHOLE = Shards()


def add_parts(x: Float[Array, "*axes"], shards: Shards) -> Float[Array, "*axes"]:
    """Adds the partial sums of all devices."""
    return lax.psum(x, shards.axes) if shards else x


def join_columns(x: Float[Array, "R V"], shards: Shards, size: int) -> Float[Array, "R W"]:
    """Joins the columns of all devices and leaves out padding: the first `size` stay."""
    return lax.all_gather(x, shards.axes, axis=1, tiled=True)[:, :size] if shards else x


def own_rows(ids: Int[Array, " X"], num_rows: int, shards: Shards) -> tuple[Int[Array, " X"], Array | None]:
    """Returns where rows of a divided table lie in this device's part of it, and which of them are there.

    The others have the index 0; on one device all are there, which None says.
    """
    if not shards:
        return ids, None
    local = ids - lax.axis_index(shards.axes).astype(ids.dtype) * num_rows
    is_here = (local >= 0) & (local < num_rows)
    return jnp.where(is_here, local, 0), is_here


def first_expert(num_experts: int, shards: Shards) -> Int[Array, ""] | None:
    """Returns the id of the first of this device's experts, which has so many of them; None if it has all."""
    if shards.expert_axis is None:
        return None
    return lax.axis_index(shards.expert_axis).astype(jnp.int32) * num_experts


def mean_squares(
    q: Float[Array, "X Q"], k: Float[Array, "X K"], head_dim: int, shards: Shards
) -> tuple[Float[Array, "X 1"], Float[Array, "X 1"]]:
    """Means of the squares of all query heads and of all key heads of a token, float32; one collective for both."""
    wide = [side.astype(jnp.float32) for side in (q, k)]
    if not shards:
        q_mean, k_mean = (jnp.mean(side * side, axis=-1, keepdims=True) for side in wide)
        return q_mean, k_mean
    sums = add_parts(jnp.concatenate([jnp.sum(side * side, axis=-1, keepdims=True) for side in wide], axis=1), shards)
    return sums[:, :1] / (shards.num_query_heads * head_dim), sums[:, 1:] / (shards.num_key_heads * head_dim)


def local_ids(chosen: jax.Array, num_experts: int, first: jax.Array | None) -> tuple[Int[Array, "X U"], Array | None]:
    """Numbers experts from this device's first one on; those of other devices become E, one past its last."""
    ids = chosen.astype(jnp.int32)
    if first is None:
        return ids, None
    ids = ids - first
    is_here = (ids >= 0) & (ids < num_experts)
    return jnp.where(is_here, ids, num_experts), is_here

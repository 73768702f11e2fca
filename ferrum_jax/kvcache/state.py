"""The preallocated keys and values, and the only code that knows their physical axis order.

Keys lie as `[L, P, K, H, C]` and values as `[L, P, K, C, H]`: both products of attention then read a block as a plain
matrix, with no transposition of what is cached.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Leaf = TypeVar("Leaf")


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Sizes of the KV of one model."""

    num_layers: int
    num_blocks: int
    block_size: int  # positions
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_position(self) -> int:
        """Bytes that keys and values of one position take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole KV."""
        return self.bytes_per_position * self.block_size * self.num_blocks


@flax.struct.dataclass
class KvState(Generic[Leaf]):
    """All cached keys and values. Donated to every step; the old value is then dead."""

    k: Leaf  # [L, P, K, H, C]
    v: Leaf  # [L, P, K, C, H]


def shapes(spec: CacheSpec) -> KvState[jax.ShapeDtypeStruct]:
    """Gives the shapes and dtypes of the KV, for lowering."""
    head = (spec.num_layers, spec.num_blocks, spec.num_kv_heads)
    return KvState(
        k=jax.ShapeDtypeStruct((*head, spec.head_dim, spec.block_size), np.dtype(spec.dtype)),
        v=jax.ShapeDtypeStruct((*head, spec.block_size, spec.head_dim), np.dtype(spec.dtype)),
    )


def empty(spec: CacheSpec) -> KvState[jax.Array]:
    """Allocates the KV, filled with zeros."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes(spec))


def write(
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    block_ids: Int[Array, " X"],
    offsets: Int[Array, " X"],
    k: Float[Array, "X K H"],
    v: Float[Array, "X K H"],
) -> KvState[jax.Array]:
    """Writes one layer's keys and values of each token at (block, offset within it).

    A block id of P, one past the end, drops the write: that is where padding goes. (Index -1 would wrap.)
    """
    return KvState(
        k=kv.k.at[layer, block_ids, :, :, offsets].set(k.astype(kv.k.dtype), mode="drop"),
        v=kv.v.at[layer, block_ids, :, offsets, :].set(v.astype(kv.v.dtype), mode="drop"),
    )


def read(
    kv: KvState[jax.Array], layer: int | Int[Array, ""], block_ids: Int[Array, " B"]
) -> tuple[Float[Array, "B K H C"], Float[Array, "B K C H"]]:
    """Reads one block of one layer for each row.

    An id outside the pool reads some other block, whose positions the caller must mask.
    """
    return (
        kv.k.at[layer, block_ids].get(mode="clip"),
        kv.v.at[layer, block_ids].get(mode="clip"),
    )


def copy_blocks(kv: KvState[jax.Array], pairs: Int[Array, "B 2"], count: Int[Array, ""]) -> KvState[jax.Array]:
    """Copies whole blocks, all layers, one after another: the first `count` of (source, destination)."""

    def copy(index: jax.Array, kv: KvState[jax.Array]) -> KvState[jax.Array]:
        source, destination = pairs[index, 0], pairs[index, 1]

        def move(leaf: jax.Array) -> jax.Array:
            block = jax.lax.dynamic_slice_in_dim(leaf, source, 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(leaf, block, destination, axis=1)

        return jax.tree.map(move, kv)

    return jax.lax.fori_loop(0, count, copy, kv)


def gather_sequence(
    kv: KvState[jax.Array], layer: Int[Array, ""], table: Int[Array, " M"]
) -> tuple[Float[Array, "S K H"], Float[Array, "S K H"]]:
    """Copies one layer's keys and values out of a sequence's blocks, in the order of its positions."""
    k = jax.lax.dynamic_index_in_dim(kv.k, layer, keepdims=False)[table]  # [M, K, H, C]
    v = jax.lax.dynamic_index_in_dim(kv.v, layer, keepdims=False)[table]  # [M, K, C, H]
    k, v = k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)  # [M, C, K, H]
    return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])

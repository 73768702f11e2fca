"""The preallocated keys and values, and the only code that knows their physical axis order.

| layout | keys | values | for |
|---|---|---|---|
| `products` | `[L, P, K, H, C]` | `[L, P, K, C, H]` | XLA on CPU |
| `positions` | `[L, P, C, K, H]` | `[L, P, C, K, H]` | GPUs |
| `interleaved` | `[L, P, C, 2K, H]`, each head's key before its value | the same array | TPUs |
| `latent` | `[L, P, K, H, C]` | the same numbers | latent attention, where a value is its key |

`products`: both products of attention read a block as a plain matrix, with no transposition of what is cached.
`positions`: a token's heads lie together, so that it is written as one run, and a head's H values are one run to a
reader, whatever the block size. `interleaved` is what the ragged kernel of TPUs reads.

Layers that see no further than a window may keep no more: they have arrays of their own, in which each row of the block
tables has a ring of blocks that it goes round in (models/sliding_window.py).
"""

from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ferrum_jax.contract.errors import UnsupportedError

Leaf = TypeVar("Leaf")
Layout = Literal["products", "positions", "interleaved", "latent"]


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Sizes of the KV of one model."""

    num_layers: int  # that keep everything
    num_blocks: int
    block_size: int  # positions
    num_kv_heads: int
    head_dim: int
    dtype: str
    layout: Layout = "products"
    attention: str = "xla"  # the backend that reads it (ops/attention.py)
    ring_layers: int = 0  # that keep a ring of each sequence
    ring_blocks: int = 0  # of one ring
    num_rings: int = 0

    @property
    def bytes_per_layer(self) -> int:
        """Bytes that keys and values of one position take in one layer."""
        arrays = 1 if self.layout == "latent" else 2
        return arrays * self.num_kv_heads * self.head_dim * np.dtype(self.dtype).itemsize

    @property
    def bytes_per_position(self) -> int:
        """Bytes that keys and values of one position take over all layers that keep everything."""
        return self.num_layers * self.bytes_per_layer

    @property
    def ring_bytes(self) -> int:
        """Bytes of one ring over all its layers."""
        return self.ring_layers * self.ring_blocks * self.block_size * self.bytes_per_layer

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole KV."""
        return self.bytes_per_position * self.block_size * self.num_blocks + self.num_rings * self.ring_bytes


@flax.struct.dataclass
class KvState(Generic[Leaf]):
    """All cached keys and values. Donated to every step; the old value is then dead.

    The layout is part of the type: one engine's KV has one for good, so no step can be traced for another.
    """

    k: Leaf  # [L, P, K, H, C], [L, P, C, K, H] or [L, P, C, 2K, H]
    v: Leaf | None = None  # [L, P, K, C, H], [L, P, C, K, H], or None where `k` holds both or is both
    layout: Layout = flax.struct.field(pytree_node=False, default="products")
    rings: "KvState[Leaf] | None" = None  # of the layers that keep no more than a window; P is rings times their blocks
    ring_blocks: int = flax.struct.field(pytree_node=False, default=0)  # of one of them


def shapes(spec: CacheSpec) -> KvState[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the KV, for lowering."""
    rings = None
    if spec.ring_layers:
        rings = shapes(
            replace(spec, num_layers=spec.ring_layers, num_blocks=spec.num_rings * spec.ring_blocks, ring_layers=0)
        )
    pool, heads, ring = (spec.num_layers, spec.num_blocks), spec.num_kv_heads, spec.ring_blocks if rings else 0
    size, width, dtype = spec.block_size, spec.head_dim, np.dtype(spec.dtype)
    if spec.layout == "interleaved":
        both = jax.ShapeDtypeStruct((*pool, size, 2 * heads, width), dtype)
        return KvState(k=both, layout=spec.layout, rings=rings, ring_blocks=ring)
    if spec.layout == "latent":
        latents = jax.ShapeDtypeStruct((*pool, heads, width, size), dtype)
        return KvState(k=latents, layout=spec.layout, rings=rings, ring_blocks=ring)
    k = (heads, width, size) if spec.layout == "products" else (size, heads, width)
    v = (heads, size, width) if spec.layout == "products" else (size, heads, width)
    return KvState(
        k=jax.ShapeDtypeStruct((*pool, *k), dtype),
        v=jax.ShapeDtypeStruct((*pool, *v), dtype),
        layout=spec.layout,
        rings=rings,
        ring_blocks=ring,
    )


def empty(spec: CacheSpec) -> KvState[jax.Array]:
    """Allocates the KV, filled with zeros."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes(spec))


def num_blocks(kv: KvState[jax.Array]) -> int:
    """Blocks in the pool."""
    return kv.k.shape[1]


def block_size(kv: KvState[jax.Array]) -> int:
    """Positions in a block."""
    return kv.k.shape[4 if kv.layout in ("products", "latent") else 2]


def num_kv_heads(kv: KvState[jax.Array]) -> int:
    """Heads that have keys and values."""
    if kv.layout in ("products", "latent"):
        return kv.k.shape[2]
    return kv.k.shape[3] // (2 if kv.layout == "interleaved" else 1)


def write(
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    block_ids: Int[Array, " X"],
    offsets: Int[Array, " X"],
    k: Float[Array, "X K H"],
    v: Float[Array, "X K H"] | None = None,
) -> KvState[jax.Array]:
    """Writes one layer's keys and values of each token at (block, offset within it); a latent has no values beside it.

    A block id of P, one past the end, drops the write: that is where padding goes. (Index -1 would wrap.)
    """
    k = k.astype(kv.k.dtype)
    if kv.layout == "latent":
        return replace(kv, k=kv.k.at[layer, block_ids, :, :, offsets].set(k, mode="drop", wrap_negative_indices=False))
    assert v is not None
    v = v.astype(kv.k.dtype)
    if kv.v is None:
        both = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[2])  # [X, 2K, H]
        return replace(kv, k=kv.k.at[layer, block_ids, offsets].set(both, mode="drop", wrap_negative_indices=False))
    if kv.layout == "positions":
        return replace(
            kv,
            k=kv.k.at[layer, block_ids, offsets].set(k, mode="drop", wrap_negative_indices=False),
            v=kv.v.at[layer, block_ids, offsets].set(v, mode="drop", wrap_negative_indices=False),
        )
    return replace(
        kv,
        k=kv.k.at[layer, block_ids, :, :, offsets].set(k, mode="drop", wrap_negative_indices=False),
        v=kv.v.at[layer, block_ids, :, offsets, :].set(v, mode="drop", wrap_negative_indices=False),
    )


def read(
    kv: KvState[jax.Array], layer: int | Int[Array, ""], block_ids: Int[Array, " B"]
) -> tuple[Float[Array, "B K H C"], Float[Array, "B K C H"]]:
    """Reads one block of one layer for each row.

    An id outside the pool reads some other block, whose positions the caller must mask.
    """
    at = layer * num_blocks(kv) + block_ids  # one index, where XLA's CPU gathers by two are a tenth slower

    def take(pool: jax.Array) -> jax.Array:
        return pool.reshape(-1, *pool.shape[2:]).at[at].get(mode="clip", wrap_negative_indices=False)

    k = take(kv.k)
    if kv.layout == "latent":
        return k, k.swapaxes(2, 3)
    if kv.layout == "products":
        assert kv.v is not None
        return k, take(kv.v)
    if kv.v is None:
        k, v = k[..., 0::2, :], k[..., 1::2, :]  # [B, C, K, H]
    else:
        v = take(kv.v)
    return k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)


def rows_of_heads(kv: KvState[jax.Array]) -> tuple[Float[Array, "R K H"], Float[Array, "R K H"]]:
    """Shows the pool of layout `positions` as R = L*P*C rows, (layer, block, offset) in that order, without a copy.

    Raises:
        UnsupportedError: the KV has another layout.
    """
    if kv.v is None or kv.layout != "positions":
        raise UnsupportedError(f"layout {kv.layout} of the KV has no rows of heads, only `positions` has")
    return kv.k.reshape(-1, *kv.k.shape[3:]), kv.v.reshape(-1, *kv.v.shape[3:])


def pages(kv: KvState[jax.Array]) -> Float[Array, "pages C KK H"]:
    """Shows the pool of layout `interleaved` as one run of blocks, those of a layer together, without a copy.

    Raises:
        UnsupportedError: the KV has another layout.
    """
    if kv.layout != "interleaved":
        raise UnsupportedError(f"layout {kv.layout} of the KV has no interleaved pages, only `interleaved` has")
    return kv.k.reshape(-1, *kv.k.shape[2:])


def read_positions(
    kv: KvState[jax.Array], layer: int | Int[Array, ""], block_ids: Int[Array, "B T"], offsets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Copies single positions out of the pool; ids outside it read some other block.

    Raises:
        UnsupportedError: the KV's layout is not `positions`.
    """
    if kv.v is None or kv.layout != "positions":
        raise UnsupportedError(f"layout {kv.layout} of the KV cannot be read by position, only `positions` can")
    return (
        kv.k.at[layer, block_ids, offsets].get(mode="clip", wrap_negative_indices=False),
        kv.v.at[layer, block_ids, offsets].get(mode="clip", wrap_negative_indices=False),
    )


def copy_blocks(kv: KvState[jax.Array], pairs: Int[Array, "B 2"], count: Int[Array, ""]) -> KvState[jax.Array]:
    """Copies whole blocks, one after another, the first `count` of (source, destination); rings have none to share."""

    def copy(index: jax.Array, kv: KvState[jax.Array]) -> KvState[jax.Array]:
        source, destination = pairs[index, 0], pairs[index, 1]

        def move(leaf: jax.Array) -> jax.Array:
            block = jax.lax.dynamic_slice_in_dim(leaf, source, 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(leaf, block, destination, axis=1)

        return replace(kv, k=move(kv.k), v=None if kv.v is None else move(kv.v))

    return jax.lax.fori_loop(0, count, copy, kv)


def gather_sequence(
    kv: KvState[jax.Array], layer: Int[Array, ""], table: Int[Array, " M"]
) -> tuple[Float[Array, "S K H"], Float[Array, "S K H"]]:
    """Copies one layer's keys and values out of a sequence's blocks, in the order of its positions."""
    k, v = read(kv, layer, table)  # [M, K, H, C], [M, K, C, H]
    k, v = k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)  # [M, C, K, H]
    return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])

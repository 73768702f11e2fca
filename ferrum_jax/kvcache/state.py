"""The preallocated keys and values, and the only code that knows their physical axis order.

| layout | keys | values | for |
|---|---|---|---|
| `products` | `[L, P, K, H, C]` | `[L, P, K, C, H]` | CPUs |
| `positions` | `[L, P, C, K, H]` | `[L, P, C, K, H]` | GPUs |
| `interleaved` | `[L, P, C, 2K, H]`, each head's key before its value | the same array | TPUs |
| `latent` | `[L, P, K, H, C]` | the same numbers | latent attention, where a value is its key |
| `latent_rows` | `[L, P, C, K, H]` | the same numbers | the same on GPUs |

`products`: both products of attention read a block as a plain matrix, with no transposition of what is cached.
`positions`: a token's heads lie together, so that it is written as one run, and a head's H values are one run to a
reader, whatever the block size. `interleaved` is what the ragged kernel of TPUs reads.

Layers with a sliding window may keep only that window: they have arrays of their own, in which each slot has a fixed
number of blocks that are reused modulo the window (models/sliding_window.py).
"""

from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.sharding.mesh import Placement

Leaf = TypeVar("Leaf")
Layout = Literal["products", "positions", "interleaved", "latent", "latent_rows"]
LATENTS = ("latent", "latent_rows")  # layouts of one array, whose values are its keys


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Sizes of the KV of one model, on each of the devices that share it."""

    num_layers: int  # that keep all positions
    num_blocks: int
    block_size: int  # positions
    num_kv_heads: int
    head_dim: int
    dtype: str
    layout: Layout = "products"
    attention: str = "xla"  # the backend that reads it (ops/attention.py)
    window_layers: int = 0  # that keep only their sliding window
    window_blocks: int = 0  # of one sequence in each of those
    window_slots: int = 0  # sequences that have such blocks

    @property
    def bytes_per_layer(self) -> int:
        """Bytes that keys and values of one position take in one layer."""
        arrays = 1 if self.layout in LATENTS else 2
        return arrays * self.num_kv_heads * self.head_dim * np.dtype(self.dtype).itemsize

    @property
    def bytes_per_position(self) -> int:
        """Bytes that keys and values of one position take over all layers that keep all positions."""
        return self.num_layers * self.bytes_per_layer

    @property
    def window_bytes(self) -> int:
        """Bytes of one sequence's sliding-window cache over all its layers."""
        return self.window_layers * self.window_blocks * self.block_size * self.bytes_per_layer

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole KV."""
        return self.bytes_per_position * self.block_size * self.num_blocks + self.window_slots * self.window_bytes


@flax.struct.dataclass
class KvState(Generic[Leaf]):
    """All cached keys and values. Donated to every step; the old value is then dead.

    The layout is part of the type: one engine's KV has one for good, so no step can be traced for another.
    """

    k: Leaf  # [L, P, K, H, C], [L, P, C, K, H] or [L, P, C, 2K, H]
    v: Leaf | None = None  # [L, P, K, C, H], [L, P, C, K, H], or None where `k` holds both or is both
    layout: Layout = flax.struct.field(pytree_node=False, default="products")
    windowed: "KvState[Leaf] | None" = None  # of the sliding-window layers, if they are kept apart
    window_blocks: int = flax.struct.field(pytree_node=False, default=0)  # of one sequence there


def shapes(spec: CacheSpec) -> KvState[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the KV, for lowering."""
    size, heads, width = spec.block_size, spec.num_kv_heads, spec.head_dim
    blocks = {
        "products": ((heads, width, size), (heads, size, width)),
        "positions": ((size, heads, width), (size, heads, width)),
        "interleaved": ((size, 2 * heads, width), None),
        "latent": ((heads, width, size), None),
        "latent_rows": ((size, heads, width), None),
    }[spec.layout]

    def pools(num_layers: int, num_blocks: int, **windowed: Any) -> KvState[jax.ShapeDtypeStruct]:
        k, v = (
            None if block is None else jax.ShapeDtypeStruct((num_layers, num_blocks, *block), np.dtype(spec.dtype))
            for block in blocks
        )
        assert k is not None
        return KvState(k=k, v=v, layout=spec.layout, **windowed)

    if not spec.window_layers:
        return pools(spec.num_layers, spec.num_blocks)
    windowed = pools(spec.window_layers, spec.window_slots * spec.window_blocks)
    return pools(spec.num_layers, spec.num_blocks, windowed=windowed, window_blocks=spec.window_blocks)


def partitions(kv: KvState[Any], axes: tuple[str, ...]) -> KvState[PartitionSpec]:
    """How the KV is divided over mesh axes: by heads; a latent, which has one head, is whole on every device.

    So is a pool without layers, as JAX divides no empty array.
    """
    head = None if kv.layout in LATENTS else 2 if kv.layout == "products" else 3
    spec = PartitionSpec() if head is None else PartitionSpec(*(None,) * head, axes)
    return jax.tree.map(lambda leaf: spec if leaf.shape[0] else PartitionSpec(), kv)


def shapes_on(placement: Placement, spec: CacheSpec) -> KvState[jax.ShapeDtypeStruct]:
    """Returns the shapes and shardings of the KV on all devices of a model, given the spec of one device."""
    own, count = shapes(spec), len(placement.devices)
    divided = partitions(own, placement.axes)

    def together(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sizes = [size * count if at < len(spec) and spec[at] else size for at, size in enumerate(leaf.shape)]
        return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype)

    return placement.place(jax.tree.map(together, own, divided), divided)


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

    A block id of P, one past the end, drops the write: that is where padding goes. (Index -1 would wrap.) An 8-bit KV,
    whose dtype has no infinity, saturates at its largest number.
    """

    def put(pool: jax.Array, index: tuple[Any, ...], values: jax.Array) -> jax.Array:
        if pool.dtype.itemsize == 1:
            most = float(jnp.finfo(pool.dtype).max)
            values = jnp.clip(values, -most, most)
        return pool.at[index].set(values.astype(pool.dtype), mode="drop", wrap_negative_indices=False)

    across, along = (layer, block_ids, slice(None), slice(None), offsets), (layer, block_ids, offsets)
    if kv.layout in LATENTS:
        return replace(kv, k=put(kv.k, across if kv.layout == "latent" else along, k))
    assert v is not None
    if kv.v is None:
        both = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[2])  # [X, 2K, H]
        return replace(kv, k=put(kv.k, along, both))
    if kv.layout == "positions":
        return replace(kv, k=put(kv.k, along, k), v=put(kv.v, along, v))
    return replace(kv, k=put(kv.k, across, k), v=put(kv.v, (layer, block_ids, slice(None), offsets), v))


def read(
    kv: KvState[jax.Array], layer: int | Int[Array, ""], block_ids: Int[Array, " B"]
) -> tuple[Float[Array, "B K H C"], Float[Array, "B K C H"]]:
    """Reads one block of one layer for each row.

    An id outside the pool reads some other block, whose positions the caller must mask.
    """
    at = layer * num_blocks(kv) + block_ids  # one index: XLA's gathers by two are a tenth slower on a CPU

    def take(pool: jax.Array) -> jax.Array:
        return pool.reshape(-1, *pool.shape[2:]).at[at].get(mode="clip", wrap_negative_indices=False)

    k = take(kv.k)
    if kv.layout == "latent":
        return k, k.swapaxes(2, 3)
    if kv.layout == "products":
        assert kv.v is not None
        return k, take(kv.v)
    if kv.layout == "latent_rows":
        v = k
    elif kv.v is None:
        k, v = k[..., 0::2, :], k[..., 1::2, :]  # [B, C, K, H]
    else:
        v = take(kv.v)
    return k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)


def rows_of_heads(kv: KvState[jax.Array]) -> tuple[Float[Array, "R K H"], Float[Array, "R K H"]]:
    """Views the pool of layout `positions` as R = L*P*C rows, (layer, block, offset) in that order, without a copy.

    Of `latent_rows` both are the same array.

    Raises:
        UnsupportedError: the KV has another layout.
    """
    if kv.layout == "latent_rows":
        rows = kv.k.reshape(-1, *kv.k.shape[3:])
        return rows, rows
    _check_layout(kv, "positions", "(or latent_rows) has rows of heads")
    assert kv.v is not None
    return kv.k.reshape(-1, *kv.k.shape[3:]), kv.v.reshape(-1, *kv.v.shape[3:])


def pages(kv: KvState[jax.Array]) -> Float[Array, "pages C KK H"]:
    """Views the pool of layout `interleaved` as one run of blocks, those of a layer together, without a copy.

    Raises:
        UnsupportedError: the KV has another layout.
    """
    _check_layout(kv, "interleaved", "has pages")
    return kv.k.reshape(-1, *kv.k.shape[2:])


def _check_layout(kv: KvState[jax.Array], wanted: Layout, what: str) -> None:
    if kv.layout != wanted:
        raise UnsupportedError(f"only a KV of layout {wanted} {what}, this one's is {kv.layout}")


def copy_blocks(kv: KvState[jax.Array], pairs: Int[Array, "B 2"], count: Int[Array, ""]) -> KvState[jax.Array]:
    """Copies whole blocks one after another: the first `count` pairs of (source, destination).

    Sliding-window layers share no blocks.
    """

    def copy(index: jax.Array, kv: KvState[jax.Array]) -> KvState[jax.Array]:
        source, destination = pairs[index, 0], pairs[index, 1]

        def move(leaf: jax.Array) -> jax.Array:
            block = jax.lax.dynamic_slice_in_dim(leaf, source, 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(leaf, block, destination, axis=1)

        return replace(kv, k=move(kv.k), v=None if kv.v is None else move(kv.v))

    return jax.lax.fori_loop(0, count, copy, kv)


def gather_sequence(
    kv: KvState[jax.Array], layer: int | Int[Array, ""], table: Int[Array, " M"]
) -> tuple[Float[Array, "S K H"], Float[Array, "S K H"]]:
    """Copies one layer's keys and values out of a sequence's blocks, in the order of its positions."""
    k, v = read(kv, layer, table)  # [M, K, H, C], [M, K, C, H]
    k, v = k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)  # [M, C, K, H]
    return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])

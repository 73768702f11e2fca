"""Products with weights stored `[out, in]` as in checkpoints, quantised or not, and the low-rank deltas of adapters.

Deltas (Hu et al. 2021, "LoRA", section 4.1) serve batches that mix adapters. The adapters of one product are stacked: a
delta is two dense products with a mask between them. No weights are gathered, and no shape depends on which adapters a
batch uses.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ferrum_jax.ops import experts_triton, native
from ferrum_jax.ops.experts_triton import TiledWeight
from ferrum_jax.ops.quantised import QuantisedWeight, Weight, dequantise_weight, halves, is_packed, is_quantised, scaled

FEW_TOKENS = 64  # from 2 to this many tokens, XLA's CPU products are faster with the weight as left operand
PARTS = 4  # into which a weight is cut for a single token on a CPU
LANES = 16  # float32 numbers in the widest CPU register
BLOCK = 1 << 20  # numbers of a quantised weight that a CPU dequantises at a time, so that they stay in its cache
PACKED_BLOCK = 1 << 17  # the same for packed values


@dataclass(frozen=True)
class ChosenWeight:
    """A stack of experts' weights `[E, F, D]`, with the expert of each row; only kernels read it."""

    stack: Weight
    ids: jax.Array  # int32 [X]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackedWeight:
    """A view of one layer's weight in the stack of all layers: kernels read it there, XLA's code copies it."""

    stack: Weight  # [L, F, D], or of experts [L, E, F, D]
    layer: jax.Array  # int32 scalar

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the layer's weight."""
        return self.stack.shape[1:]

    def copy(self) -> Weight:
        """Copies the layer's weight out of the stack."""
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, self.layer, keepdims=False), self.stack)


def precision(dtype: jnp.dtype) -> lax.Precision:
    """Returns HIGHEST for float32, whose default is TF32 on NVIDIA and bfloat16 passes on TPU; else DEFAULT."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def linear(
    x: Float[Array, "X D"],
    weight: Float[Array, "F D"] | QuantisedWeight | StackedWeight | ChosenWeight | TiledWeight,
    bias: Float[Array, " F"] | Float[Array, "X F"] | None = None,
) -> Float[Array, "X F"]:
    """Computes `x @ weight.T + bias` in the dtype of `x`, to which the bias is rounded.

    Quantised weights are multiplied as in `quantised_product`.
    """
    if isinstance(weight, ChosenWeight):
        y = native.expert_product(x, weight.ids, weight.stack)
    elif isinstance(weight, TiledWeight):
        y = experts_triton.product(x, weight)
    else:
        y = _product(x, weight, x.dtype)
    return y if bias is None else y + bias.astype(y.dtype)


def vocabulary_logits(
    x: Float[Array, "R D"], weight: Float[Array, "V D"] | QuantisedWeight | StackedWeight
) -> Float[Array, "R V"]:
    """Computes `x @ weight.T`, accumulated and returned in float32."""
    return _product(x, weight, jnp.dtype(jnp.float32))


def _product(x: jax.Array, weight: Weight | StackedWeight, out: jnp.dtype) -> jax.Array:
    if isinstance(weight, StackedWeight):
        if native.can_multiply(x, weight.stack):
            return native.product(x, weight.stack, weight.layer)
        weight = weight.copy()
    if native.can_multiply(x, weight):
        return native.product(x, weight)
    if isinstance(weight, QuantisedWeight):
        if native.can_widen(x, weight):
            return _weight_right(x, native.widen(weight, x), out)
        return quantised_product(x, weight, out)
    if not 1 <= x.shape[0] <= FEW_TOKENS:
        return _weight_right(x, weight, out)
    on_cpu = _weight_in_parts if x.shape[0] == 1 else _weight_left
    return lax.platform_dependent(
        x, weight, cpu=lambda x, w: on_cpu(x, w, out), default=lambda x, w: _weight_right(x, w, out)
    )


def _weight_right(x: jax.Array, weight: jax.Array, out: jnp.dtype) -> jax.Array:
    return jnp.einsum("XD,FD->XF", x, weight, precision=precision(x.dtype), preferred_element_type=out)


def _weight_in_parts(x: jax.Array, weight: jax.Array, out: jnp.dtype) -> jax.Array:
    """Computes `_weight_right` for one token, in parts of the weight's rows: faster for small products on two cores.

    16-bit weights (not measured) and weights sharded over several devices are not cut into parts.
    """
    is_spread = any(jax.typeof(weight).sharding.spec)
    if weight.shape[0] % (PARTS * LANES) or weight.dtype != jnp.float32 or is_spread:
        return _weight_right(x, weight, out)
    parts = weight.reshape(PARTS, weight.shape[0] // PARTS, weight.shape[1])
    each = jnp.broadcast_to(x, (PARTS, x.shape[1]))  # otherwise XLA would merge the parts again
    y = jnp.einsum("PD,PFD->PF", each, parts, precision=precision(x.dtype), preferred_element_type=out)
    return y.reshape(1, -1)


def _weight_left(x: jax.Array, weight: jax.Array, out: jnp.dtype) -> jax.Array:
    """Computes `_weight_right` with the weight as left operand; the barrier keeps XLA from swapping them back."""
    y = jnp.einsum("FD,XD->FX", weight, x, precision=precision(x.dtype), preferred_element_type=out)
    return lax.optimization_barrier(y).T


def quantised_product(x: jax.Array, weight: QuantisedWeight, out: jnp.dtype) -> jax.Array:
    """Computes `x @ weight.T` in float32 and rounds once, to `out`; x `[X, D]` and weight `[F, D]` to `[X, F]`.

    With one scale per channel and no offsets, x is multiplied by the bare values, which every floating dtype holds
    exactly, and the sum by the scale: a GPU converts the values inside the product and stores no converted weight.
    Otherwise the operand is the weight dequantised to the dtype of x.

    A CPU dequantises a block of the weight at a time: XLA's own products of int8 there take ten times as long.
    """
    return lax.platform_dependent(
        x, weight, cpu=lambda x, w: _by_blocks(x, w).astype(out), default=lambda x, w: _rescaled(x, w).astype(out)
    )


def _rescaled(x: jax.Array, weight: QuantisedWeight) -> jax.Array:
    wide = jnp.dtype(jnp.float32)
    scales, is_bare = weight.scales, weight.offsets is None and not is_packed(weight)
    if scales is None or not is_bare or scales.shape[-1] > 1 or is_quantised(scales):
        return _weight_right(x, dequantise_weight(weight, x.dtype), wide)
    return _weight_right(x, weight.values.astype(x.dtype), wide) * scales[:, 0].astype(wide)


def _halved(x: jax.Array, weight: QuantisedWeight) -> jax.Array:
    """Multiplies the first and the second halves of the weight's groups by the columns of x that belong to them.

    Interleaving the halves first takes a CPU four times as long.
    """
    assert weight.scales is not None
    rows, columns = x.shape  # perhaps no rows
    groups = weight.scales.shape[-1]
    parts = x.reshape(rows, groups, 2, columns // (2 * groups))
    products = [
        _weight_right(
            parts[:, :, at].reshape(rows, columns // 2),
            scaled(half, weight).reshape(len(half), -1).astype(x.dtype),
            jnp.dtype(jnp.float32),
        )
        for at, half in enumerate(halves(weight))
    ]
    return products[0] + products[1]


def _by_blocks(x: jax.Array, weight: QuantisedWeight) -> jax.Array:
    """Loops over blocks of output channels, at least two.

    The last block is as large as the others: if it would pass the end, it begins earlier and repeats some channels.
    Gradients dequantise each block again: keeping the blocks would keep the whole weight in float32.
    """
    (rows, columns), limit = weight.shape, PACKED_BLOCK if is_packed(weight) else BLOCK
    size = -(-rows // max(2, -(-rows * columns // limit)))
    starts = jnp.arange(0, rows, size, dtype=jnp.int32)
    is_fp8 = weight.values.dtype == jnp.float8_e4m3fn
    if is_fp8:  # XLA slices fp8 number by number, but bytes in blocks
        weight = replace(weight, values=lax.bitcast_convert_type(weight.values, jnp.uint8))

    def block(start: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), weight)
        if is_fp8:
            return _rescaled(x, replace(part, values=_widen_fp8(part.values))).T
        return (_halved if is_packed(part) else _rescaled)(x, part).T

    found = lax.map(jax.checkpoint(block), starts)
    repeated = len(starts) * size - rows
    return jnp.concatenate([found[:-1].reshape((len(starts) - 1) * size, len(x)), found[-1, repeated:]]).T


def _widen_fp8(values: jax.Array) -> jax.Array:
    """Converts bytes of e4m3fn to float32 through float16, whose exponent has one bit more and a bias larger by 8.

    XLA's own conversion of fp8 on a CPU takes five times as long.
    """
    wide = values.astype(jnp.uint16)
    bits = (wide & 0x7F) << 7 | (wide & 0x80) << 8
    found = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * jnp.float32(2**8)
    return jnp.where((wide & 0x7F) == 0x7F, jnp.float32(jnp.nan), found)


def uses(adapter_of_token: Int[Array, " X"], num_adapters: int) -> Bool[Array, "X A"]:
    """Returns a mask of each token's adapter; an index outside the stack, such as -1, means no adapter."""
    return adapter_of_token[:, None] == jnp.arange(num_adapters, dtype=adapter_of_token.dtype)


def low_rank(
    x: Float[Array, "X D"], down: Float[Array, "A R D"], up: Float[Array, "F A R"], used: Bool[Array, "X A"]
) -> Float[Array, "X F"]:
    """Computes `x @ down[a].T @ up[:, a].T` for the adapter a of each token; zeros for a token without adapter.

    Products of a token with other adapters are masked before the second product, so infinities in them do not spread.
    `up` must be finite, even for adapters that no token uses.
    """
    num_adapters, rank, width = down.shape  # a rank may be 0
    inner = linear(x, down.reshape(num_adapters * rank, width)).reshape(len(x), num_adapters, rank)
    inner = jnp.where(used[:, :, None], inner, jnp.zeros((), inner.dtype))
    return linear(inner.reshape(len(x), num_adapters * rank), up.reshape(len(up), num_adapters * rank))

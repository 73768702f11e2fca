"""Quantised weights: values of few bits with scales, a leaf of a parameter tree that products and look-ups accept.

A number of the weight is its value times its scale, plus its offset if there are offsets; 16-bit values, in a model
that computes in float32, are the numbers themselves. Scales and offsets may be such weights in turn, as in GGUF's K
blocks: integers times a number for several of them. Symmetric, round to nearest: Jacob et al. 2018, "Quantization and
Training of Neural Networks", section 2.1, with a zero point of 0; one scale for each output channel: Krishnamoorthi
2018, "Quantizing deep convolutional networks", section 3.1; e4m3fn: Micikevicius et al. 2022, "FP8 Formats for Deep
Learning", section 3. Four-bit values are packed two to a byte, as in GGUF's Q4_0: byte i of a group holds column i of
the group in its low bits, and column i + half the group's size in its high bits. Values of five and six bits keep their
low four bits in the same way, and the upper one or two in a second array. Four-bit values are integers or, where scales
are bytes, floats: MXFP4, a value of e2m1 times a power of two (OCP Microscaling Formats Specification v1.0, sections
5.3.3 and 5.4.1).
"""

import functools
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ferrum_jax.contract.errors import InvalidParameterError

Leaf = TypeVar("Leaf")
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # largest value used; int8's -128 is not used
NARROW = ("bfloat16", "float16")  # values that are the numbers themselves, without scales
UINT4 = "uint4"  # name of four-bit values, packed two to a uint8
UINT5, UINT6 = "uint5", "uint6"  # integers of five and six bits: the low four are packed as UINT4, the rest is `high`
UINTS = {UINT4: 4, UINT5: 5, UINT6: 6}  # number of bits
FLOAT4 = "float4_e2m1fn"  # name of four-bit floats, packed likewise; their scales are POWERS
PACKED = (*UINTS, FLOAT4)
POWERS = "uint8"  # dtype of scales that are powers of two: 2 ** (byte - 127), and 0 for 0


@flax.struct.dataclass
class QuantisedWeight(Generic[Leaf]):
    """A matrix `[F, D]`, or a stack of them, as values, scales (unless values have 16 bits) and, if any, offsets.

    Without offsets the middle value of integers of four to six bits, 8, 16 or 32, means 0.

    A pytree of one to six leaves, which may be mapped, sharded, stacked or sliced along their first axes. It has no
    dtype of its own: its values have one, and a product has the dtype of its input.
    """

    values: Leaf  # int8, float8_e4m3fn, bfloat16 or float16 [..., F, D], or uint8 [..., F, D / 2] of two numbers each
    # Floating, POWERS or a QuantisedWeight in int8, [..., F, G]: one for D / G columns; G = 1: one scale per channel.
    scales: Any = None
    offsets: Any = None  # floating or a QuantisedWeight in int8, [..., F, G]
    # Upper bits of values of five or six bits, uint8 [..., F, D / 8] or [..., F, D / 4]. Four bytes of `values` hold
    # eight numbers (byte 0 low, byte 0 high, byte 1 low, and so on); one byte, or a little-endian pair, has their upper
    # bits in that order, the lowest first.
    high: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantised matrix."""
        values: Any = self.values
        return (*values.shape[:-1], values.shape[-1] * (2 if is_packed(self) else 1))


Weight = jax.Array | QuantisedWeight


def quantise_weight(weight: Any, dtype: str, groups: int = 1) -> QuantisedWeight:
    """Quantises `[..., F, D]` to nearest, ties to even; NumPy arrays give NumPy arrays, with the same numbers.

    A scale is the largest magnitude of its columns times 1 / 127 for int8 or 1 / 448 for float8_e4m3fn; a value is the
    number times the scale's reciprocal, rounded. Both are float32 multiplications, as XLA rewrites divisions to them
    and NumPy does not. If a scale is below float32's least normal number, its values are zero. Columns with an infinity
    or NaN have a scale that is not finite, so products with them are not finite either.

    Args:
        weight: numbers of any floating dtype.
        dtype: of the values, a name in `LARGEST`.
        groups: scales per channel, G, which must divide D.
    """
    if dtype not in LARGEST:
        raise InvalidParameterError(f"weights are quantised to {' or '.join(LARGEST)}, not {dtype!r}")
    if groups < 1 or weight.shape[-1] % groups:
        raise InvalidParameterError(f"{weight.shape[-1]} columns cannot be divided into {groups} groups")
    xp, most = weight.__array_namespace__(), np.float32(LARGEST[dtype])
    wide = weight.astype(np.float32).reshape(*weight.shape[:-1], groups, -1)
    scales = xp.max(xp.abs(wide), axis=-1) * np.float32(1 / most)
    sound = xp.isfinite(scales) & (scales >= np.finfo(np.float32).tiny)
    inverse = np.float32(1) / xp.where(sound, scales, np.float32(1))
    steps = xp.where(sound[..., None], wide, np.float32(0)) * inverse[..., None]
    steps = xp.rint(steps) if dtype == "int8" else steps
    values = xp.clip(steps, -most, most).astype(jnp.dtype(dtype)).reshape(weight.shape)
    return QuantisedWeight(values=values, scales=scales)


def pack(values: Any, groups: int) -> Any:
    """Packs the lower four bits of values `[..., D]`, uint8, two to a byte: `[..., D / 2]`; groups must be even."""
    both = values.reshape(*values.shape[:-1], groups, 2, -1)
    return (both[..., 0, :] & np.uint8(15) | both[..., 1, :] << np.uint8(4)).reshape(*values.shape[:-1], -1)


def pack_high(values: Any, groups: int, bits: int) -> Any:
    """Packs the upper bits of values `[..., D]` of five or six bits, uint8; group sizes must be multiples of eight."""
    more, xp = bits - 4, values.__array_namespace__()
    upper = (values >> np.uint8(4)).reshape(*values.shape[:-1], groups, 2, -1, 4)
    upper = xp.moveaxis(upper, -3, -1).reshape(*values.shape[:-1], -1, more, 8 // more)  # by byte of the result
    parts = (upper[..., at] << np.uint8(more * at) for at in range(8 // more))
    return functools.reduce(lambda one, other: one | other, parts).reshape(*values.shape[:-1], -1)


def unpack_high(high: Any, groups: int, columns: int) -> Any:
    """Undoes `pack_high`: the upper bits of each value, `[..., G, 2, D / G / 2]`."""
    more, xp = high.shape[-1] * 8 // columns, high.__array_namespace__()
    parts = xp.stack([high >> np.uint8(more * at) & np.uint8(2**more - 1) for at in range(8 // more)], axis=-1)
    return xp.moveaxis(parts.reshape(*high.shape[:-1], groups, -1, 4, 2), -1, -3).reshape(
        *high.shape[:-1], groups, 2, -1
    )


def halves(weight: QuantisedWeight) -> list[jax.Array]:
    """Returns the values of the first and of the second half of each group, `[..., F, G, D / G / 2]`, in float32."""
    assert weight.scales is not None
    packed = weight.values.reshape(*weight.scales.shape, -1)
    found = packed & jnp.uint8(15), packed >> jnp.uint8(4)
    if (dtype := values_dtype(weight)) == FLOAT4:
        return [_widen_e2m1(half) for half in found]
    if weight.high is not None:
        upper = unpack_high(weight.high, weight.scales.shape[-1], weight.shape[-1])
        found = [half | upper[..., at, :] << jnp.uint8(4) for at, half in enumerate(found)]
    middle = jnp.float32(2 ** (UINTS[dtype] - 1) if weight.offsets is None else 0)
    return [half.astype(jnp.float32) - middle for half in found]


def _widen_e2m1(codes: Any) -> jax.Array:
    """Converts four-bit floats through float16, whose exponent has three bits more and a bias larger by 14."""
    wide = jnp.asarray(codes).astype(jnp.uint16)
    bits = (wide & 7) << 9 | (wide & 8) << 12
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * jnp.float32(2**14)


def _wide(scales: Any) -> jax.Array:
    """Returns scales or offsets in float32; POWERS become its exponents."""
    if is_quantised(scales):
        return dequantise_weight(scales, jnp.float32)
    if scales.dtype != POWERS:
        return scales.astype(jnp.float32)
    return lax.bitcast_convert_type(jnp.asarray(scales).astype(jnp.uint32) << 23, jnp.float32)


def dequantise_weight(weight: QuantisedWeight, dtype: Any) -> jax.Array:
    """Returns the weight as an array, computed in float32 and rounded once to `dtype`."""
    if weight.scales is None:
        return weight.values.astype(jnp.float32).astype(dtype)
    if is_packed(weight):
        wide = jnp.concatenate(halves(weight), axis=-1)
    else:
        wide = weight.values.astype(jnp.float32).reshape(*weight.scales.shape, -1)
    return scaled(wide, weight).reshape(weight.shape).astype(dtype)


def scaled(values: jax.Array, weight: QuantisedWeight) -> jax.Array:
    """Applies scales and offsets to values `[..., F, G, columns]`, in float32."""
    assert weight.scales is not None
    found = values * _wide(weight.scales)[..., None]
    return found if weight.offsets is None else found + _wide(weight.offsets)[..., None]


def is_packed(weight: QuantisedWeight) -> bool:
    """True if two values share a byte."""
    values: Any = weight.values
    return jnp.dtype(values.dtype) == jnp.uint8


def values_dtype(weight: QuantisedWeight) -> str:
    """Returns the name of the values' type: that of their dtype, or one of `PACKED`."""
    values, scales = cast(Any, weight.values), cast(Any, weight.scales)
    if not is_packed(weight):
        return values.dtype.name
    if weight.high is not None:
        return UINT5 if weight.high.shape[-1] * 8 == weight.shape[-1] else UINT6
    is_float = scales is not None and not is_quantised(scales) and scales.dtype == POWERS
    return FLOAT4 if is_float else UINT4


def rows_of(weight: Weight, ids: jax.Array, dtype: Any) -> jax.Array:
    """Looks up rows `ids` `[X]` of a weight `[V, D]`: `[X, D]`; a quantised weight is dequantised to `dtype`."""
    if isinstance(weight, QuantisedWeight):
        return dequantise_weight(jax.tree.map(lambda leaf: jnp.asarray(leaf)[ids], weight), dtype)
    return jnp.asarray(weight)[ids]


def is_quantised(leaf: Any) -> bool:
    """True for a quantised weight: an `is_leaf` for `jax.tree`."""
    return isinstance(leaf, QuantisedWeight)


def activation_dtype(params: Any) -> jnp.dtype:
    """Returns the dtype in which a model computes: that of its unquantised parameters, such as norms.

    The head may have another one.
    """
    inner = params["model"] if isinstance(params, Mapping) and "model" in params else params
    leaves = jax.tree.leaves(inner, is_leaf=is_quantised)
    return jnp.dtype(next(leaf.dtype for leaf in leaves if not is_quantised(leaf)))

"""Quantised weights: values of few bits with scales, a leaf of a parameter tree that products and look-ups accept.

A number of the weight is its value times its scale, plus its offset if there are offsets; 16-bit values, in a model
that computes in float32, are the numbers themselves. Scales and offsets may be such weights in turn, as in GGUF's K
blocks: integers times a number for several of them. Symmetric, round to nearest: Jacob et al. 2018, "Quantization and
Training of Neural Networks", section 2.1, with a zero point of 0; one scale for each output channel: Krishnamoorthi
2018, "Quantizing deep convolutional networks", section 3.1; e4m3fn: Micikevicius et al. 2022, "FP8 Formats for Deep
Learning", section 3. Four-bit values are packed two to a byte, as in GGUF's Q4_0: byte i of a group holds column i of
the group in its low bits, and column i + half the group's size in its high bits. They are integers or, where scales are
bytes, floats: MXFP4, a value of e2m1 times a power of two (OCP Microscaling Formats Specification v1.0, sections 5.3.3
and 5.4.1).
"""

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
FLOAT4 = "float4_e2m1fn"  # name of four-bit floats, packed likewise; their scales are POWERS
PACKED = (UINT4, FLOAT4)
POWERS = "uint8"  # dtype of scales that are powers of two: 2 ** (byte - 127), and 0 for 0
MIDDLE = 8.0  # the four-bit value that means 0 if there are no offsets


@flax.struct.dataclass
class QuantisedWeight(Generic[Leaf]):
    """A matrix `[F, D]`, or a stack of them, as values, scales (unless values have 16 bits) and, if any, offsets.

    A pytree of one to five leaves, which may be mapped, sharded, stacked or sliced along their first axes. It has no
    dtype of its own: its values have one, and a product has the dtype of its input.
    """

    values: Leaf  # int8, float8_e4m3fn, bfloat16 or float16 [..., F, D], or uint8 [..., F, D / 2] of two numbers each
    # Floating, POWERS or a QuantisedWeight in int8, [..., F, G]: one for D / G columns; G = 1: one scale per channel.
    scales: Any = None
    offsets: Any = None  # floating or a QuantisedWeight in int8, [..., F, G]

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


def pack(values: np.ndarray, groups: int) -> np.ndarray:
    """Packs four-bit values `[F, D]`, uint8 below 16, two to a byte: `[F, D / 2]`; groups must have an even size."""
    halves = values.reshape(len(values), groups, 2, -1)
    return (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(len(values), -1)


def halves(weight: QuantisedWeight) -> list[jax.Array]:
    """Returns the four-bit values in the low and in the high bits, `[..., F, G, D / G / 2]` each, in float32."""
    assert weight.scales is not None
    packed = weight.values.reshape(*weight.scales.shape, -1)
    found = packed & jnp.uint8(15), packed >> jnp.uint8(4)
    if values_dtype(weight) == FLOAT4:
        return [_widen_e2m1(half) for half in found]
    middle = jnp.float32(MIDDLE if weight.offsets is None else 0)
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
    """Returns the name of the values' type: that of their dtype, UINT4 or FLOAT4."""
    values, scales = cast(Any, weight.values), cast(Any, weight.scales)
    if not is_packed(weight):
        return values.dtype.name
    is_float = scales is not None and not is_quantised(scales) and scales.dtype == POWERS
    return FLOAT4 if is_float else UINT4


def rows_of(weight: Weight, ids: jax.Array, dtype: Any) -> jax.Array:
    """Looks up rows `ids` `[X]` of a weight `[V, D]`: `[X, D]`; a quantised weight is dequantised to `dtype`."""
    if isinstance(weight, QuantisedWeight):
        return dequantise_weight(jax.tree.map(lambda leaf: leaf[ids], weight), dtype)
    return weight[ids]


def is_quantised(leaf: Any) -> bool:
    """True for a quantised weight: an `is_leaf` for `jax.tree`."""
    return isinstance(leaf, QuantisedWeight)


def activation_dtype(params: Any) -> jnp.dtype:
    """Returns the dtype in which a model computes: that of its unquantised parameters, such as norms."""
    leaves = jax.tree.leaves(params, is_leaf=is_quantised)
    return jnp.dtype(next(leaf.dtype for leaf in leaves if not is_quantised(leaf)))

"""Unpacking of quantised matrices on the host: to numbers, or to their native quantisation.

GPTQ packs adjacent inputs of weights `[in, out]` into a word, lowest bits first. AWQ packs eight adjacent outputs, in
the order 0 2 4 6 1 3 5 7 (AutoAWQ, `awq/utils/packing_utils.py`). compressed-tensors packs adjacent inputs of weights
`[out, in]`; its integers are shifted by half of their range (`compressors/pack_quantized/helpers.py`).

MXFP4 has four-bit values, two to a byte, the first in the low bits, with a power of two for every 32 values (OCP
Microscaling Formats Specification v1.0: E2M1 in section 5.3.3, E8M0 in section 5.4.1). GPT-OSS stores its stacks of
experts `[E, out, in]` in this way. bfloat16 holds every such number exactly.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import InvalidFormatError, UnsupportedError
from ferrum_jax.models.quantisation import Format
from ferrum_jax.ops.quantised import FLOAT4, POWERS, UINT4, QuantisedWeight, pack
from ferrum_jax.weights.packed import BLOCKS, MXFP4_GROUP, SCALES, PackedWeight
from ferrum_jax.weights.safetensors_file import Entry
from ferrum_jax.weights.scheme import AWQ, GPTQ, MXFP4, PLAIN, WORDS, Scheme

_AWQ_PLACES = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # output index of each number of a word, lowest bits first

_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F8_E8M0": "float32"}  # of scales

_LARGEST_POWER = 252  # of MXFP4's scales: with larger ones not every number is finite in float32; 255 is NaN
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOATS = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_PAIRS = np.stack([np.tile(_FLOATS, 16), np.repeat(_FLOATS, 16)], axis=-1)  # [256, 2]: the two numbers of each byte

Parts = Mapping[str, NDArray[Any]]


class Codes(NamedTuple):
    """A matrix `[F, D]` whose numbers are `(value - zero) * scale`, with the zero and scale of their row and group."""

    values: NDArray[Any]  # uint8, int8 or float8_e4m3fn [F, D]
    scales: NDArray[Any]  # [F, G], as they are stored
    zeros: NDArray[Any] | None  # uint8 or int8 [F, G]
    group_of: NDArray[Any]  # int [D]: the group of each column


def read_codes(parts: Parts, scheme: Scheme, shape: tuple[int, ...]) -> Codes:
    """Unpacks the tensors of one weight of `shape`; the tensors' own shapes must be those of the scheme.

    Raises:
        InvalidFormatError: the groups of columns do not exist, or contradict the scheme, or a scale is not finite.
    """
    found = {GPTQ: _gptq, AWQ: _awq, WORDS: _words, PLAIN: _plain}[scheme.packing](parts, scheme, shape)
    if not np.isfinite(found.scales.astype(np.float32)).all():
        raise InvalidFormatError("a scale is not a finite number")
    return found


def decode(codes: Codes) -> NDArray[np.float32]:
    """Returns the numbers in float32, rounded once; with 16-bit scales they are exact."""
    wide = codes.values.astype(np.float32)
    if codes.zeros is not None:
        wide -= codes.zeros.astype(np.float32)[:, codes.group_of]
    wide *= codes.scales.astype(np.float32)[:, codes.group_of]
    return wide


def decode_stack(parts: Parts) -> NDArray[Any]:
    """Returns the numbers `[E, F, D]` of a stack in MXFP4, exactly, in bfloat16.

    Raises:
        InvalidFormatError: as `check_powers`.
    """
    blocks, scales = parts[BLOCKS], parts[SCALES]
    check_powers(scales)
    experts, outputs, groups, _ = blocks.shape
    found = np.empty((experts, outputs, groups * MXFP4_GROUP), ml_dtypes.bfloat16)
    for own, bytes_, powers in zip(found, blocks, scales, strict=True):  # in float32 for one expert at a time
        wide = _PAIRS[bytes_].reshape(outputs, groups, MXFP4_GROUP)
        own[:] = np.ldexp(wide, powers.astype(np.int32)[..., None] - 127).reshape(outputs, -1)
    return found


def stack_to_leaf(parts: Parts) -> QuantisedWeight[np.ndarray]:
    """Returns the quantised leaf `[E, F, D]` of a stack in MXFP4; numbers below 2**-126 or of the scale 2**-127 are 0.

    Raises:
        InvalidFormatError: as `check_powers`.
    """
    blocks, scales = parts[BLOCKS], parts[SCALES]
    check_powers(scales)
    experts, outputs, groups, bytes_ = blocks.shape
    values = np.empty((experts, outputs, groups * bytes_), np.uint8)
    for own, pairs in zip(values, blocks, strict=True):  # from pairs of adjacent numbers to halves of a group
        numbers = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=-1)
        own[:] = pack(numbers.reshape(outputs, -1), groups)
    return QuantisedWeight(values=values, scales=scales)


def check_powers(scales: NDArray[np.uint8]) -> None:
    """Raises InvalidFormatError if a scale of MXFP4 is NaN, or so large that numbers may not be finite in float32."""
    if (largest := scales.max(initial=0)) > _LARGEST_POWER:
        raise InvalidFormatError(f"a scale is {largest}, at most {_LARGEST_POWER} has finite numbers")


def unpack(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Splits 32-bit words `[R, C]` into their numbers, lowest bits first: `[R, C * 32 / bits]`."""
    data: NDArray[np.uint8] = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return data
    return np.stack([data & np.uint8(15), data >> np.uint8(4)], axis=-1).reshape(len(data), -1)


def _gptq(parts: Parts, scheme: Scheme, shape: tuple[int, ...]) -> Codes:
    rows, columns = shape
    scales = np.ascontiguousarray(parts["scales"].T)
    zeros = unpack(parts["qzeros"], scheme.bits)[:, :rows].T
    zeros = (zeros + np.uint8(scheme.zero_shift)) & np.uint8(2**scheme.bits - 1)
    values = unpack(np.ascontiguousarray(parts["qweight"].T), scheme.bits)[:, :columns]
    return Codes(values, scales, zeros, _groups(parts.get("g_idx"), scheme, columns, scales.shape[1]))


def _awq(parts: Parts, scheme: Scheme, shape: tuple[int, ...]) -> Codes:
    def outputs(words: NDArray[Any]) -> NDArray[np.uint8]:
        numbers = unpack(words, scheme.bits).reshape(len(words), -1, len(_AWQ_PLACES))
        found = np.empty_like(numbers)
        found[..., _AWQ_PLACES] = numbers
        return np.ascontiguousarray(found.reshape(len(words), -1).T)

    scales = np.ascontiguousarray(parts["scales"].T)
    groups = _groups(None, scheme, shape[1], scales.shape[1])
    return Codes(outputs(parts["qweight"]), scales, outputs(parts["qzeros"]), groups)


def _words(parts: Parts, scheme: Scheme, shape: tuple[int, ...]) -> Codes:
    rows, columns = shape
    half = np.uint8(1 << (scheme.bits - 1))
    zeros = parts.get("weight_zero_point")
    if zeros is None:
        shifted = np.full((1, 1), half)
    elif zeros.dtype == np.int32:
        shifted = unpack(np.ascontiguousarray(zeros.T), scheme.bits)[:, :rows].T
    else:
        shifted = (_spread(zeros, scheme, shape).astype(np.int16) + half).astype(np.uint8)
    scales = _spread(parts["weight_scale"], scheme, shape)
    groups = _groups(parts.get("weight_g_idx"), scheme, columns, scales.shape[1])
    values = unpack(parts["weight_packed"], scheme.bits)[:, :columns]
    return Codes(values, scales, np.broadcast_to(shifted, scales.shape), groups)


def _plain(parts: Parts, scheme: Scheme, shape: tuple[int, ...]) -> Codes:
    scales = _spread(parts["weight_scale"], scheme, shape)
    zeros = parts.get("weight_zero_point")
    zeros = None if zeros is None else np.broadcast_to(_spread(zeros, scheme, shape), scales.shape)
    return Codes(parts["weight"], scales, zeros, _groups(None, scheme, shape[1], scales.shape[1]))


def _spread(scales: NDArray[Any], scheme: Scheme, shape: tuple[int, ...]) -> NDArray[Any]:
    """Expands scales or zero points of a tensor, of channels, groups or blocks to those of every output, `[F, G]`."""
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (shape[0], 1))
    if scheme.block_rows is not None:
        return np.repeat(scales, scheme.block_rows, axis=0)[: shape[0]]
    return scales.reshape(shape[0], -1)


def _groups(given: NDArray[Any] | None, scheme: Scheme, columns: int, count: int) -> NDArray[Any]:
    adjacent = np.arange(columns) // (scheme.group_size or columns) if count > 1 else np.zeros(columns, np.int64)
    if given is None:
        return adjacent
    if given.min(initial=0) < 0 or given.max(initial=0) >= count:
        raise InvalidFormatError(f"columns are in groups {given.min()} to {given.max()}, there are {count}")
    if scheme.packing == GPTQ and not scheme.is_ordered and not np.array_equal(given, adjacent):
        raise InvalidFormatError("columns of a group do not follow each other, though desc_act is false")
    return given


def native_format(name: str, weight: PackedWeight, entries: Mapping[str, Entry], scheme: Scheme) -> Format:
    """Returns the format of a folder's weight in its native quantisation.

    Raises:
        UnsupportedError: its groups are not runs of adjacent columns, all of one size (an even one for values of four
            bits).
    """
    columns, size = weight.shape[-1], scheme.group_size or weight.shape[-1]
    if scheme.packing == MXFP4:
        return Format(FLOAT4, columns // size, POWERS)
    if scheme.is_ordered or "weight_g_idx" in weight.tensors:
        problem = "its columns were quantised in the order of their activations (desc_act), so that any share a scale"
    elif columns % size:
        problem = f"blocks of {size} do not divide its {columns} inputs"
    elif scheme.bits == 4 and size % 2:
        problem = f"groups of {size} are odd"
    else:
        scales = entries[weight.tensors["scales" if scheme.packing in (GPTQ, AWQ) else "weight_scale"]].dtype
        dtype = "float8_e4m3fn" if scheme.is_float else UINT4 if scheme.bits == 4 else "int8"
        return Format(dtype, columns // size, _DTYPES[scales], None if scheme.is_symmetric else "float32")
    raise UnsupportedError(f"{name} has no native format: {problem}; without quantize='keep' it is dequantised")


def to_leaf(codes: Codes, scheme: Scheme, form: Format) -> QuantisedWeight[np.ndarray]:
    """Returns the quantised leaf of a weight's codes, with the same numbers as `decode`.

    A zero point becomes an offset in float32, which is exact with 16-bit scales.

    Raises:
        InvalidFormatError: zero points are not in the middle, but the configuration says that weights are symmetric.
    """
    assert isinstance(form.scales, str)
    scales = np.array(np.broadcast_to(codes.scales, (len(codes.values), form.groups)), form.scales)
    middle = 0 if scheme.packing == PLAIN else 1 << (scheme.bits - 1)
    if form.offsets is None and codes.zeros is not None and (codes.zeros != middle).any():
        raise InvalidFormatError(
            f"zero points are not all {middle}, though the weights are called symmetric; "
            "quantize='none' dequantises them"
        )
    values, shift = codes.values, 0
    if form.dtype == UINT4:
        values = pack(values, form.groups)
    elif scheme.packing != PLAIN:
        values, shift = (values ^ np.uint8(middle)).view(np.int8), middle
    offsets = None
    if form.offsets is not None:
        assert codes.zeros is not None
        offsets = (np.float32(shift) - codes.zeros.astype(np.float32)) * scales.astype(np.float32)
    return QuantisedWeight(values=values, scales=scales, offsets=offsets)

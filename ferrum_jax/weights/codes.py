"""Quantised matrices out of their packed tensors, on the host.

GPTQ packs adjacent inputs into a word, lowest bits first, and keeps weights `[in, out]`. AWQ packs eight adjacent
outputs, in the order 0 2 4 6 1 3 5 7 (AutoAWQ, `awq/utils/packing_utils.py`). compressed-tensors packs adjacent inputs
of weights `[out, in]`; its integers are shifted by half of their range (`compressors/pack_quantized/helpers.py`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import InvalidFormatError
from ferrum_jax.weights.scheme import AWQ, GPTQ, PLAIN, WORDS, Scheme

WORD = 32  # bits
_AWQ_PLACES = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # output that each number of a word belongs to, lowest bits first

Parts = Mapping[str, NDArray[Any]]


class Codes(NamedTuple):
    """A matrix `[F, D]` whose numbers are `(value - zero) * scale`, with the zero and scale of their row and group."""

    values: NDArray[Any]  # uint8, int8 or float8_e4m3fn [F, D]
    scales: NDArray[Any]  # [F, G], as they are stored
    zeros: NDArray[Any] | None  # uint8 or int8 [F, G]
    group_of: NDArray[Any]  # int [D]: which group each column is in


def read_codes(parts: Parts, scheme: Scheme, shape: tuple[int, ...]) -> Codes:
    """Unpacks the tensors of one weight of `shape`, whose own shapes are as the scheme has them.

    Raises:
        InvalidFormatError: columns are in groups that are not there, or not in those the scheme puts them in.
    """
    return {GPTQ: _gptq, AWQ: _awq, WORDS: _words, PLAIN: _plain}[scheme.packing](parts, scheme, shape)


def decode(codes: Codes) -> NDArray[np.float32]:
    """Gives the numbers in float32, rounded once: with scales of 16 bits they are exact."""
    wide = codes.values.astype(np.float32)
    if codes.zeros is not None:
        wide -= codes.zeros.astype(np.float32)[:, codes.group_of]
    wide *= codes.scales.astype(np.float32)[:, codes.group_of]
    return wide


def unpack(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Splits 32-bit words `[R, C]` into the numbers they hold, lowest bits first: `[R, C * 32 / bits]`."""
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
        shifted = (zeros.reshape(rows, -1).astype(np.int16) + half).astype(np.uint8)
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
    """Gives every output its scales: `[F, G]` of those of a tensor, of channels, of groups or of blocks."""
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (shape[0], 1))
    if scheme.block_rows > 1:
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

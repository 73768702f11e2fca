"""GGUF's quantised tensors as quantised leaves, which stand for the numbers that dequantising gives.

The layouts of blocks are those of ggml's `ggml-common.h`. Values of five and six bits lie in bytes; the scales of a K
block are themselves products, so that they become float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.models.quantisation import Format
from ferrum_jax.ops.quantised import UINT4, QuantisedWeight, pack

Bytes = NDArray[np.uint8]
SUPER = 256  # numbers of a K block


class _Parts(NamedTuple):
    values: NDArray[np.generic]  # [blocks, groups, numbers of a group]
    scales: NDArray[np.floating]  # [blocks, groups]
    offsets: NDArray[np.floating] | None = None


class _Kind(NamedTuple):
    group_size: int
    values: str
    scales: str
    has_offsets: bool
    num_bytes: int  # of a block
    split: Callable[[Bytes], _Parts]


def native_format(kind: str, columns: int) -> Format | None:
    """Format of a matrix of a GGUF type; None where it is not quantised."""
    if kind not in _KINDS:
        return None
    found = _KINDS[kind]
    return Format(found.values, columns // found.group_size, found.scales, found.scales if found.has_offsets else None)


def to_leaf(kind: str, data: Bytes, shape: tuple[int, int]) -> QuantisedWeight[np.ndarray]:
    """The quantised leaf of a matrix `[F, D]`, out of the bytes of its blocks."""
    found = _KINDS[kind]
    parts = found.split(np.ascontiguousarray(data).reshape(-1, found.num_bytes))
    groups = shape[1] // found.group_size
    values = parts.values.reshape(shape)
    return QuantisedWeight(
        values=pack(values.astype(np.uint8, copy=False), groups) if found.values == UINT4 else values.astype(np.int8),
        scales=np.array(parts.scales.reshape(shape[0], groups), found.scales),
        offsets=None if parts.offsets is None else np.array(parts.offsets.reshape(shape[0], groups), found.scales),
    )


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """Reads one half-precision number of each block: `[blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _nibbles(data: Bytes) -> Bytes:
    """Splits bytes `[..., n]` into their low, then their high bits: `[..., 2 n]`."""
    return np.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=-1)


def _fifth(data: Bytes) -> Bytes:
    """Reads 32 bits of each block, in the place where a fifth bit has its value."""
    return np.unpackbits(data, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> _Parts:
    return _Parts(_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> _Parts:
    return _Parts(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> _Parts:
    return _Parts((_nibbles(blocks[:, 6:]) | _fifth(blocks[:, 2:6])).astype(np.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Bytes) -> _Parts:
    return _Parts(_nibbles(blocks[:, 8:]) | _fifth(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> _Parts:
    return _Parts(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _q4_k(blocks: Bytes) -> _Parts:
    scales, offsets = _k_scales(blocks)
    return _Parts(_k_nibbles(blocks[:, 16:]), scales, offsets)


def _q5_k(blocks: Bytes) -> _Parts:
    scales, offsets = _k_scales(blocks)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # [blocks, 8, 32]
    return _Parts(_k_nibbles(blocks[:, 48:]) | high << np.uint8(4), scales, offsets)


def _q6_k(blocks: Bytes) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)  # [blocks, 2, 4, 32]
    scales = _half(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    return _Parts((low | high << np.uint8(4)).astype(np.int8) - 32, scales)


def _k_nibbles(data: Bytes) -> Bytes:
    return _nibbles(data.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _k_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Reads scales and offsets of eight groups out of twelve bytes, six bits each."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return _half(blocks, 0).astype(np.float32) * scales, -_half(blocks, 2).astype(np.float32) * least


_KINDS = {
    "Q4_0": _Kind(32, UINT4, "float16", False, 18, _q4_0),
    "Q4_1": _Kind(32, UINT4, "float16", True, 20, _q4_1),
    "Q5_0": _Kind(32, "int8", "float16", False, 22, _q5_0),
    "Q5_1": _Kind(32, "int8", "float16", True, 24, _q5_1),
    "Q8_0": _Kind(32, "int8", "float16", False, 34, _q8_0),
    "Q4_K": _Kind(32, UINT4, "float32", True, 144, _q4_k),
    "Q5_K": _Kind(32, "int8", "float32", True, 176, _q5_k),
    "Q6_K": _Kind(16, "int8", "float32", False, 210, _q6_k),
}

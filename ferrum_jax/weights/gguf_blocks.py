"""GGUF's quantised tensors as quantised leaves, which stand for the numbers that dequantising gives.

The layouts of blocks are those of ggml's `ggml-common.h`. Values of five and six bits lie in bytes; the scales of a K
block are themselves products, so that they become float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.models.quantisation import Format
from ferrum_jax.ops.quantised import UINT4, QuantisedWeight, pack

Bytes = NDArray[np.uint8]
Parts = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]  # values, and scales and offsets [blocks, groups]


class _Kind(NamedTuple):
    group_size: int
    values: str
    scales: str
    has_offsets: bool
    num_bytes: int  # of a block
    split: Callable[[Bytes], Parts]


def native_format(kind: str, columns: int) -> Format | None:
    """Format of a matrix of a GGUF type; None where it is not quantised."""
    if kind not in _KINDS:
        return None
    found = _KINDS[kind]
    return Format(found.values, columns // found.group_size, found.scales, found.scales if found.has_offsets else None)


def to_leaf(kind: str, data: Bytes, shape: tuple[int, int]) -> QuantisedWeight[np.ndarray]:
    """The quantised leaf of a matrix `[F, D]`, out of the bytes of its blocks."""
    found = _KINDS[kind]
    values, scales, offsets = found.split(np.ascontiguousarray(data).reshape(-1, found.num_bytes))
    values, groups = values.reshape(shape), shape[1] // found.group_size
    return QuantisedWeight(
        values=pack(values.astype(np.uint8, copy=False), groups) if found.values == UINT4 else values.astype(np.int8),
        scales=np.array(scales.reshape(shape[0], groups), found.scales),
        offsets=None if offsets is None else np.array(offsets.reshape(shape[0], groups), found.scales),
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


def _q4_k(blocks: Bytes) -> Parts:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # [blocks, 8, 32]
    return _k_nibbles(blocks[:, 48:]) | high << np.uint8(4), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)  # [blocks, 2, 4, 32]
    scales = _half(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    return (low | high << np.uint8(4)).astype(np.int8) - 32, scales, None


def _k_nibbles(data: Bytes) -> Bytes:
    return _nibbles(data.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _k_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Reads scales and offsets of eight groups out of twelve bytes, six bits each."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return _half(blocks, 0).astype(np.float32) * scales, -_half(blocks, 2).astype(np.float32) * least


def _q5_0(blocks: Bytes) -> Parts:
    return (_nibbles(blocks[:, 6:]) | _fifth(blocks[:, 2:6])).astype(np.int8) - 16, _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 8:]) | _fifth(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


_KINDS = {
    "Q4_0": _Kind(32, UINT4, "float16", False, 18, lambda b: (_nibbles(b[:, 2:]), _half(b, 0), None)),
    "Q4_1": _Kind(32, UINT4, "float16", True, 20, lambda b: (_nibbles(b[:, 4:]), _half(b, 0), _half(b, 2))),
    "Q5_0": _Kind(32, "int8", "float16", False, 22, _q5_0),
    "Q5_1": _Kind(32, "int8", "float16", True, 24, _q5_1),
    "Q8_0": _Kind(32, "int8", "float16", False, 34, lambda b: (b[:, 2:].view(np.int8), _half(b, 0), None)),
    "Q4_K": _Kind(32, UINT4, "float32", True, 144, _q4_k),
    "Q5_K": _Kind(32, "int8", "float32", True, 176, _q5_k),
    "Q6_K": _Kind(16, "int8", "float32", False, 210, _q6_k),
}

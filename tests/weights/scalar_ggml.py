"""GGUF's block formats read one number at a time, from the layouts in ggml's `ggml-common.h`: slow, easy to check."""

import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # numbers of a simple block
SUPER = 256  # numbers of a K block


def _half(data: bytes, at: int) -> float:
    return struct.unpack_from("<e", data, at)[0]


def _q8_0(block: bytes) -> list[float]:
    return [_half(block, 0) * q for q in struct.unpack_from("<32b", block, 2)]


def _q4_0(block: bytes) -> list[float]:
    return [_half(block, 0) * (q - 8) for q in _nibbles(block[2:18])]


def _q4_1(block: bytes) -> list[float]:
    return [_half(block, 0) * q + _half(block, 2) for q in _nibbles(block[4:20])]


def _q5_0(block: bytes) -> list[float]:
    fifth = struct.unpack_from("<I", block, 2)[0]
    return [_half(block, 0) * ((q | (fifth >> i & 1) << 4) - 16) for i, q in enumerate(_nibbles(block[6:22]))]


def _q5_1(block: bytes) -> list[float]:
    fifth = struct.unpack_from("<I", block, 4)[0]
    return [
        _half(block, 0) * (q | (fifth >> i & 1) << 4) + _half(block, 2) for i, q in enumerate(_nibbles(block[8:24]))
    ]


def _q4_k(block: bytes) -> list[float]:
    return _k_block(block, bytes(32), block[16:144])


def _q5_k(block: bytes) -> list[float]:
    return _k_block(block, block[16:48], block[48:176])


def _q6_k(block: bytes) -> list[float]:
    scales, scale = struct.unpack_from("<16b", block, 192), _half(block, 208)
    numbers = []
    for half in (0, 1):
        low, high = block[64 * half : 64 * half + 64], block[128 + 32 * half : 160 + 32 * half]
        for part in range(4):
            for i in range(32):
                q = low[i + 32 * (part % 2)] >> (4 if part > 1 else 0) & 15 | (high[i] >> 2 * part & 3) << 4
                numbers.append(scale * scales[8 * half + 2 * part + i // 16] * (q - 32))
    return numbers


def _q2_k(block: bytes) -> list[float]:
    numbers = []
    for at in range(SUPER):
        group, half, part = at // 16, at // 128, at % 128 // 32
        q = block[16 + 32 * half + at % 32] >> 2 * part & 3
        numbers.append(_half(block, 80) * (block[group] & 15) * q - _half(block, 82) * (block[group] >> 4))
    return numbers


def _q3_k(block: bytes) -> list[float]:
    packed, numbers = block[96:108], []
    for at in range(SUPER):
        group, half, part = at // 16, at // 128, at % 128 // 32
        low = packed[group % 8] >> (4 if group >= 8 else 0) & 15
        scale = (low | (packed[8 + group % 4] >> 2 * (group // 4) & 3) << 4) - 32
        q = block[32 + 32 * half + at % 32] >> 2 * part & 3
        if not block[at % 32] >> (at // 32) & 1:
            q -= 4
        numbers.append(_half(block, 108) * scale * q)
    return numbers


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # `kvalues_iq4nl`


def _iq4_nl(block: bytes) -> list[float]:
    return [_half(block, 0) * _IQ4[q] for q in _nibbles(block[2:18])]


def _iq4_xs(block: bytes) -> list[float]:
    high, numbers = struct.unpack_from("<H", block, 2)[0], []
    for group in range(8):
        scale = (block[4 + group // 2] >> 4 * (group % 2) & 15 | (high >> 2 * group & 3) << 4) - 32
        numbers += [_half(block, 0) * scale * _IQ4[q] for q in _nibbles(block[8 + 16 * group : 24 + 16 * group])]
    return numbers


def _mxfp4(block: bytes) -> list[float]:
    sizes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    return [2.0 ** (block[0] - 127) * (-sizes[q - 8] if q > 7 else sizes[q]) for q in _nibbles(block[1:17])]


def _nibbles(data: bytes) -> list[int]:
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def _k_block(block: bytes, fifth: bytes, low: bytes) -> list[float]:
    packed = block[4:16]
    numbers = []
    for group in range(8):
        if group < 4:
            scale, least = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            least = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        for i in range(32):
            q = low[32 * (group // 2) + i] >> 4 * (group % 2) & 15 | (fifth[i] >> group & 1) << 4
            numbers.append(_half(block, 0) * scale * q - _half(block, 2) * least)
    return numbers


# name: numbers and bytes of a block, where its half-precision numbers lie, how to read it
FORMATS: dict[str, tuple[int, int, tuple[int, ...], Callable[[bytes], list[float]]]] = {
    "Q8_0": (BLOCK, 34, (0,), _q8_0),
    "Q4_0": (BLOCK, 18, (0,), _q4_0),
    "Q4_1": (BLOCK, 20, (0, 2), _q4_1),
    "Q5_0": (BLOCK, 22, (0,), _q5_0),
    "Q5_1": (BLOCK, 24, (0, 2), _q5_1),
    "Q2_K": (SUPER, 84, (80, 82), _q2_k),
    "Q3_K": (SUPER, 110, (108,), _q3_k),
    "Q4_K": (SUPER, 144, (0, 2), _q4_k),
    "Q5_K": (SUPER, 176, (0, 2), _q5_k),
    "Q6_K": (SUPER, 210, (208,), _q6_k),
    "IQ4_NL": (BLOCK, 18, (0,), _iq4_nl),
    "IQ4_XS": (SUPER, 136, (0,), _iq4_xs),
    "MXFP4": (BLOCK, 17, (), _mxfp4),
}


def draw_blocks(kind: str, shape: tuple[int, int], seed: int) -> NDArray[np.uint8]:
    """Draws the bytes of a quantised tensor of `shape`: everything is random, the half-precision numbers are small."""
    size, num_bytes, halves, _ = FORMATS[kind]
    draw = np.random.RandomState(seed)
    blocks = draw.randint(256, size=(shape[0] * shape[1] // size, num_bytes)).astype(np.uint8)
    for at in halves:
        values = draw.uniform(-0.01, 0.01, size=len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = values[:, None].view(np.uint8)
    if kind == "MXFP4":  # its scale is a power of two
        blocks[:, 0] = draw.randint(118, 123, size=len(blocks))
    return blocks.reshape(shape[0], -1)


def read_blocks(kind: str, data: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Reads what `draw_blocks` gives."""
    _, num_bytes, _, read = FORMATS[kind]
    numbers = [number for block in data.reshape(-1, num_bytes) for number in read(block.tobytes())]
    return np.array(numbers, np.float32).reshape(shape)

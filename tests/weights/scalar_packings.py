"""Quantised Hugging Face formats, packed and read one number at a time: slow, easy to check.

GPTQ: Frantar et al. 2022 and AutoGPTQ's `qlinear`; AWQ: Lin et al. 2023 and AutoAWQ's `packing_utils.py`;
compressed-tensors: vLLM's documentation and `pack_quantized/helpers.py`; blocks of fp8: DeepSeek-V3 report, 3.3.2.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Parts = dict[str, NDArray[Any]]
Matrix = NDArray[np.float32]
GROUP = 8  # adjacent inputs
BLOCK = 16  # outputs and inputs
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NAMES = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "bfloat16": "BF16", "float16": "F16",
          "float32": "F32", "int32": "I32", "int64": "I64", "int8": "I8"}  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """One way to keep a matrix, and what the configuration says of it."""

    config: dict[str, Any]  # the `quantization_config`
    pack: Callable[[Matrix], Parts]
    read: Callable[[Parts], Matrix]
    error: float  # of a weight drawn from a normal distribution: relative root mean square, rounded up


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Writes a safetensors file, of dtypes as well that its own package does not write from NumPy."""
    header, start = {}, 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _codes(weight: Matrix, bits: int, size: int, symmetric: bool, scale: Any = np.float16) -> tuple[Any, Any, Any]:
    """Rounds to nearest: integers from 0 up `[F, D]`, scales `[F, G]` and zero points `[F, G]`."""
    top = 2**bits - 1
    groups = weight.reshape(len(weight), -1, size).astype(np.float64)
    low, high = groups.min(-1).clip(max=0), groups.max(-1).clip(min=0)
    if symmetric:
        scales = (np.abs(groups).max(-1) / (top // 2)).astype(scale)
        zeros = np.full(scales.shape, top // 2 + 1)
    else:
        scales = ((high - low) / top).astype(scale)
        zeros = np.rint(-low / scales.astype(np.float64)).clip(0, top).astype(int)
    steps = np.rint(groups / scales.astype(np.float64)[..., None]) + zeros[..., None]
    return steps.clip(0, top).astype(int).reshape(weight.shape), scales, zeros


def _words(numbers: NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Packs the last axis into words, lowest bits first."""
    per = 32 // bits
    rows = []
    for line in numbers:
        row = []
        for start in range(0, len(line), per):
            word = 0
            for i, place in enumerate(order or range(per)):
                if start + place < len(line):
                    word |= int(line[start + place]) << (bits * i)
            row.append(word - 2**32 if word >= 2**31 else word)
        rows.append(row)
    return np.array(rows, np.int32)


def _gptq(bits: int, symmetric: bool, ordered: bool, version: str, size: int = GROUP) -> Packing:
    def order(columns: int) -> NDArray[np.int32]:
        groups = np.arange(columns) // (columns if size == -1 else size)
        return np.random.RandomState(columns).permutation(groups).astype(np.int32) if ordered else groups.astype("i4")

    def pack(weight: Matrix) -> Parts:
        columns = weight.shape[1]
        g_idx, width = order(columns), columns if size == -1 else size
        by_group = np.argsort(g_idx, kind="stable")
        sorted_codes, scales, zeros = _codes(weight[:, by_group], bits, width, symmetric)
        codes = np.empty_like(sorted_codes)
        codes[:, by_group] = sorted_codes
        stored = (zeros - (version == "gptq")) % 2**bits
        return {
            "qweight": np.ascontiguousarray(_words(codes, bits).T),
            "qzeros": _words(stored.T, bits),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": g_idx,
        }

    def read(parts: Parts) -> Matrix:
        mask, per = 2**bits - 1, 32 // bits
        rows, columns = parts["scales"].shape[1], len(parts["g_idx"])
        found = np.empty((rows, columns), np.float32)
        for out in range(rows):
            for at in range(columns):
                group = int(parts["g_idx"][at])
                code = int(parts["qweight"][at // per, out]) >> bits * (at % per) & mask
                zero = int(parts["qzeros"][group, out // per]) >> bits * (out % per) & mask
                zero = (zero + (1 if version == "gptq" else 0)) & mask
                found[out, at] = float(parts["scales"][group, out]) * (code - zero)
        return found

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": ordered,
              "checkpoint_format": version, "damp_percent": 0.01, "true_sequential": True}  # fmt: skip
    return Packing(config, pack, read, 0.12 if bits == 4 else 0.008)


def _pack_awq(weight: Matrix) -> Parts:
    codes, scales, zeros = _codes(weight, 4, GROUP, symmetric=False)
    return {
        "qweight": _words(codes.T, 4, AWQ_ORDER),
        "qzeros": _words(zeros.T, 4, AWQ_ORDER),
        "scales": np.ascontiguousarray(scales.T),
    }


def _read_awq(parts: Parts) -> Matrix:
    columns, rows = len(parts["qweight"]), parts["scales"].shape[1]
    found = np.empty((rows, columns), np.float32)
    for out in range(rows):
        shift = 4 * AWQ_ORDER.index(out % 8)
        for at in range(columns):
            group = at // GROUP
            code = int(parts["qweight"][at, out // 8]) >> shift & 15
            zero = int(parts["qzeros"][group, out // 8]) >> shift & 15
            found[out, at] = float(parts["scales"][group, out]) * (code - zero)
    return found


def _compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None}  # fmt: skip


def _integers(bits: int, symmetric: bool, size: int | None, scale: Any, *, packed: bool = True) -> Packing:
    half = 2 ** (bits - 1)

    def pack(weight: Matrix) -> Parts:
        codes, scales, zeros = _codes(weight, bits, size or weight.shape[1], symmetric, scale)
        if not packed:
            parts: Parts = {"weight": (codes - half).astype(np.int8), "weight_scale": scales}
            return parts if symmetric else parts | {"weight_zero_point": (zeros - half).astype(np.int8)}
        parts = {
            "weight_packed": _words(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        return parts if symmetric else parts | {"weight_zero_point": np.ascontiguousarray(_words(zeros.T, bits).T)}

    def read(parts: Parts) -> Matrix:
        mask, per, scales, points = 2**bits - 1, 32 // bits, parts["weight_scale"], parts.get("weight_zero_point")
        rows, columns = parts["weight_shape"].tolist() if packed else parts["weight"].shape
        found = np.empty((rows, columns), np.float32)
        for out in range(rows):
            for at in range(columns):
                group = at // (columns // scales.shape[1])
                zero = 0
                if packed:
                    code = (int(parts["weight_packed"][out, at // per]) >> bits * (at % per) & mask) - half
                    if points is not None:
                        zero = (int(points[out // per, group]) >> bits * (out % per) & mask) - half
                else:
                    code = int(parts["weight"][out, at])
                    zero = 0 if points is None else int(points[out, group])
                found[out, at] = float(scales[out, group]) * (code - zero)
        return found

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": size, "dynamic": False,
               "strategy": "group" if size else "channel"}  # fmt: skip
    wide = size is None
    error = (0.18 if wide else 0.13) if bits == 4 else 0.011
    return Packing(_compressed("pack-quantized" if packed else "int-quantized", weights), pack, read, error)


def fp8(byte: int) -> float:
    """Reads a byte as e4m3fn: Micikevicius et al. 2022, table 1."""
    sign, exponent, fraction = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def _floats(config: dict[str, Any], name: str, scale_shape: Callable[[int, int], tuple[int, ...]]) -> Packing:
    def tile(parts_shape: tuple[int, ...], shape: tuple[int, int]) -> tuple[int, int]:
        return (
            (BLOCK, BLOCK) if name == "weight_scale_inv" else (shape[0] if np.prod(parts_shape) == 1 else 1, shape[1])
        )

    def pack(weight: Matrix) -> Parts:
        scales = np.empty(scale_shape(*weight.shape), np.float32)
        height, width = tile(scales.shape, weight.shape)
        divided, flat = weight.copy(), scales.reshape(-1)
        places = [(r, c) for r in range(0, weight.shape[0], height) for c in range(0, weight.shape[1], width)]
        for index, (r, c) in enumerate(places):
            flat[index] = np.abs(weight[r : r + height, c : c + width]).max() / 448
            divided[r : r + height, c : c + width] /= flat[index]
        return {"weight": divided.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn), name: scales}

    def read(parts: Parts) -> Matrix:
        values, scales = parts["weight"].view(np.uint8), parts[name]
        height, width = tile(scales.shape, values.shape)
        found = np.empty(values.shape, np.float32)
        for out in range(values.shape[0]):
            for at in range(values.shape[1]):
                index = out // height * -(-values.shape[1] // width) + at // width
                found[out, at] = fp8(int(values[out, at])) * float(scales.reshape(-1)[index])
        return found

    return Packing(config, pack, read, 0.03)


_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
PACKINGS: dict[str, Packing] = {
    "gptq": _gptq(4, symmetric=True, ordered=False, version="gptq"),
    "gptq_ordered": _gptq(4, symmetric=False, ordered=True, version="gptq"),
    "gptq_ordered_v2": _gptq(4, symmetric=True, ordered=True, version="gptq_v2"),
    "gptq_v2": _gptq(4, symmetric=False, ordered=False, version="gptq_v2"),
    "gptq_channel": _gptq(4, symmetric=False, ordered=False, version="gptq", size=-1),
    "gptq_8": _gptq(8, symmetric=False, ordered=False, version="gptq"),
    "awq": Packing({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
                    "modules_to_not_convert": None}, _pack_awq, _read_awq, 0.12),
    "words": _integers(4, symmetric=True, size=GROUP, scale=ml_dtypes.bfloat16),
    "words_zeros": _integers(4, symmetric=False, size=GROUP, scale=np.float16),
    "words_channel": _integers(4, symmetric=True, size=None, scale=np.float32),
    "words_8": _integers(8, symmetric=True, size=GROUP, scale=ml_dtypes.bfloat16),
    "int8": _integers(8, symmetric=True, size=None, scale=ml_dtypes.bfloat16, packed=False),
    "int8_zeros": _integers(8, symmetric=False, size=None, scale=np.float32, packed=False),
    "float_channel": _floats(_compressed("float-quantized", _E4M3 | {"strategy": "channel"}), "weight_scale",
                             lambda rows, _: (rows, 1)),
    "float_tensor": _floats(_compressed("float-quantized", _E4M3 | {"strategy": "tensor"}), "weight_scale",
                            lambda *_: (1,)),
    "fp8_blocks": _floats(_BLOCKS | {"weight_block_size": [BLOCK, BLOCK]}, "weight_scale_inv",
                          lambda rows, columns: (-(-rows // BLOCK), -(-columns // BLOCK))),
    "fp8_tensor": _floats(_BLOCKS, "weight_scale", lambda *_: ()),
    "fbgemm": _floats({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "weight_scale",
                      lambda rows, _: (rows, 1)),
}  # fmt: skip

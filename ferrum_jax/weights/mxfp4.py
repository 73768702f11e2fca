"""Stacks of matrices in MXFP4: values of four bits, two in a byte, and a power of two for each 32 of them.

OCP Microscaling Formats (MX) Specification v1.0: E2M1 in section 5.3.3, E8M0 in section 5.4.1. GPT-OSS has the experts'
products so, `[E, out, in]`; the first number of a pair is in the low bits. Every number is one of bfloat16, too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import InvalidFormatError
from ferrum_jax.weights.assemble import check_problems
from ferrum_jax.weights.packed import PackedWeight
from ferrum_jax.weights.safetensors_file import Entry

GROUP = 32  # adjacent inputs that share a scale
BLOCKS, SCALES = "blocks", "scales"
_LARGEST = 252  # of scales: with larger ones, of which 255 is NaN, not every number is finite in float32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1)  # [256, 2]: what each byte holds


def find_stacks(path: Path, entries: Mapping[str, Entry]) -> dict[str, PackedWeight]:
    """Finds every stack by its name: `X` has the tensors `X_blocks` `[E, F, G, 16]` and `X_scales` `[E, F, G]`.

    Raises:
        InvalidFormatError: tensors are missing, or of a wrong dtype or shape: all of them in one message; or there is
            no stack.
    """
    found, problems = {}, []
    names = {
        name.removesuffix(f"_{part}") for name in entries for part in (BLOCKS, SCALES) if name.endswith(f"_{part}")
    }
    for name in sorted(names):
        tensors = {part: f"{name}_{part}" for part in (BLOCKS, SCALES)}
        missing = [f"{tensor} is missing" for tensor in tensors.values() if tensor not in entries]
        if missing:
            problems += missing
            continue
        problems += [
            f"{tensor} is {entries[tensor].dtype}, expected U8"
            for tensor in tensors.values()
            if entries[tensor].dtype != "U8"
        ]
        shape, scales = entries[tensors[BLOCKS]].shape, entries[tensors[SCALES]].shape
        if len(shape) != 4 or shape[-1] != GROUP // 2:
            problems.append(f"{tensors[BLOCKS]} has shape {list(shape)}, expected experts, outputs, groups and 16")
        elif scales != shape[:-1]:
            problems.append(f"{tensors[SCALES]} has shape {list(scales)}, expected {list(shape[:-1])}")
        else:
            found[name] = PackedWeight((*shape[:2], shape[2] * GROUP), tensors)
    check_problems(path, problems)
    if not found:
        raise InvalidFormatError(f"{path}: quantization_config says mxfp4, but no tensor's name ends in '_{BLOCKS}'")
    return found


def widen(parts: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """The numbers `[E, F, D]` of a stack, exactly, in bfloat16.

    Raises:
        InvalidFormatError: a scale is NaN, or so large that numbers may not be finite in float32.
    """
    blocks, scales = parts[BLOCKS], parts[SCALES]
    if (largest := scales.max(initial=0)) > _LARGEST:
        raise InvalidFormatError(f"a scale is {largest}, at most {_LARGEST} has finite numbers")
    experts, outputs, groups, _ = blocks.shape
    found = np.empty((experts, outputs, groups * GROUP), ml_dtypes.bfloat16)
    for own, bytes_, powers in zip(found, blocks, scales, strict=True):  # in float32 for one expert at a time
        wide = _PAIRS[bytes_].reshape(outputs, groups, GROUP)
        own[:] = np.ldexp(wide, powers.astype(np.int32)[..., None] - 127).reshape(outputs, -1)
    return found

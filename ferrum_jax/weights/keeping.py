"""Weights of quantised Hugging Face folders as quantised leaves, with the numbers that `decode` gives for them.

A zero point becomes an offset in float32, which with scales of 16 bits loses nothing.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import InvalidFormatError, UnsupportedError
from ferrum_jax.models.quantisation import Format
from ferrum_jax.ops.quantised import UINT4, QuantisedWeight, pack
from ferrum_jax.weights.codes import Codes
from ferrum_jax.weights.packed import PackedWeight
from ferrum_jax.weights.safetensors_file import Entry
from ferrum_jax.weights.scheme import AWQ, GPTQ, MXFP4, PLAIN, Scheme

_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F8_E8M0": "float32"}  # of scales


def choose_format(name: str, weight: PackedWeight, entries: Mapping[str, Entry], scheme: Scheme) -> Format:
    """Says how a weight of a folder is kept.

    Raises:
        UnsupportedError: its groups are not runs of columns of one even length, or its values are floats of four bits.
    """
    columns, size = weight.shape[-1], scheme.group_size or weight.shape[-1]
    if scheme.packing == MXFP4:
        problem = "its values are floats of four bits"
    elif scheme.is_ordered or "weight_g_idx" in weight.tensors:
        problem = "its columns were quantised in the order of their activations (desc_act), so that any share a scale"
    elif columns % size:
        problem = f"blocks of {size} do not divide its {columns} inputs"
    elif scheme.bits == 4 and size % 2:
        problem = f"groups of {size} are odd"
    else:
        scales = entries[weight.tensors["scales" if scheme.packing in (GPTQ, AWQ) else "weight_scale"]].dtype
        dtype = "float8_e4m3fn" if scheme.is_float else UINT4 if scheme.bits == 4 else "int8"
        return Format(dtype, columns // size, _DTYPES[scales], None if scheme.is_symmetric else "float32")
    raise UnsupportedError(f"{name} cannot be kept as it is: {problem}; without quantize='keep' it is dequantised")


def keep(codes: Codes, scheme: Scheme, form: Format) -> QuantisedWeight[np.ndarray]:
    """Makes the leaf of a weight's codes.

    Raises:
        InvalidFormatError: zero points are not the middle, though the configuration calls the weights symmetric.
    """
    scales = np.array(np.broadcast_to(codes.scales, (len(codes.values), form.groups)), form.scales)
    middle = 0 if scheme.packing == PLAIN else 1 << (scheme.bits - 1)
    if form.offsets is None and codes.zeros is not None and (codes.zeros != middle).any():
        raise InvalidFormatError(f"zero points are not all {middle}, though the weights are called symmetric")
    values, shift = codes.values, 0
    if form.dtype == UINT4:
        values = pack(values, form.groups)
    elif scheme.packing != PLAIN:
        values, shift = (values ^ np.uint8(middle)).view(np.int8), middle
    return QuantisedWeight(values=values, scales=scales, offsets=_offsets(codes, scales, shift, form))


def _offsets(codes: Codes, scales: NDArray[np.generic], shift: int, form: Format) -> NDArray[np.float32] | None:
    if form.offsets is None:
        return None
    assert codes.zeros is not None
    return (np.float32(shift) - codes.zeros.astype(np.float32)) * scales.astype(np.float32)

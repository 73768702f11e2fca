"""Kernels for CPUs, which compiled steps call through XLA's foreign function interface.

They multiply with weights in float32, 16, 8 and 4 bits (with NEON only few tokens), attend over the paged KV, choose
tokens, find the likeliest ones, and sum exponentials for log-probabilities. All arithmetic is float32. A row's result
does not depend on the other rows: the order of a product's sums is fixed, with two exceptions. A quantised weight has
another order for few rows (four, or eight of at least 1,024 inputs; of experts 256 choices), and any weight but an
expert's for more than 64. The library has a copy of the kernels for each instruction set and chooses one when it is
loaded. It is built when the package is installed on Linux, if there is a C++ compiler (build.py). If it is missing, or
has no kernel for a size or type, XLA's own code is used.

Kernels have neither gradients nor batching rules: steps use them, research functions do not.
"""

import ctypes
import functools
import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ferrum_jax.ops.kernel_use import are_used
from ferrum_jax.ops.native.build import LIBRARY, PROBLEM, digest_sources, unsupported
from ferrum_jax.ops.quantised import (
    FLOAT4,
    LARGEST,
    PACKED,
    UINT5,
    UINT6,
    UINTS,
    QuantisedWeight,
    is_packed,
    values_dtype,
)
from ferrum_jax.sharding.types import vary_like

MOST_ROWS = 8192  # of one product, as in handlers.cpp
FEW_ROWS = 64  # of a product with NEON; for more rows it was not measured against XLA's products
MOST_INPUTS = 32_768  # of a quantised product, as in kernels.h
MOST_WIDTH = 640  # of a head, as in kernels.h
PART = 1 << 14  # numbers of a row whose exponentials are summed together, as in handlers.cpp
MOST_BEST = 64  # largest numbers of a row that `best` finds: it inserts each into a sorted list
RUNS = 8, 16  # scales that share one of their own, as in handlers.cpp
SPAN = 256  # positions that are computed together for a row of one token
TARGETS = "ferrum_linear", "ferrum_widen", "ferrum_experts", "ferrum_attend", "ferrum_write", "ferrum_choose"
TARGETS += "ferrum_logsumexp", "ferrum_best"
FLOATS = "float32", "bfloat16", "float16"


@functools.cache
def library() -> ctypes.CDLL | str:
    """Loads the library and registers its targets, once; returns the reason if it cannot."""
    if problem := unsupported():
        return problem
    if not LIBRARY.exists():
        why = PROBLEM.read_text(encoding="utf-8") if PROBLEM.exists() else "that takes a C++ compiler"
        return f"they were not built when the package was installed: {why}"
    try:
        return register(LIBRARY)
    except (OSError, AttributeError, jax.errors.JaxRuntimeError) as problem:
        return f"{LIBRARY.name} cannot be used: {problem}"


def register(path: Path) -> ctypes.CDLL | str:
    """Registers the targets of a library; returns the reason if it cannot be used here."""
    found = ctypes.CDLL(str(path))
    found.ferrum_sources.restype = found.ferrum_instruction_set.restype = ctypes.c_char_p
    if found.ferrum_sources().decode() != digest_sources():
        return "they were built from other sources: install the package again"
    if found.ferrum_instruction_set() is None:
        return "this processor has none of the instruction sets they are built for"
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(found, name)), platform="cpu")
    return found


def instruction_set() -> str | None:
    """Returns the instruction set that the kernels use here, such as `avx2`; None if there are no kernels."""
    found = library()
    return None if isinstance(found, str) else found.ferrum_instruction_set().decode()


@functools.cache
def digest() -> str | None:
    """Returns a digest of the library in use, for the key of programs on disk; None if there is no library."""
    return None if instruction_set() is None else hashlib.sha256(LIBRARY.read_bytes()).hexdigest()


def reads(values: str, inputs: int) -> bool:
    """Whether there is a kernel for weights with this many inputs whose values have this type (`values_dtype`)."""
    return values in FLOATS or (values in (*LARGEST, *PACKED) and inputs <= MOST_INPUTS)


def can_multiply(x: jax.Array, weight: jax.Array | QuantisedWeight, most_rows: int | None = None) -> bool:
    """Whether there is a kernel for `x @ weight.T`, or for a stack of weights, and it is in use."""
    if not are_used("cpu") or x.dtype != jnp.float32 or not has_kernel(weight):
        return False
    if most_rows is None:
        most_rows = FEW_ROWS if instruction_set() == "neon" else MOST_ROWS
    return 1 <= x.shape[0] <= most_rows


def has_kernel(weight: jax.Array | QuantisedWeight) -> bool:
    """Whether the kernels read weights of this kind and size."""
    if 0 in weight.shape:
        return False
    if not isinstance(weight, QuantisedWeight):
        return weight.dtype.name in FLOATS
    if weight.scales is None:
        return weight.values.dtype.name in FLOATS
    values, columns, groups = values_dtype(weight), weight.shape[-1], weight.scales.shape[-1]
    return (
        _has_kernel_for_scales(values, weight.scales, weight.offsets)
        and values in (*LARGEST, *PACKED)
        and columns <= MOST_INPUTS
        and columns // groups % (8 if weight.high is not None else 2 if is_packed(weight) else 1) == 0
    )


def _has_kernel_for_scales(values: str, scales: Any, offsets: Any) -> bool:
    if values == FLOAT4:
        return offsets is None
    if not isinstance(scales, QuantisedWeight):
        if isinstance(offsets, QuantisedWeight):
            return False
        if values in (UINT5, UINT6):
            return {part.dtype for part in (scales, offsets) if part is not None} == {jnp.dtype(jnp.float16)}
        return scales.dtype.name in FLOATS and (offsets is None or offsets.dtype in (scales.dtype, jnp.float32))
    parts = [part for part in (scales, offsets) if part is not None]
    return (
        values in ("int8", *UINTS)
        and all(map(_counts_units, parts))
        and scales.shape[-1] in [run * scales.scales.shape[-1] for run in RUNS]
        and all(part.scales.shape == scales.scales.shape for part in parts)
    )


def _counts_units(part: Any) -> bool:
    if not isinstance(part, QuantisedWeight) or part.offsets is not None or part.high is not None:
        return False
    return part.values.dtype == jnp.int8 and getattr(part.scales, "dtype", None) == jnp.float16


def product(x: jax.Array, weight: jax.Array | QuantisedWeight, layer: jax.Array | None = None) -> jax.Array:
    """Computes `x @ weight.T`, `[X, K]` and `[N, K]` to float32 `[X, N]`.

    With `layer`, an int32 scalar, `weight` is a stack `[L, N, K]`, and only this layer's weight is read.
    """
    found = jax.ShapeDtypeStruct((x.shape[0], weight.shape[-2]), jnp.float32)
    own = jnp.zeros(1, jnp.int32) if layer is None else jnp.reshape(layer, 1)
    return vary_like(jax.ffi.ffi_call("ferrum_linear", found)(x, own, *jax.tree.leaves(weight)), x, weight)


def can_widen(x: jax.Array, weight: QuantisedWeight) -> bool:
    """Whether a kernel dequantises a weight for a product of many tokens, which XLA's code computes."""
    return are_used("cpu") and x.dtype == jnp.float32 and len(weight.shape) == 2 and has_kernel(weight)


def widen(weight: QuantisedWeight, x: jax.Array) -> jax.Array:
    """Dequantises a weight to float32 `[N, K]`, each number rounded once.

    The kernel does not read x: as an operand it only delays the call until x is computed. Without it, all weights would
    be dequantised first.
    """
    found = jax.ShapeDtypeStruct(weight.shape, jnp.float32)
    return vary_like(jax.ffi.ffi_call("ferrum_widen", found)(x, *jax.tree.leaves(weight)), weight)


def expert_product(x: jax.Array, ids: jax.Array, stack: jax.Array | QuantisedWeight) -> jax.Array:
    """Multiplies row i of x `[A, K]` by the weight `ids[i]` of a stack `[E, N, K]`: float32 `[A, N]`.

    Rows whose id is not in the stack are zeros. Only weights that a row needs are read, each once.
    """
    found = jax.ShapeDtypeStruct((x.shape[0], stack.shape[1]), jnp.float32)
    return vary_like(jax.ffi.ffi_call("ferrum_experts", found)(x, ids, *jax.tree.leaves(stack)), x, ids, stack)


def logsumexp(x: jax.Array) -> jax.Array:
    """Computes the logarithm of each row's sum of exponentials, float32 `[R, V]` to `[R]`."""
    rows, size = x.shape
    found = jax.ShapeDtypeStruct((rows,), jnp.float32)
    parts = jax.ShapeDtypeStruct((rows, -(-size // PART), 2), jnp.float32)
    return vary_like(jax.ffi.ffi_call("ferrum_logsumexp", (found, parts))(x)[0], x)


def best(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Finds the `count` largest numbers of each row of float32 `[R, V]`, descending, and their columns: `[R, count]`.

    Equal numbers keep their order, and NaN is above all numbers.
    """
    shape = x.shape[0], count
    found = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)
    values, ids = jax.ffi.ffi_call("ferrum_best", found)(x)
    return vary_like((values, ids), x)


def choose(
    scores: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Chooses a token for each row of float32 scores `[R, V]` as `ops.sampling.choose`: ids and thresholds `[R]`."""
    rows = scores.shape[0]
    found = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)
    options = temperature, top_k, top_p, min_p, seed, position
    ids, thresholds = jax.ffi.ffi_call("ferrum_choose", found)(scores, *options)
    return vary_like((ids, thresholds), scores, *options)

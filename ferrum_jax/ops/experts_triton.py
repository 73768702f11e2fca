"""Products of tiles of tokens, each with the weights of one expert, as one GPU kernel.

A tile is some rows of one expert. A program multiplies it by the weights of some of the expert's outputs, which it
reads in the stack: no weights are gathered or copied. Programs for the same outputs follow each other over all tiles,
so that tiles of one expert find its weights in the cache. Such tiles are those of Gale et al. 2022, "MegaBlocks",
section 5.1. The kernel is written in Pallas and compiled by Triton, as attention_triton.py; on a CPU it runs
interpreted.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from ferrum_jax.ops.kernel_use import are_used
from ferrum_jax.ops.triton_launch import PROGRAMS, SMALLEST_PART, launch

LEAST_ROWS, MOST_ROWS = SMALLEST_PART, 128  # of a tile
INPUTS = 64  # inputs that are multiplied at a time
MOST_OUTPUTS, LEAST_OUTPUTS = 128, 32  # of a program
SHARED = 96 << 10  # bytes of operands being loaded, of the 99 KB of shared memory on the smallest GPUs
MOST_STAGES = 6  # of the pipeline


@dataclass(frozen=True)
class TiledWeight:
    """A stack of experts' weights `[E, F, D]`, with the expert of each tile of rows."""

    stack: jax.Array
    experts: jax.Array  # int32 [tiles]; -1: the tile has no expert here


def can_multiply(x: jax.Array, stack: Any) -> bool:
    """Whether the kernel is used for a stack of weights, which must be plain, with the 16-bit dtype of x."""
    return are_used("triton") and isinstance(stack, jax.Array) and stack.dtype == x.dtype and x.dtype.itemsize == 2


def product(x: Float[Array, "X D"], weight: TiledWeight) -> Float[Array, "X F"]:
    """Computes `x @ weight.T` for each tile of `X / tiles` rows, summed in float32; zeros for one without expert."""
    return launch(_call, x, weight.experts, weight.stack)


@functools.partial(jax.jit, static_argnames="interpret")
def _call(
    x: Float[Array, "X D"], experts: Int[Array, " tiles"], stack: Float[Array, "E F D"], *, interpret: bool
) -> Float[Array, "X F"]:
    """Launches the kernel. A jit of its own, so that the layers of a step share one lowering."""
    tiles, outputs = len(experts), stack.shape[1]
    rows, some = len(x) // tiles, MOST_OUTPUTS
    while some > LEAST_OUTPUTS and tiles * pl.cdiv(outputs, some) < PROGRAMS // 2:
        some //= 2
    stages = min(MOST_STAGES, SHARED // ((rows + some) * INPUTS * x.dtype.itemsize))
    return pl.pallas_call(
        functools.partial(_kernel, rows=rows, some=some),
        grid=(tiles, pl.cdiv(outputs, some)),
        out_shape=jax.ShapeDtypeStruct((len(x), outputs), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=8 if rows * some > 1 << 13 else 4, num_stages=stages),
        interpret=interpret,
        name="multiply_experts",
    )(x, experts, stack)


def _kernel(
    x_ref: Any,  # [X, D]
    experts_ref: Any,  # [tiles]
    stack_ref: Any,  # [E, F, D]
    y_ref: Any,  # [X, F]
    *,
    rows: int,
    some: int,  # outputs
):
    """Multiplies one tile by some outputs of its expert."""
    (_, outputs, inputs), expert = stack_ref.shape, experts_ref[pl.program_id(0)]
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    output = pl.program_id(1) * some + jnp.arange(some, dtype=jnp.int32)
    there = output < outputs

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        column = index * INPUTS + jnp.arange(INPUTS, dtype=jnp.int32)
        inside = None if inputs % INPUTS == 0 else (column < inputs)[None, :]
        x = triton.load(x_ref.at[row[:, None], column[None, :]], mask=inside, other=None if inside is None else 0)
        both = there[:, None] if inside is None else there[:, None] & inside
        weight = triton.load(stack_ref.at[expert, output[:, None], column[None, :]], mask=both, other=0)
        return total + jnp.dot(x, weight.T, preferred_element_type=jnp.float32)

    steps = jnp.where(expert >= 0, jnp.int32(pl.cdiv(inputs, INPUTS)), jnp.int32(0))
    total = lax.fori_loop(jnp.int32(0), steps, add, jnp.zeros((rows, some), jnp.float32))
    triton.store(y_ref.at[row[:, None], output[None, :]], total.astype(y_ref.dtype), mask=there[None, :])

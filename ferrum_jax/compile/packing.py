"""The whole input of a step as one int32 buffer: one upload a step, whatever is in it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray

from ferrum_jax.compile.buckets import Outputs, StepKey
from ferrum_jax.ops.batch import Batch, Rows


def _groups(key: StepKey) -> list[tuple[int, int]]:
    """Rows and tokens per row of each group that is not empty."""
    return [(b, t) for b, t in ((key.decode_rows, 1), (key.chunk_rows, key.chunk_tokens)) if b]


def packed_size(key: StepKey) -> int:
    """Elements of the buffer of one step."""
    return sum(b * (t + 2 + key.adapters + key.table_columns) for b, t in _groups(key))


def _split(buffer, key: StepKey) -> list[Rows]:
    """Cuts a buffer, NumPy or traced, into its groups; NumPy pieces are views."""
    groups, at = [], 0

    def take(*shape: int):
        nonlocal at
        size = math.prod(shape)
        piece = buffer[at : at + size].reshape(shape)
        at += size
        return piece

    for b, t in _groups(key):
        tokens, lengths, counts, tables = take(b, t), take(b), take(b), take(b, key.table_columns)
        uses = take(b) if key.adapters else None
        groups.append(Rows(tokens=tokens, lengths=lengths, counts=counts, tables=tables, adapters=uses))
    return groups


def blank(key: StepKey) -> tuple[NDArray[np.int32], list[Rows[NDArray[np.int32]]]]:
    """Gives a buffer of padding and the views to fill it through: decode rows first, then chunks."""
    buffer = np.zeros(packed_size(key), np.int32)
    groups = _split(buffer, key)
    for rows in groups:
        if rows.adapters is not None:
            rows.adapters[:] = -1
    return buffer, groups


def unpack(buffer: Int[Array, " size"], key: StepKey) -> Batch[jax.Array]:
    """Rebuilds the batch inside the step."""
    groups = _split(buffer, key)
    if key.outputs == Outputs.ALL.value:
        return Batch(groups=tuple(groups), logit_rows=jnp.arange(key.num_tokens, dtype=jnp.int32))
    last, start = [], 0
    for rows in groups:
        b, t = rows.tokens.shape
        firsts = start + t * jnp.arange(b, dtype=jnp.int32)
        last.append(firsts + jnp.maximum(rows.counts - 1, 0))
        start += b * t
    return Batch(groups=tuple(groups), logit_rows=jnp.concatenate(last))

"""Sliding-window caches: a layer that attends within a window keeps only the last positions of each sequence.

In those layers a sequence has R blocks, which it reuses cyclically: position p is written to its block (p // C) % R.
Attention is the same as in other layers: its block table begins with the first block that the row's window reaches, and
lengths count from there. With R = `num_window_blocks`, a step overwrites only positions before the window of its first
token, so several rows of a step may belong to one sequence.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.ops.batch import Batch, Rows


def num_window_blocks(window: int, step_tokens: int, block_size: int) -> int:
    """Returns R: blocks for the window before a step's first token and for a sequence's tokens in one step."""
    return -(-(window - 1 + step_tokens) // block_size)


def split_tables(batch: Batch[jax.Array], window_blocks: int) -> tuple[Batch[jax.Array], Batch[jax.Array]]:
    """Splits off the last R columns of block tables, which the sliding-window cache uses: full and windowed batch."""
    full = [replace(rows, tables=rows.tables[:, :-window_blocks]) for rows in batch.groups]
    windowed = [replace(rows, tables=rows.tables[:, -window_blocks:]) for rows in batch.groups]
    return replace(batch, groups=tuple(full)), replace(batch, groups=tuple(windowed))


def window_tables(batch: Batch[jax.Array], window: int, block_size: int) -> Batch[jax.Array]:
    """Returns tables of R + 1 columns from the block of the first visible position on, and lengths counted from there.

    The last column is the first column's block again, as it is reused R blocks later. Attention masks the rest: old
    positions in that block are before the window, and positions not yet written are ahead of the token.
    """
    return replace(batch, groups=tuple(_window_rows(rows, window, block_size) for rows in batch.groups))


def _window_rows(rows: Rows[jax.Array], window: int, block_size: int) -> Rows[jax.Array]:
    num_blocks = rows.tables.shape[1]
    first = lax.div(jnp.maximum(rows.lengths - (window - 1), 0), jnp.int32(block_size))  # [B]
    columns = lax.rem(first[:, None] + jnp.arange(num_blocks + 1, dtype=jnp.int32), jnp.int32(num_blocks))
    tables = jnp.take_along_axis(rows.tables, columns, axis=1, mode="promise_in_bounds")
    return replace(rows, tables=tables, lengths=rows.lengths - first * block_size)

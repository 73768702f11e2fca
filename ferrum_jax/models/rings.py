"""Where a step finds the keys and values of layers that keep no more than a window of each sequence.

A sequence has a ring of R blocks in those layers: position p lies in its block (p // C) % R. To a layer the ring is
shown as a sequence that begins with the block its window begins in, so that attention is what it always is: it counts
positions from there. That holds as long as the ring has `num_ring_blocks` of them.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ferrum_jax.ops.batch import Batch, Rows, is_real, positions


def num_ring_blocks(window: int, chunk_tokens: int, block_size: int) -> int:
    """Blocks that hold what the first token of a chunk sees, and the whole chunk."""
    return -(-(window - 1 + chunk_tokens) // block_size)


def split_tables(batch: Batch[jax.Array], ring_blocks: int) -> tuple[Batch[jax.Array], Batch[jax.Array]]:
    """Cuts the block tables, whose last columns are the rings, in two: a batch with either."""
    whole = [replace(rows, tables=rows.tables[:, :-ring_blocks]) for rows in batch.groups]
    rings = [replace(rows, tables=rows.tables[:, -ring_blocks:]) for rows in batch.groups]
    return replace(batch, groups=tuple(whole)), replace(batch, groups=tuple(rings))


def shown_as_sequences(batch: Batch[jax.Array], window: int, block_size: int) -> Batch[jax.Array]:
    """Turns rings into tables that begin with the block of the first position seen, and lengths that count from there.

    The last column is the first one's block, one turn later: of what lies there, a token sees what it should, since
    positions that were overwritten are behind its window, and those that are not written yet are ahead of it.
    """
    return replace(batch, groups=tuple(_shown(rows, window, block_size) for rows in batch.groups))


def _shown(rows: Rows[jax.Array], window: int, block_size: int) -> Rows[jax.Array]:
    ring_blocks = rows.tables.shape[1]
    first = lax.div(jnp.maximum(rows.lengths - (window - 1), 0), jnp.int32(block_size))  # [B]
    columns = lax.rem(first[:, None] + jnp.arange(ring_blocks + 1, dtype=jnp.int32), jnp.int32(ring_blocks))
    tables = jnp.take_along_axis(rows.tables, columns, axis=1, mode="promise_in_bounds")
    return replace(rows, tables=tables, lengths=rows.lengths - first * block_size)


def ring_addresses(
    rows: Rows[jax.Array], block_size: int, num_blocks: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Block id and offset that every token is written to; padding gets block `num_blocks`, which drops the write."""
    at = positions(rows)
    columns = lax.rem(lax.div(at, jnp.int32(block_size)), jnp.int32(rows.tables.shape[1]))
    block_ids = jnp.take_along_axis(rows.tables, columns, axis=1, mode="promise_in_bounds")
    return jnp.where(is_real(rows), block_ids, num_blocks), lax.rem(at, jnp.int32(block_size))

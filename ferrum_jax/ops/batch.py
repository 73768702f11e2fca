"""The input of a step: rows of new tokens, and the block tables of their sequences."""

from typing import Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

Leaf = TypeVar("Leaf")


@flax.struct.dataclass
class Rows(Generic[Leaf]):
    """One group of static shape: B rows of up to T new tokens each.

    A row's first `counts[b]` tokens are real; a row with a count of 0 is padding. Block table entries past the row's
    last block are never used. Several rows may belong to one sequence, with the same table and consecutive positions,
    because the KV of all tokens of a step is written before attention.
    """

    tokens: Leaf  # int32 [B, T]
    lengths: Leaf  # int32 [B]: positions already in the KV
    counts: Leaf  # int32 [B]
    tables: Leaf  # int32 [B, M]
    adapters: Leaf | None = None  # int32 [B]: row of the adapters' stacks, -1 for none; None if no row has one


@flax.struct.dataclass
class Batch(Generic[Leaf]):
    """Groups of rows whose tokens, concatenated, share every matrix product of a step."""

    groups: tuple[Rows[Leaf], ...]
    # The tokens whose logits are returned: int32 indices [R] into the concatenated X or, with one group, [B, R] into
    # each row's own T; None: all tokens.
    logit_rows: Leaf | None


def positions(rows: Rows[jax.Array]) -> Int[Array, "B T"]:
    """Returns the position of every token in its sequence; padding continues the count."""
    return rows.lengths[:, None] + jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)


def is_real(rows: Rows[jax.Array]) -> Bool[Array, "B T"]:
    """Returns True for real tokens, False for padding."""
    return jnp.arange(rows.tokens.shape[1], dtype=jnp.int32) < rows.counts[:, None]


def slot_mapping(
    rows: Rows[jax.Array], block_size: int, num_blocks: int, *, is_cyclic: bool = False
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns block id and offset to which each token is written; padding gets block `num_blocks`: no write.

    If `is_cyclic`, a row reuses the blocks of its table cyclically, as a sliding-window cache does.
    """
    at = positions(rows)
    columns, size = lax.div(at, jnp.int32(block_size)), rows.tables.shape[1]
    columns = lax.rem(columns, jnp.int32(size)) if is_cyclic else jnp.minimum(columns, size - 1)
    block_ids = jnp.take_along_axis(rows.tables, columns, axis=1, mode="promise_in_bounds")
    return jnp.where(is_real(rows), block_ids, num_blocks), lax.rem(at, jnp.int32(block_size))


def adapter_of_token(batch: Batch[jax.Array]) -> Int[Array, " X"] | None:
    """Returns the adapter of each of the concatenated tokens, -1 for none; None if no group of rows has adapters."""
    if all(rows.adapters is None for rows in batch.groups):
        return None
    none = jnp.int32(-1)
    return jnp.concatenate(
        [
            jnp.repeat(
                jnp.full(len(rows.tokens), none) if rows.adapters is None else rows.adapters, rows.tokens.shape[1]
            )
            for rows in batch.groups
        ]
    )

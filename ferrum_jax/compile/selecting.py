"""Logits policies on the device: one packed buffer says which tokens each row may choose."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from ferrum_jax.compile.bits import num_words, pack_flags, unpack_flags
from ferrum_jax.contract.checks import checked_mask, refuse_policy
from ferrum_jax.contract.policy import FullLogits, LogitsReturnPolicy
from ferrum_jax.ops.sampling import choose_greedily


@dataclass(frozen=True, eq=False)
class Greedy:
    """A checked policy: masks as bits, the lowest first; None where a policy has none."""

    allowed: NDArray[np.int32] | None = None  # [V / 32]
    penalised: NDArray[np.int32] | None = None  # [V / 32]
    penalty: float = 1.0


def checked_policy(policy: LogitsReturnPolicy, vocab_size: int) -> Greedy | None:
    """Gives a policy ready for the device, None for full logits, or raises RequestValidation."""
    refuse_policy(policy, vocab_size)
    if isinstance(policy, FullLogits):
        return None
    mask, penalty = policy.token_mask, policy.repetition_penalty
    allowed = None if mask is None else pack_flags(checked_mask(mask, vocab_size))
    if penalty is None or not len(penalty.token_ids):
        return Greedy(allowed)
    penalised = np.zeros(vocab_size, np.bool_)
    penalised[np.asarray(penalty.token_ids, np.int64)] = True
    return Greedy(allowed, pack_flags(penalised), float(penalty.penalty))


def packed_rows(rows: Sequence[Greedy | None], num_rows: int, vocab_size: int, taken: int) -> NDArray[np.int32]:
    """Packs the policies of a step's logit rows: the row whose logits are taken, penalties, both masks.

    The buffer is `[1 + num_rows * (1 + 2 * V / 32)]`; rows past the given ones are padding.
    """
    words = num_words(vocab_size)
    buffer = np.zeros(1 + num_rows * (1 + 2 * words), np.int32)
    buffer[0] = taken
    penalties, allowed, penalised = _split(buffer, num_rows, words)
    penalties.view(np.float32)[:] = 1.0
    allowed[:] = -1
    for at, row in enumerate(rows):
        if row is None:
            continue
        penalties.view(np.float32)[at] = row.penalty
        if row.allowed is not None:
            allowed[at] = row.allowed
        if row.penalised is not None:
            penalised[at] = row.penalised
    return buffer


def _split(buffer, num_rows: int, words: int):
    """Cuts the buffer, NumPy or traced, behind its first element; NumPy pieces are views."""
    size = num_rows * words
    masks = buffer[1 + num_rows :]
    return buffer[1 : 1 + num_rows], masks[:size].reshape(-1, words), masks[size:].reshape(-1, words)


def select(logits: Float[Array, "R V"], buffer: Int[Array, " size"]) -> tuple[Int[Array, " R"], Float[Array, " V"]]:
    """Gives each row's best allowed token, and the unchanged logits of the one row the buffer names."""
    num_rows, vocab_size = logits.shape
    penalties, allowed, penalised = _split(buffer, num_rows, num_words(vocab_size))

    penalty = jax.lax.bitcast_convert_type(penalties, jnp.float32)
    token_ids = choose_greedily(logits, unpack_flags(allowed, vocab_size), unpack_flags(penalised, vocab_size), penalty)
    return token_ids, jax.lax.dynamic_index_in_dim(logits, buffer[0], keepdims=False)

"""Scores of given tokens under the distribution that a slot's settings draw from: a program that reads logits."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ferrum_jax.compile.sampler import SamplerState, adjusted, each_token, inputs_of, logits_of, lower_writing
from ferrum_jax.compile.step import ProgramContext
from ferrum_jax.ops import sampling


def score_processed(
    state: SamplerState[jax.Array], logits: Float[Array, "R V"], buffer: Int[Array, " size"], *, blocks: int
) -> tuple[SamplerState[jax.Array], Float[Array, " R"]]:
    """Returns the log-probability of the token given for each row of logits, under what its slot's settings draw from.

    `buffer` is `[P, 3 + 2 * C]`: the slot, the position of the first token, how many there are, the tokens, and the
    token given after each, which the penalties count from then on. A padding row has the slot one past the last.
    The blocks of a sequence come in order. `state` is donated.
    """
    rows = buffer.reshape(blocks, -1)
    width = (rows.shape[1] - 3) // 2

    def score_block(counts: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row, own = block
        slots, positions, before = each_token(row[None, : 3 + width], own.shape[1])
        known = replace(state, counts=counts)
        settings = state.settings.at[slots].get(mode="clip")
        inputs = inputs_of(settings, slots < len(state.settings), positions)
        found = sampling.log_distribution(adjusted(known, own, slots, positions, before), inputs)
        given = row[3 + width :]
        is_given = jnp.arange(width, dtype=jnp.int32) < row[2]
        counts = counts.at[row[0], given].add(is_given.astype(jnp.int32), mode="drop")
        return counts, jnp.take_along_axis(found, given[:, None], axis=1)[:, 0]

    counts, scores = lax.scan(score_block, state.counts, (rows, logits.reshape(blocks, width, -1)))
    return replace(state, counts=counts), scores.ravel()


@dataclass(frozen=True, order=True)
class ProcessedScoreKey:
    """Scores a given token after each token of P rows of up to C, under the distribution that settings draw from."""

    blocks: int  # P
    block_tokens: int  # C

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program; the sampler's state is donated."""
        buffer = jax.ShapeDtypeStruct((self.blocks * (3 + 2 * self.block_tokens),), jnp.int32)
        pure = functools.partial(score_processed, blocks=self.blocks)
        return lower_writing(context, pure, logits_of(context, self.blocks * self.block_tokens), buffer)

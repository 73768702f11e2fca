"""Scores: programs chained on the logits of a step, that say how likely given tokens are.

`ScoreKey` is of the model's own distribution; `ProcessedScoreKey` of the one that a slot's settings draw from.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ferrum_jax.compile.sampler import (
    MAX_TOP_LOGPROBS,
    SamplerState,
    adjusted,
    each_token,
    inputs_of,
    likeliest,
    logits_of,
    lower_writing,
)
from ferrum_jax.compile.step import ProgramContext
from ferrum_jax.ops import sampling
from ferrum_jax.sharding.mesh import WHOLE


def score(
    logits: Float[Array, "R V"], buffer: Int[Array, " size"]
) -> tuple[Int[Array, "R 2"], Int[Array, "R K"], Float[Array, "R K"]]:
    """Returns, for each row, its best token and the bits of the log-probability of the token given for it.

    `buffer` is `[1 + R]`: whether the likeliest alternatives are wanted, which come after, and the given tokens.
    """
    given, count = buffer[1:], min(MAX_TOP_LOGPROBS, logits.shape[1])
    bits = lax.bitcast_convert_type(sampling.token_logprobs(logits, given), jnp.int32)
    none = jnp.zeros((len(logits), count), jnp.int32), jnp.zeros((len(logits), count))
    top_ids, top = lax.cond(buffer[0] != 0, lambda: likeliest(logits), lambda: none)
    return jnp.stack([sampling.argmax(logits), bits], axis=1), top_ids, top


def score_processed(
    state: SamplerState[jax.Array], logits: Float[Array, "R V"], buffer: Int[Array, " size"], *, blocks: int
) -> tuple[SamplerState[jax.Array], Float[Array, " R"]]:
    """Returns the log-probability of the token given for each row of logits, in what its slot's settings draw from.

    `buffer` is `[P, 3 + 2 * C]`: the slot, the position of the first token, how many there are, the tokens, and what is
    given after each of them, which the penalties count from then on. A row of nobody has the slot one past the last.
    Blocks of one sequence follow each other. `state` is donated.
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
        is_given = jnp.arange(width) < row[2]
        counts = counts.at[row[0], given].add(is_given.astype(jnp.int32), mode="drop")
        return counts, jnp.take_along_axis(found, given[:, None], axis=1)[:, 0]

    counts, scores = lax.scan(score_block, state.counts, (rows, logits.reshape(blocks, width, -1)))
    return replace(state, counts=counts), scores.ravel()


@dataclass(frozen=True, order=True)
class ScoreKey:
    """The log-probability of a given token after each row of a step's logits, and the best token there."""

    logit_rows: int  # R

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program."""
        whole = context.spread(score, (WHOLE, WHOLE), WHOLE)
        return jax.jit(whole).lower(
            logits_of(context, self.logit_rows), jax.ShapeDtypeStruct((1 + self.logit_rows,), jnp.int32)
        )


@dataclass(frozen=True, order=True)
class ProcessedScoreKey:
    """The log-probability of a given token after each token of P rows of up to C, in what the settings draw from."""

    blocks: int  # P
    block_tokens: int  # C

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program; the sampler's state is donated."""
        buffer = jax.ShapeDtypeStruct((self.blocks * (3 + 2 * self.block_tokens),), jnp.int32)
        pure = functools.partial(score_processed, blocks=self.blocks)
        return lower_writing(context, pure, logits_of(context, self.blocks * self.block_tokens), buffer)

"""One token per row: greedy or drawn, with its log-probability."""

from typing import Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ferrum_jax.sampling.filters import filter_logits
from ferrum_jax.sampling.logprobs import token_logprobs
from ferrum_jax.sampling.penalty import penalise_repetition

Leaf = TypeVar("Leaf")


@flax.struct.dataclass
class SampleInputs(Generic[Leaf]):
    """How each row is to be sampled."""

    temperature: Leaf  # float32 [B]; 0: greedy
    top_k: Leaf  # int32 [B]; 0: off
    top_p: Leaf  # float32 [B]; 1: off
    min_p: Leaf  # float32 [B]; 0: off
    repetition_penalty: Leaf  # float32 [B]; 1: off
    seed: Leaf  # uint32 [B]
    position: Leaf  # int32 [B]: of the token to be drawn, in its sequence
    seen: Leaf  # bool [B, V]: tokens of the sequence so far


@flax.struct.dataclass
class Choice(Generic[Leaf]):
    """The token chosen for each row, and its log-probability under the model's own distribution."""

    token_ids: Leaf  # int32 [B]
    logprobs: Leaf  # float32 [B]


def sample(logits: Float[Array, "B V"], inputs: SampleInputs[jax.Array]) -> Choice[jax.Array]:
    """Chooses a token for each row.

    The order is: repetition penalty, temperature, top-k, top-p, min-p, draw. The draw of a row depends on its seed and
    position alone, never on the rows beside it. `logprobs` are those of the unchanged logits: what `forward` gives.
    """
    scores = _penalise(logits, inputs)
    greedy = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    drawn = lax.cond(jnp.any(inputs.temperature > 0), lambda: _draw(scores, inputs), lambda: greedy)
    token_ids = jnp.where(inputs.temperature > 0, drawn, greedy)
    return Choice(token_ids=token_ids, logprobs=token_logprobs(logits, token_ids))


def distribution(logits: Float[Array, "B V"], inputs: SampleInputs[jax.Array]) -> Float[Array, "B V"]:
    """Gives the probabilities with which `sample` draws each token; a row of temperature 0 is taken at 1."""
    return jax.nn.softmax(_shape(_penalise(logits, inputs), inputs), axis=-1)


def _penalise(logits: Float[Array, "B V"], inputs: SampleInputs[jax.Array]) -> Float[Array, "B V"]:
    return lax.cond(
        jnp.any(inputs.repetition_penalty != 1.0),
        lambda: penalise_repetition(logits, inputs.seen, inputs.repetition_penalty),
        lambda: logits,
    )


def _shape(scores: Float[Array, "B V"], inputs: SampleInputs[jax.Array]) -> Float[Array, "B V"]:
    """Gives the logits of the distribution that is drawn from."""
    warm = inputs.temperature > 0
    # Relative to the best, so that a tiny temperature cannot overflow.
    scaled = (scores - scores.max(axis=-1, keepdims=True)) / jnp.where(warm, inputs.temperature, 1.0)[:, None]
    filtered = warm & ((inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0))
    return lax.cond(
        jnp.any(filtered),
        lambda: filter_logits(scaled, inputs.top_k, inputs.top_p, inputs.min_p),
        lambda: scaled,
    )


def _draw(scores: Float[Array, "B V"], inputs: SampleInputs[jax.Array]) -> Int[Array, " B"]:
    scaled = _shape(scores, inputs)
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(
        inputs.seed, inputs.position
    )
    return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)

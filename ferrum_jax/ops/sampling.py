"""Logits to token ids and log-probabilities: pure functions, usable inside compiled steps and outside."""

from typing import Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def penalise_repetition(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Divides positive and multiplies negative logits of seen tokens by `penalty`; 1 changes nothing.

    Keskar et al. 2019, "CTRL", section 4.1.
    """
    factor = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)


def filter_logits(
    logits: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"], min_p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Sets logits to -inf outside the top k, then outside the nucleus of what is left, then below the min-p bound.

    `top_k` 0, `top_p` 1 and `min_p` 0 are off. A tie with the last token that is kept is kept too. At least one token
    is always left. Nucleus: Holtzman et al. 2020, section 3.1; min-p: Nguyen et al. 2024, section 3.
    """
    ranked = -jnp.sort(-logits, axis=-1)  # descending
    rank = jnp.arange(logits.shape[-1])
    kept = (top_k[:, None] <= 0) | (rank < top_k[:, None])
    probabilities = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept &= (before < top_p[:, None]) | (top_p[:, None] >= 1)  # `before` rounds up to 1 in the tail
    # Renormalising over the nucleus scales every probability alike, so the bound may use these.
    kept &= probabilities >= min_p[:, None] * probabilities[:, :1]
    kept |= rank == 0
    least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


def choose_greedily(
    logits: Float[Array, "R V"],
    allowed: Bool[Array, "R V"],
    penalised: Bool[Array, "R V"],
    penalty: Float[Array, " R"],
) -> Int[Array, " R"]:
    """Gives the arg-max of the allowed tokens, after those `penalised` have been; the first of equals.

    A penalty that takes a logit to -inf leaves it the least finite number, above what is not allowed.
    """
    scores = jnp.maximum(penalise_repetition(logits, penalised, penalty), jnp.finfo(jnp.float32).min)
    return jnp.argmax(jnp.where(allowed, scores, -jnp.inf), axis=-1).astype(jnp.int32)


def token_logprobs(logits: Float[Array, "*B V"], token_ids: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Gives each token's log-probability under its row's logits, in float32."""
    logits = logits.astype(jnp.float32)
    return jnp.take_along_axis(logits, token_ids[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)


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

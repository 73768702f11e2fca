"""The best token of each row under a mask and a penalty."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ferrum_jax.sampling.penalty import penalise_repetition


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

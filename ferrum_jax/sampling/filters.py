"""Which tokens may still be drawn: top-k, nucleus and min-p."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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

"""Which experts a token goes to, and what each of them counts."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def route(
    logits: Float[Array, "X E"], num_chosen: int, *, renormalise: bool
) -> tuple[Int[Array, "X U"], Float[Array, "X U"]]:
    """Chooses each token's most likely experts; gives their ids, the likeliest first, and their shares, in float32.

    Shares are probabilities among all experts or, renormalised, among those chosen, which is the softmax of their
    logits. Of equal logits the lower id is chosen.
    """
    shares, chosen = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), num_chosen)
    return chosen, shares / jnp.sum(shares, axis=-1, keepdims=True) if renormalise else shares

"""Penalties on tokens that were seen before."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def penalise_repetition(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Divides positive and multiplies negative logits of seen tokens by `penalty`; 1 changes nothing.

    Keskar et al. 2019, "CTRL", section 4.1.
    """
    factor = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)

"""Log-probabilities of given tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_logprobs(logits: Float[Array, "*B V"], token_ids: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Gives each token's log-probability under its row's logits, in float32."""
    logits = logits.astype(jnp.float32)
    return jnp.take_along_axis(logits, token_ids[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)

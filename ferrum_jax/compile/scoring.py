"""Log-probabilities of given tokens on the device, so that two numbers a token cross to the host, not its logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ferrum_jax.ops.sampling import token_logprobs


def score(logits: Float[Array, "R V"], token_ids: Int[Array, " R"]) -> Int[Array, "2 R"]:
    """Gives each row's best token, and the bits of the float32 log-probability of the token that was given for it."""
    bits = jax.lax.bitcast_convert_type(token_logprobs(logits, token_ids), jnp.int32)
    return jnp.stack([jnp.argmax(logits, axis=-1).astype(jnp.int32), bits])

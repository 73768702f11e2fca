"""Attention over a set of positions out of attention over its parts."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge(
    outs: Float[Array, "parts *rows H"], lses: Float[Array, "parts *rows"]
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"]]:
    """Merges softmax averages over disjoint sets of positions by the log of the sum of each one's exponentials.

    Dao et al. 2023, "Flash-Decoding for long-context inference"; Rabe and Staats 2021, "Self-attention does not need
    O(n²) memory", section 2. Both sides are float32. A part that saw nothing has a log-sum of minus infinity and
    whatever output; where no part saw anything, the output is zero.
    """
    best = lses.max(axis=0)
    finite = jnp.where(jnp.isneginf(best), 0.0, best)
    shares = jnp.exp(lses - finite)
    total = shares.sum(axis=0)
    shares = shares / jnp.where(total == 0, 1.0, total)
    out = jnp.where(shares[..., None] == 0, 0.0, outs * shares[..., None]).sum(axis=0)
    return out, jnp.where(total == 0, -jnp.inf, finite + jnp.log(jnp.where(total == 0, 1.0, total)))

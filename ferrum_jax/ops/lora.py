"""Low-rank deltas of products, where one batch mixes tokens of different adapters and of none.

Hu et al. 2021, "LoRA", section 4.1. The adapters of one product lie stacked, so that a delta is two dense products and
a mask between them, whatever the adapters of the tokens: no weights are gathered, and no shape depends on which are
used.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ferrum_jax.ops.linear import linear


def uses(adapter_of_token: Int[Array, " X"], num_adapters: int) -> Bool[Array, "X A"]:
    """Says which adapter each token uses; an index outside the stack, such as -1, is none."""
    return adapter_of_token[:, None] == jnp.arange(num_adapters, dtype=adapter_of_token.dtype)


def low_rank(
    x: Float[Array, "X D"], down: Float[Array, "A R D"], up: Float[Array, "F A R"], used: Bool[Array, "X A"]
) -> Float[Array, "X F"]:
    """Computes `x @ down[a].T @ up[:, a].T` for the adapter a of each token; zeros for a token of none.

    What one adapter makes of another's tokens is dropped before the second product, were it infinite. `up` must be
    finite throughout, also where no token uses it.
    """
    num_adapters, rank, _ = down.shape
    inner = linear(x, down.reshape(num_adapters * rank, -1)).reshape(-1, num_adapters, rank)
    inner = jnp.where(used[:, :, None], inner, jnp.zeros((), inner.dtype))
    return linear(inner.reshape(-1, num_adapters * rank), up.reshape(-1, num_adapters * rank))

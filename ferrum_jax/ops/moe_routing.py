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


def choose_in_groups(
    scores: Float[Array, "X E"], num_chosen: int, *, num_groups: int, num_kept: int, num_best: int
) -> Int[Array, "X U"]:
    """Chooses the experts of highest score in the groups of highest score, `num_kept` of them; gives their ids.

    Groups are of equal size, in the order of experts; a group's score is the sum of its `num_best` best. DeepSeek-AI
    2024, "DeepSeek-V2", section 2.2.2.
    """
    if num_groups > 1:
        by_group = scores.reshape(len(scores), num_groups, -1)
        of_group = jnp.sum(lax.top_k(by_group, num_best)[0], axis=-1)
        kept = jnp.any(lax.top_k(of_group, num_kept)[1][:, :, None] == jnp.arange(num_groups), axis=1)  # [X, groups]
        scores = jnp.where(kept[:, :, None], by_group, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, num_chosen)[1]

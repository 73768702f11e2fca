"""Root mean square normalisation."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*axes D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*axes D"]:
    """Divides by the root mean square of the last axis and scales; computed in float32, cast back before the scale.

    The weight is rounded to the dtype of x.
    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def wide_rms_norm(
    x: Float[Array, "*axes D"],
    weight: Float[Array, " D"],
    eps: float,
    mean_square: Float[Array, "*axes 1"] | None = None,
) -> Float[Array, "*axes D"]:
    """As `rms_norm`, but scales in float32, and casts back at the end.

    `mean_square` is the mean over the whole last axis, for an x of which other devices hold parts.
    """
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True) if mean_square is None else mean_square
    normed = wide * lax.rsqrt(mean + eps)
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)


def offset_rms_norm(x: Float[Array, "*axes D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*axes D"]:
    """As `wide_rms_norm`, but scales by `1 + weight`."""
    return wide_rms_norm(x, 1 + weight.astype(jnp.float32), eps)

"""Matrix products with weights stored `[out, in]`, as checkpoints have them."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

FEW_TOKENS = 64  # from 2 up to here XLA's CPU products are faster with the weight as left operand


def precision(dtype: jnp.dtype) -> lax.Precision:
    """A float32 model computes in float32: the default is TF32 on NVIDIA and bfloat16 passes on TPU."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def linear(
    x: Float[Array, "X D"], weight: Float[Array, "F D"], bias: Float[Array, " F"] | None = None
) -> Float[Array, "X F"]:
    """Computes `x @ weight.T + bias` in the weight's dtype."""
    y = _product(x, weight, x.dtype)
    return y if bias is None else y + bias


def vocabulary_logits(x: Float[Array, "R D"], weight: Float[Array, "V D"]) -> Float[Array, "R V"]:
    """Computes `x @ weight.T`, accumulated and returned in float32."""
    return _product(x, weight, jnp.dtype(jnp.float32))


def _product(x: jax.Array, weight: jax.Array, out: jnp.dtype) -> jax.Array:
    if not 2 <= x.shape[0] <= FEW_TOKENS:
        return _weight_right(x, weight, out)
    return lax.platform_dependent(
        x, weight, cpu=lambda x, w: _weight_left(x, w, out), default=lambda x, w: _weight_right(x, w, out)
    )


def _weight_right(x: jax.Array, weight: jax.Array, out: jnp.dtype) -> jax.Array:
    return jnp.einsum("XD,FD->XF", x, weight, precision=precision(x.dtype), preferred_element_type=out)


def _weight_left(x: jax.Array, weight: jax.Array, out: jnp.dtype) -> jax.Array:
    """The same product with the weight as left operand; the barrier keeps XLA from turning it round again."""
    y = jnp.einsum("FD,XD->FX", weight, x, precision=precision(x.dtype), preferred_element_type=out)
    return lax.optimization_barrier(y).T

"""Rotary position embeddings and their scalings.

Su et al. 2021, "RoFormer"; linear scaling: Chen et al. 2023, "Position Interpolation"; YaRN: Peng et al. 2023,
section 3; llama3: the reference implementation of Llama 3.1; LongRoPE: Ding et al. 2024, section 3.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray


def default_frequencies(dim: int, theta: float) -> NDArray[np.float32]:
    """Returns radians per position for each of the `dim // 2` pairs."""
    return np.float32(1.0) / np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


def llama3_frequencies(
    frequencies: NDArray[np.float32], factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> NDArray[np.float32]:
    """Divides the frequencies of long wavelengths by `factor`, keeps those of short ones, and blends between.

    `original` is the original context length in positions.
    """
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    slow = np.where(wavelengths > original / low_freq_factor, frequencies / factor, frequencies)
    between = (wavelengths <= original / low_freq_factor) & (wavelengths >= original / high_freq_factor)
    return np.where(between, blended, slow).astype(np.float32)


def yarn_frequencies(
    frequencies: NDArray[np.float32],
    theta: float,
    factor: float,
    original: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> NDArray[np.float32]:
    """Divides the frequencies of pairs with fewer than `beta_slow` rotations in `original` positions by `factor`.

    Pairs with more than `beta_fast` rotations keep their frequencies; a linear ramp blends between.
    """
    dim = 2 * len(frequencies)

    def pair_rotating(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_rotating(beta_fast), pair_rotating(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / (high - low if high != low else 0.001)
    interpolated = np.clip(ramp, 0, 1)
    return (frequencies / factor * interpolated + frequencies * (1 - interpolated)).astype(np.float32)


def rotations(
    positions: Int[Array, " X"], frequencies: NDArray[np.float32], magnitude: float
) -> tuple[Float[Array, "X 1 H2"], Float[Array, "X 1 H2"]]:
    """Returns cosines and sines of every token's angles, float32, times `magnitude`; positions are at least 0."""
    angles = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(frequencies)
    return _cosines_and_sines(angles, magnitude=magnitude)


@functools.partial(jax.jit, static_argnames="magnitude", inline=True)  # without it, an eager call compiles every time
def _cosines_and_sines(angles: jax.Array, *, magnitude: float) -> tuple[jax.Array, jax.Array]:
    def compute(angles: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude

    def compute_once(angles: jax.Array) -> tuple[jax.Array, jax.Array]:
        # XLA's CPU backend would fuse cosines and sines into the rotation of every layer and head; it drops barriers
        # before it fuses. It does not fuse a branch, which here is always taken, so they are computed once per step.
        return lax.cond(jnp.any(angles[:, 0, 0] >= 0), compute, lambda angles: (angles, angles), angles)

    return lax.platform_dependent(angles, cpu=compute_once, default=compute)


def rotate(x: Float[Array, "X heads H"], cos: jax.Array, sin: jax.Array) -> Float[Array, "X heads H"]:
    """Rotates the pairs (i, i + R/2) of the first R numbers of every head, in float32, by R/2 angles."""
    if (width := 2 * cos.shape[-1]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], cos, sin), x[..., width:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)

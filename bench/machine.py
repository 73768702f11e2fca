"""What the machine can do at best, measured in the same run: its matrix products and its reading of memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Machine:
    """Ceilings of a device."""

    product_rate: float  # operations per second of a large matrix product, a multiplication and an addition being two
    read_rate: float  # bytes per second of summing a large array


def measure_machine(dtype: str, *, smoke: bool = False) -> Machine:
    """Measures both rates on JAX's default device: the best of as many calls as fit into a second and a half each."""
    seconds = 0.05 if smoke else 1.5
    on_cpu = jax.default_backend() == "cpu"
    size = 256 if smoke else 2048 if on_cpu else 8192
    elements = (1 << 20 if smoke else 1 << 27 if on_cpu else 1 << 30) * 4 // jnp.dtype(dtype).itemsize
    high = lax.Precision.HIGHEST if dtype == "float32" else lax.Precision.DEFAULT
    square = jnp.ones((size, size), dtype)
    product = jax.jit(lax.dot, static_argnames="precision")
    fastest = _best(lambda: product(square, square, precision=high), seconds)
    line = jnp.ones(elements, dtype)
    add = jax.jit(jnp.sum)
    return Machine(2 * size**3 / fastest, line.nbytes / _best(lambda: add(line), seconds))


def _best(call: Callable[[], jax.Array], seconds: float) -> float:
    """Gives the shortest time of one call, in seconds; the first, which compiles, does not count."""
    call().block_until_ready()
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        call().block_until_ready()
        best = min(best, time.perf_counter() - started)
    return best

"""What the machine can do at best: probes of its matrix products and of its reading of memory.

The speed of a shared machine drifts within a minute, so the probes take turns with what is measured, and every row of a
table has ceilings of its own: the fastest tenth of the probes' calls among its own calls. (The very fastest is a moment
that does not come back: once in fifty calls memory may read nearly twice as fast as it ever does for long.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.timing import Contestant, Timing, alternate
from ferrum_jax.ops import native
from ferrum_jax.sharding.devices import find_device
from ferrum_jax.weights.huge_pages import DevicePlacer

WIDTH = 4096  # columns of the array that is read
BURST = 4  # calls in a row: the first finds caches cold and threads asleep


@dataclass(frozen=True)
class Machine:
    """Ceilings of a device."""

    product_rate: float  # operations per second of a large matrix product, a multiplication and an addition being two
    read_rate: float  # bytes per second of reading a large array


@dataclass(frozen=True)
class Probes:
    """Calls that do nothing but multiply or read, and how much they do."""

    contestants: dict[str, Contestant]
    operations: int
    num_bytes: int


def make_probes(dtype: str, *, smoke: bool = False) -> Probes:
    """Makes the probes for JAX's default device: square matrices of the fastest size, and an array past any cache.

    On a CPU the array lies in huge pages, as weights do. It is read by a sum, and where there are kernels also by a
    product of one row.
    """
    on_cpu = jax.default_backend() == "cpu"
    size = 256 if smoke else 1024 if on_cpu else 8192
    elements = (1 << 20 if smoke else 1 << 27 if on_cpu else 1 << 30) * 4 // jnp.dtype(dtype).itemsize
    high = lax.Precision.HIGHEST if dtype == "float32" else lax.Precision.DEFAULT
    square, shape = jnp.ones((size, size), dtype), (elements // WIDTH, WIDTH)
    ones = np.broadcast_to(np.ones((), jnp.dtype(dtype)), shape)  # takes no memory before it is placed
    array = DevicePlacer(find_device(None))(ones) if on_cpu else jnp.ones(shape, dtype)
    multiply, add = jax.jit(lax.dot, static_argnames="precision"), jax.jit(jnp.sum)
    contestants = {
        "products": Contestant(lambda: multiply(square, square, precision=high), burst=BURST),
        "reading": Contestant(lambda: add(array), burst=BURST),
    }
    if on_cpu and native.instruction_set() and native.reads(dtype, WIDTH):
        row, product = jnp.ones((1, WIDTH)), jax.jit(native.product)
        contestants["reading by a kernel"] = Contestant(lambda: product(row, array), burst=BURST)
    return Probes(contestants, 2 * size**3, array.nbytes)


def ceilings(probes: Probes, times: Mapping[str, Timing]) -> Machine:
    """Returns the rates that the fastest tenth of the probes' calls reach; for reading, those of the faster probe."""
    read = min(times[name].p10 for name in probes.contestants if name != "products")
    return Machine(
        product_rate=probes.operations / times["products"].p10 * 1e3,
        read_rate=probes.num_bytes / read * 1e3,
    )


def measure(probes: Probes) -> Machine:
    """Runs the probes alone, for the card."""
    return ceilings(probes, alternate(probes.contestants, rounds=12))

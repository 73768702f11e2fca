"""Functions as they are traced in serving programs, with the CPU's kernels, and elsewhere."""

from collections.abc import Iterator

import jax
import pytest

from ferrum_jax.ops import native
from ferrum_jax.ops.kernel_use import kernels

needs_kernels = pytest.mark.skipif(native.instruction_set() is None, reason=f"no kernels: {native.library()}")


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=needs_kernels)], ids=["xla", "kernels"])
def with_kernels(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether what the tests of a module trace uses the kernels."""
    jax.clear_caches()
    with kernels("cpu" if request.param else "xla"):
        yield request.param

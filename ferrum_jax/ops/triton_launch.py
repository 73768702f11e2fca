"""Launching of GPU kernels, and the sizes that suit a GPU."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

SMALLEST_PART = 16  # fewest rows or columns of an operand of a tensor core's product
PROGRAMS = 528  # programs that a launch should have: four for each of the 132 multiprocessors of an H100


def launch(call: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Calls a function that launches kernels; on a CPU the kernels are interpreted."""
    return lax.platform_dependent(
        *arrays, cpu=functools.partial(call, interpret=True), default=functools.partial(call, interpret=False)
    )

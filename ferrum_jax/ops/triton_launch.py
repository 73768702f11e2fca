"""What the kernels of GPUs share: how they are launched, and what a GPU wants of their sizes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

SMALLEST_PART = 16  # rows or columns of an operand: what a tensor core's product takes
PROGRAMS = 528  # that a step should have: four for each of the 132 multiprocessors of an H100


def launch(call: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Calls a function that launches kernels; where it runs on a CPU they are interpreted."""
    return lax.platform_dependent(
        *arrays, cpu=functools.partial(call, interpret=True), default=functools.partial(call, interpret=False)
    )

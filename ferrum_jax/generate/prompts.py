"""Prompts in every form that a caller may give them."""

from collections.abc import Iterable, Sequence

import numpy as np

from ferrum_jax.contract.errors import RequestValidationError, shown

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Gives a list of prompts, of which a single text or list of ids is one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)):
        raise RequestValidationError("prompts are bytes: give text, or token ids")
    if hasattr(prompts, "ndim"):  # an array, of JAX perhaps
        prompts = np.asarray(prompts).tolist()
    if not isinstance(prompts, Iterable):
        raise RequestValidationError(f"prompts are {shown(prompts)}, expected text, token ids, or a list of prompts")
    ids = [prompt for prompt in prompts if isinstance(prompt, (int, np.integer))]
    if ids and len(ids) == len(prompts):
        return [ids]
    several = [prompt for prompt in prompts if not isinstance(prompt, (int, np.integer))]
    if len(several) != len(prompts):
        raise RequestValidationError(
            "prompts mix token ids with texts or lists: give one list of ids, or a list of prompts"
        )
    return several

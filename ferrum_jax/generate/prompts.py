"""Prompts in every form that a caller may give them."""

from collections.abc import Sequence

import numpy as np

from ferrum_jax.contract.errors import RequestValidationError

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Gives a list of prompts, of which a single text or list of ids is one."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [prompt for prompt in prompts if isinstance(prompt, (int, np.integer))]
    if ids and len(ids) == len(prompts):
        return [[int(token) for token in ids]]
    several = [prompt for prompt in prompts if not isinstance(prompt, (int, np.integer))]
    if len(several) != len(prompts):
        raise RequestValidationError(
            "prompts mix token ids with texts or lists: give one list of ids, or a list of prompts"
        )
    return several

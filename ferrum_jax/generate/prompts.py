"""Prompts in every form that a caller may give them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ferrum_jax.contract.errors import RequestValidationError, shown

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Gives a list of prompts, of which a single text or list of ids is one."""
    if isinstance(prompts, str):
        return [prompts]
    listed = _listed("prompts", prompts)
    ids = [prompt for prompt in listed if isinstance(prompt, int)]
    if ids and len(ids) == len(listed):
        return [ids]
    if ids:
        raise RequestValidationError(
            "prompts mix token ids with texts or lists: give one list of ids, or a list of prompts"
        )
    return listed


def as_ids(prompt: Any, vocab_size: int) -> list[int]:
    """Gives a prompt's token ids, from any iterable or array, or raises naming the first that is none."""
    ids = _listed("the prompt", prompt)
    for at, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestValidationError(
                f"the prompt's token at position {at} is {shown(token)}, expected an id from 0 to {vocab_size - 1}"
            )
    return ids


def _listed(name: str, given: Any) -> list[Any]:
    """Gives what an array or an iterable holds, its numbers as Python's."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        raise RequestValidationError(f"{name} is of bytes: give text, or token ids")
    try:
        if hasattr(given, "ndim"):  # an array, of JAX perhaps
            given = np.asarray(given).tolist()
        if isinstance(given, Iterable):
            return [np.asarray(one).item() if getattr(one, "ndim", None) == 0 else one for one in given]
    except RuntimeError as problem:  # a deleted array
        raise RequestValidationError(f"{name} cannot be read: {problem}") from None
    raise RequestValidationError(f"{name} is {shown(given)}, expected text, token ids, or a list of prompts")

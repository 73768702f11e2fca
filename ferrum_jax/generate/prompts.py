"""Prompts in every form that a caller may give them."""

from collections.abc import Iterable, Mapping, Sequence
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
    if hasattr(given, "ndim"):
        given = _read(name, given)
    if isinstance(given, Iterable) and not isinstance(given, (Mapping, set, frozenset)):  # no order
        return [_read(name, one) if getattr(one, "ndim", None) == 0 else one for one in given]
    raise RequestValidationError(f"{name} is {shown(given)}, expected text, token ids, or a list of prompts")


def _read(name: str, array: Any) -> Any:
    """Gives an array of NumPy or JAX as Python's lists and numbers."""
    try:
        return np.asarray(array).tolist()
    except (RuntimeError, TypeError) as problem:  # deleted, or of another library that does not give it away
        raise RequestValidationError(f"{name} cannot be read: {problem}") from problem

"""Prompts, adapters and priorities in every form that callers may pass."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ferrum_jax.contract.errors import RequestValidationError, safe_repr
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.generate.params import RequestOutput

# A mapping has `prompt`, a text, or `prompt_token_ids`; a RequestOutput is an answer to continue.
Prompt = str | Sequence[int] | Mapping[str, Any] | RequestOutput


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[str | Sequence[int] | RequestOutput]:
    """Returns a list of prompts; a single text, list of ids, mapping or output becomes a list of one."""
    if isinstance(prompts, (str, Mapping, RequestOutput)):
        return [_unwrapped(prompts)]
    listed = [_unwrapped(prompt) for prompt in _listed("prompts", prompts)]
    ids = [prompt for prompt in listed if isinstance(prompt, int)]
    if ids and len(ids) == len(listed):
        return [ids]
    if ids:
        raise RequestValidationError(
            "prompts mix token ids with texts or lists: give one list of ids, or a list of prompts"
        )
    return listed


def _unwrapped(prompt: Any) -> Any:
    """Returns the text or the ids of a mapping; anything else as it is."""
    if not isinstance(prompt, Mapping):
        return prompt
    known = prompt.keys() & {"prompt", "prompt_token_ids"}
    if len(known) != 1 or len(prompt) != 1:
        raise RequestValidationError(
            f"a prompt has the keys {sorted(map(str, prompt))}, expected `prompt` or `prompt_token_ids` alone"
        )
    return prompt[known.pop()]


def as_adapters(given: Any, count: int) -> list[ActiveLoraAdapter | None]:
    """Returns the adapter of each of `count` prompts, given one for all or one for each; None is no adapter.

    A text is the name of an adapter that was loaded or set. Any object with `lora_name` and `lora_path`, such as vLLM's
    LoRARequest, is accepted.
    """
    each = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(each) != count:
        raise RequestValidationError(f"{count} prompts need as many lora_request, {len(each)} were given")
    return [_adapter(one) for one in each]


def as_priorities(given: Any, count: int) -> list[int]:
    """Returns the priority of each of `count` prompts, given one for all or one for each; 0 if None."""
    if isinstance(given, np.ndarray):
        given = given.tolist()
    is_several = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    each: list[Any] = list(given) if is_several else [0 if given is None else given] * count
    if len(each) != count:
        raise RequestValidationError(f"{count} prompts need as many priorities, {len(each)} were given")
    for one in each:
        if isinstance(one, bool) or not isinstance(one, (int, np.integer)):
            raise RequestValidationError(f"priority is {safe_repr(one)}, expected an integer; lower ones go first")
    return [int(one) for one in each]


def _adapter(given: Any) -> ActiveLoraAdapter | None:
    if given is None or isinstance(given, ActiveLoraAdapter):
        return given
    if isinstance(given, str) and given:
        return ActiveLoraAdapter(name=given, path="")
    name, path = getattr(given, "lora_name", None), getattr(given, "lora_path", None)
    if not (isinstance(name, str) and isinstance(path, str)):
        raise RequestValidationError(
            f"lora_request is {safe_repr(given)}, expected a name, an ActiveLoraAdapter, or `lora_name` and `lora_path`"
        )
    return ActiveLoraAdapter(name=name, path=path)


def as_ids(prompt: Any, vocab_size: int) -> list[int]:
    """Returns a prompt's token ids, given any iterable or array.

    Raises:
        RequestValidationError: an element is not an id of the vocabulary; the message names the first.
    """
    ids = _listed("the prompt", prompt)
    for at, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestValidationError(
                f"the prompt's token at position {at} is {safe_repr(token)}, expected an id from 0 to {vocab_size - 1}"
            )
    return ids


def _listed(name: str, given: Any) -> list[Any]:
    """Returns the elements of an array or iterable, numbers as Python numbers."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        raise RequestValidationError(f"{name} is of bytes: give text, or token ids")
    if hasattr(given, "ndim"):
        given = _read(name, given)
    if isinstance(given, Iterable) and not isinstance(given, (str, Mapping, set, frozenset)):  # text, or no order
        return [_read(name, one) if getattr(one, "ndim", None) == 0 else one for one in given]
    raise RequestValidationError(f"{name} is {safe_repr(given)}, expected text, token ids, or a list of prompts")


def _read(name: str, array: Any) -> Any:
    """Converts a NumPy or JAX array to Python lists and numbers."""
    try:
        return np.asarray(array).tolist()
    except (RuntimeError, TypeError) as problem:  # deleted, or an array of another library that cannot be converted
        raise RequestValidationError(f"{name} cannot be read: {problem}") from problem

"""What a call must satisfy before anything changes."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError
from ferrum_jax.contract.llm import refuse_unequal
from ferrum_jax.contract.policy import FullLogits, GreedyArgmax, LogitsReturnPolicy


def checked_id(cache_id: Any) -> str:
    """Gives the cache id, or raises if it is no string."""
    if not isinstance(cache_id, str):
        raise RequestValidationError(f"cache id {cache_id!r} is a {type(cache_id).__name__}, expected a string")
    return cache_id


def checked_int(name: str, value: Any, least: int) -> int:
    """Gives an integer of at least `least`, or raises."""
    try:
        number = operator.index(value)
    except TypeError:
        raise RequestValidationError(f"{name} is {value!r}, expected an integer") from None
    if isinstance(value, (bool, np.bool_)) or number < least:
        raise RequestValidationError(f"{name} is {value!r}, expected an integer of at least {least}")
    return number


def checked_tokens(cache_id: str, tokens: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Gives the tokens as an array, or raises naming the first wrong position and what stands there."""
    if isinstance(tokens, (str, bytes)):
        raise RequestValidationError(f"{cache_id!r}: tokens are text, expected token ids")
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError) as problem:
        raise RequestValidationError(f"{cache_id!r}: tokens are no sequence of ids: {problem}") from None
    if array.ndim != 1:
        raise RequestValidationError(f"{cache_id!r}: tokens have shape {list(array.shape)}, expected one dimension")
    if array.size == 0:
        raise RequestValidationError(f"{cache_id!r}: needs at least one token, none were given")
    if array.dtype.kind not in "iu" or (isinstance(tokens, (list, tuple)) and _has_bool(tokens)):
        for position, token in enumerate(tokens):
            if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)):
                raise RequestValidationError(
                    f"{cache_id!r}: the token at position {position} is {token!r}, expected an integer id"
                )
            if not 0 <= token < vocab_size:
                raise _outside(cache_id, position, token, vocab_size)
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(wrong):
        raise _outside(cache_id, int(wrong[0]), array[wrong[0]], vocab_size)
    return array.astype(np.int32)


def _has_bool(tokens: Iterable[Any]) -> bool:
    return any(isinstance(token, (bool, np.bool_)) for token in tokens)


def _outside(cache_id: str, position: int, token: Any, vocab_size: int) -> RequestValidationError:
    return RequestValidationError(
        f"{cache_id!r}: the token at position {position} is {token}, ids go from 0 to {vocab_size - 1}"
    )


def refuse_repeated(cache_ids: Iterable[str]) -> None:
    """Raises if an id occurs twice."""
    seen: set[str] = set()
    for cache_id in cache_ids:
        if cache_id in seen:
            raise RequestValidationError(f"{cache_id!r} occurs twice in one batch, a sequence can have one row")
        seen.add(cache_id)


def refuse_mismatch(cache_id: str, name: str, given: Any, length: int) -> None:
    """Raises unless the caller's position is the cache's length."""
    if checked_int(f"{cache_id!r}: {name}", given, -(2**63)) != length:
        raise RequestValidationError(f"{cache_id!r}: {name} is {given}, the cache holds {length} positions")


def refuse_unbuilt_policies(num_rows: int, policies: Sequence[LogitsReturnPolicy]) -> None:
    """Raises unless there is one policy per row, and each is one that is served so far."""
    refuse_unequal(num_rows, len(policies))
    for policy in policies:
        if not isinstance(policy, (FullLogits, GreedyArgmax)):
            raise RequestValidationError(f"logits policy {policy!r}: expected FullLogits or GreedyArgmax")
        if not isinstance(policy, FullLogits):
            raise UnsupportedError(f"{policy}: logits policies other than FullLogits are not built yet")

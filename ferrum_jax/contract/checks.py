"""What a call must satisfy before anything changes."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import RequestValidationError, shown
from ferrum_jax.contract.policy import (
    FullLogits,
    GreedyArgmax,
    GreedyRepetitionPenalty,
    LogitsReturnPolicy,
    TokenSelectionMask,
)

PLAIN_INTEGERS = frozenset({int, np.int32, np.int64})


def checked_id(cache_id: Any) -> str:
    """Gives the cache id, or raises if it is no string."""
    if not isinstance(cache_id, str):
        raise RequestValidationError(f"cache id {shown(cache_id)} is a {type(cache_id).__name__}, expected a string")
    return cache_id


def checked_int(name: str, value: Any, least: int) -> int:
    """Gives an integer of at least `least`, or raises."""
    try:
        number = operator.index(value)
    except (RuntimeError, TypeError, ValueError):  # RuntimeError: a deleted array
        raise RequestValidationError(f"{name} is {shown(value)}, expected an integer") from None
    if isinstance(value, (bool, np.bool_)) or number < least:
        raise RequestValidationError(f"{name} is {shown(value)}, expected an integer of at least {least}")
    return number


def checked_flag(name: str, value: Any) -> bool:
    """Gives a truth value, or raises if it is none."""
    if not isinstance(value, bool | np.bool_):
        raise RequestValidationError(f"{name} is {shown(value)}, expected True or False")
    return bool(value)


def checked_tokens(cache_id: str, tokens: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Gives the tokens as an array, or raises naming the first wrong position and what stands there."""
    if isinstance(tokens, (str, bytes)):
        raise RequestValidationError(f"{cache_id!r}: tokens are text, expected token ids")
    try:
        array = np.asarray(tokens)
    except (RuntimeError, TypeError, ValueError) as problem:
        raise RequestValidationError(f"{cache_id!r}: tokens are no sequence of ids: {problem}") from None
    if array.ndim != 1:
        raise RequestValidationError(f"{cache_id!r}: tokens have shape {list(array.shape)}, expected one dimension")
    if array.size == 0:
        raise RequestValidationError(f"{cache_id!r}: needs at least one token, none were given")
    if array.dtype.kind not in "iu" or (isinstance(tokens, (list, tuple)) and _has_bool(tokens)):
        for position, token in enumerate(tokens):
            if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)):
                raise RequestValidationError(
                    f"{cache_id!r}: the token at position {position} is {shown(token)}, expected an integer id"
                )
            if not 0 <= token < vocab_size:
                raise _outside(cache_id, position, token, vocab_size)
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(wrong):
        raise _outside(cache_id, int(wrong[0]), array[wrong[0]].item(), vocab_size)
    return array.astype(np.int32)


def checked_singles(tokens: Sequence[Any], vocab_size: int) -> list[NDArray[np.int32]] | None:
    """Gives each token as an array `[1]`; None unless all are plain integers of the vocabulary, or there is none.

    It is the quick way for many rows of one token; `checked_tokens` says what is wrong with which.
    """
    if not tokens or not PLAIN_INTEGERS.issuperset(map(type, tokens)) or min(tokens) < 0 or max(tokens) >= vocab_size:
        return None
    return list(np.array(tokens, np.int32)[:, None])


def _has_bool(tokens: Iterable[Any]) -> bool:
    return any(isinstance(token, (bool, np.bool_)) for token in tokens)


def _outside(cache_id: str, position: int, token: Any, vocab_size: int) -> RequestValidationError:
    return RequestValidationError(
        f"{cache_id!r}: the token at position {position} is {shown(token)}, ids go from 0 to {vocab_size - 1}"
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
        raise RequestValidationError(f"{cache_id!r}: {name} is {shown(given)}, the cache holds {length} positions")


def checked_rows(name: str, rows: Iterable[Any], fields: str) -> list[tuple[Any, ...]]:
    """Gives the rows of a batch as tuples, or raises naming the first that has not the given fields.

    Args:
        name: what a batch of them is called.
        rows: the batch.
        fields: names of a row's fields, divided by spaces.
    """
    width = len(fields.split())
    try:
        listed = list(rows)
    except (RuntimeError, TypeError):
        raise RequestValidationError(f"{name} is a {type(rows).__name__}, expected a sequence of rows") from None
    for at, row in enumerate(listed):
        if not isinstance(row, (tuple, list)) or len(row) != width:
            raise RequestValidationError(f"row {at} of {name} is {shown(row)}, expected ({', '.join(fields.split())})")
    return [tuple(row) for row in listed]


def refuse_none(name: str, given: Any) -> None:
    """Raises RequestValidation for what must be given."""
    if given is None:
        raise RequestValidationError(f"{name} are None, expected one for each row")


def refuse_unequal(num_rows: int, policies: Sequence[Any]) -> None:
    """Raises RequestValidation unless there is one policy per row."""
    given = _count("policies", policies)
    if num_rows != given:
        raise RequestValidationError(f"{num_rows} rows need as many policies, {given} were given")


def _count(name: str, given: Any) -> int:
    try:
        return len(given)
    except (RuntimeError, TypeError):
        raise RequestValidationError(f"{name} are a {type(given).__name__}, expected a sequence") from None


def checked_mask(mask: Any, vocab_size: int) -> NDArray[np.bool_]:
    """Gives which of `vocab_size` tokens a `TokenSelectionMask` allows, `[vocab_size]`, or raises.

    Ids past the mask's end are not allowed; a mask that is longer than the vocabulary is cut.
    """
    if not isinstance(mask, TokenSelectionMask):
        raise RequestValidationError(f"token mask {shown(mask)}: expected a TokenSelectionMask")
    label = shown(mask.fingerprint)
    try:
        given = np.asarray(mask.valid_token_mask)
    except (RuntimeError, TypeError, ValueError) as problem:
        raise RequestValidationError(f"mask {label} is no array: {problem}") from None
    if given.ndim != 1 or given.dtype.kind not in "iub":
        raise RequestValidationError(
            f"mask {label} is {given.dtype} of shape {list(given.shape)}, expected integers of one dimension"
        )
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[: len(given)] = given[:vocab_size] != 0
    if not allowed.any():
        raise RequestValidationError(f"mask {label} allows none of {vocab_size} tokens")
    return allowed


def refuse_policy(policy: LogitsReturnPolicy, vocab_size: int) -> None:
    """Raises RequestValidation where a mask allows no token, or a penalised id is outside the vocabulary."""
    if isinstance(policy, FullLogits):
        return
    if not isinstance(policy, GreedyArgmax):
        raise RequestValidationError(f"logits policy {shown(policy)}: expected FullLogits or GreedyArgmax")
    penalty, mask = policy.repetition_penalty, policy.token_mask
    if penalty is not None:
        if not isinstance(penalty, GreedyRepetitionPenalty):
            raise RequestValidationError(f"repetition penalty {shown(penalty)}: expected a GreedyRepetitionPenalty")
        if _count("token ids of a repetition penalty", penalty.token_ids):
            checked_tokens("repetition penalty", penalty.token_ids, vocab_size)
    if mask is not None:
        checked_mask(mask, vocab_size)

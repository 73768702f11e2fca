"""Checks of what a caller gave: each returns the checked value, or raises before anything has changed."""

import numbers
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import (
    FerrumError,
    InvalidParameterError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
    safe_repr,
)

T = TypeVar("T")
LISTED = 8  # problems named in one error; the rest are counted
PLAIN_INTEGERS = frozenset({int, np.int32, np.int64})


def is_integer(value: Any) -> bool:
    """True of an integer that is not a boolean."""
    return _is_integer_type(type(value))


def _is_integer_type(kind: type) -> bool:
    return issubclass(kind, numbers.Integral) and not issubclass(kind, (bool, np.timedelta64))


def is_real(value: Any) -> bool:
    """True of a number that is not a boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.timedelta64))


def check_int(name: str, value: Any, least: int | None, error: type[FerrumError] = RequestValidationError) -> int:
    """Returns an integer, of at least `least` if that is given."""
    expected = "an integer" if least is None else f"an integer of at least {least}"
    try:
        number = operator.index(value)
    except (RuntimeError, TypeError, ValueError):  # RuntimeError: a deleted array
        raise error(f"{name} is {safe_repr(value)}, expected an integer") from None
    if isinstance(value, (bool, np.bool_)) or (least is not None and number < least):
        raise error(f"{name} is {safe_repr(value)}, expected {expected}")
    return number


def check_not_forked(noun: str, pid: int) -> None:
    """Raises UnsupportedError in a child of the process `pid`, where the object's threads and JAX's are missing."""
    if os.getpid() != pid:
        raise UnsupportedError(f"this {noun} was made before the process forked: make one in the child")


def with_thread(pool: ThreadPoolExecutor) -> ThreadPoolExecutor:
    """Starts a pool's only thread now: if `submit` failed to start it, the call would still run once a thread exists.

    Raises ResourceExhaustedError if the process may not have another thread.
    """
    try:
        pool.submit(int)
    except RuntimeError as problem:
        raise ResourceExhaustedError(f"a thread cannot be started: {problem}") from problem
    return pool


_FORKED: "weakref.WeakKeyDictionary[Any, tuple[str, Callable[[], Any]]]" = weakref.WeakKeyDictionary()


def renew_after_fork(owner: Any, name: str, make: Callable[[], Any] = threading.RLock) -> None:
    """Makes this lock anew in the child of a fork, as a thread that the child does not have may hold it."""
    _FORKED[owner] = name, make


def _renew() -> None:
    for owner, (name, make) in _FORKED.items():
        setattr(owner, name, make())


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_renew)


def check_flag(name: str, value: Any, error: type[FerrumError] = RequestValidationError) -> bool:
    """Returns True or False."""
    if not isinstance(value, bool | np.bool_):
        raise error(f"{name} is {safe_repr(value)}, expected True or False")
    return bool(value)


def check_setting(name: str, settings: Any, holds: Callable[[Any], bool], expected: str) -> None:
    """Raises InvalidParameterError, naming the value and what was expected, unless `holds(settings.name)`."""
    value = getattr(settings, name)
    if not holds(value):
        raise InvalidParameterError(f"{name} is {safe_repr(value)}, expected {expected}")


def check_cache_id(cache_id: Any) -> str:
    """Returns a cache id, which is a string."""
    if not isinstance(cache_id, str):
        kind = type(cache_id).__name__
        raise RequestValidationError(f"cache id {safe_repr(cache_id)} is a {kind}, expected a string")
    return cache_id


def check_tokens(cache_id: str, tokens: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Returns token ids as an array `[n]`, n at least 1; an error names the first wrong position and its value."""
    if isinstance(tokens, (str, bytes)):
        raise RequestValidationError(f"{cache_id!r}: tokens are text, expected token ids")
    try:
        array = np.asarray(tokens)
    except (RuntimeError, TypeError, ValueError) as problem:
        if isinstance(tokens, (list, tuple)):
            _check_each_token(cache_id, tokens, vocab_size)
        raise RequestValidationError(f"{cache_id!r}: tokens are no sequence of ids: {problem}") from None
    if array.ndim == 0:
        raise RequestValidationError(f"{cache_id!r}: tokens are a {type(tokens).__name__}, expected a sequence of ids")
    if array.ndim != 1:
        raise RequestValidationError(f"{cache_id!r}: tokens have shape {list(array.shape)}, expected one dimension")
    if array.size == 0:
        raise RequestValidationError(f"{cache_id!r}: needs at least one token, none were given")
    is_plain = array.dtype.kind in "iu" and _are_tokens(tokens)
    if not is_plain or array.min() < 0 or array.max() >= vocab_size:
        _check_each_token(cache_id, array.tolist() if is_plain else tokens, vocab_size)
    return array.astype(np.int32)


def _check_each_token(cache_id: str, tokens: Sequence[Any], vocab_size: int) -> None:
    for position, token in enumerate(tokens):
        what = f"{cache_id!r}: the token at position {position} is"
        if not _is_token(token):
            raise RequestValidationError(f"{what} {safe_repr(token)}, expected an integer id")
        number = int(np.asarray(token))  # not on a device: comparing there would compile
        if not 0 <= number < vocab_size:
            raise RequestValidationError(f"{what} {safe_repr(number)}, ids go from 0 to {vocab_size - 1}")


def _are_tokens(tokens: Sequence[Any]) -> bool:
    if hasattr(tokens, "dtype"):
        return True
    return all(map(_is_integer_type, set(map(type, tokens)))) or all(map(_is_token, tokens))


def _is_token(token: Any) -> bool:
    """True of an integer, and of an array of one integer without axes."""
    if is_integer(token):
        return True
    try:
        array = np.asarray(token)
    except (RuntimeError, TypeError, ValueError):  # a deleted or a traced array
        return False
    return array.ndim == 0 and array.dtype.kind in "iu"


def check_single_tokens(cache_ids: Sequence[str], tokens: Sequence[Any], vocab_size: int) -> list[NDArray[np.int32]]:
    """Returns the one token of each row as an array `[1]`; raises as `check_tokens`, which looks for the wrong one."""
    if tokens and PLAIN_INTEGERS.issuperset(map(type, tokens)) and min(tokens) >= 0 and max(tokens) < vocab_size:
        return list(np.array(tokens, np.int32)[:, None])
    return [check_tokens(key, [token], vocab_size) for key, token in zip(cache_ids, tokens, strict=True)]


def differences(given: Mapping[str, Any], wanted: Mapping[str, Any], verb: str = "has shape") -> list[str]:
    """Says what is missing, unknown, or other than wanted, by name."""
    problems = [f"{name} is missing" for name in wanted if name not in given]
    differing = [name for name in wanted if name in given and given[name] != wanted[name]]
    problems += [f"{name} {verb} {given[name]}, expected {wanted[name]}" for name in differing]
    return problems + [f"{name} is unknown" for name in given if name not in wanted]


def listed(problems: Sequence[str], separator: str = "; ") -> str:
    """Returns the first problems as one text; the others are counted."""
    rest = f"{separator}and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    return separator.join(problems[:LISTED]) + rest


def check_no_problems(what: str, problems: Sequence[str]) -> None:
    """Raises one InvalidParameterError for all problems, if there are any."""
    if problems:
        raise InvalidParameterError(f"{what}: {listed(problems)}")


def check_distinct(cache_ids: Iterable[str]) -> None:
    """Raises if an id occurs twice in a batch."""
    listed = list(cache_ids)
    if len(set(listed)) < len(listed):
        twice = next(one for at, one in enumerate(listed) if one in listed[:at])
        raise RequestValidationError(f"{twice!r} occurs twice in one batch, a sequence can have one row")


def check_position(cache_id: str, name: str, given: Any, length: int) -> int:
    """Returns the caller's position, which must be the cache's length."""
    try:
        position = check_int(f"{cache_id!r}: {name}", given, None)
    except RequestValidationError as problem:
        raise RequestValidationError(f"{problem}, the cache holds {length} positions") from None
    if position != length:
        raise RequestValidationError(f"{cache_id!r}: {name} is {safe_repr(given)}, the cache holds {length} positions")
    return position


def check_items(name: str, given: Any, kind: type[T]) -> list[T]:
    """Returns the items of a sequence as a list; all must be of one type."""
    items = _as_list(name, given)
    for at, item in enumerate(items):
        if not isinstance(item, kind):
            raise RequestValidationError(f"{name}[{at}] is a {type(item).__name__}, expected a {kind.__name__}")
    return items


def check_rows(name: str, rows: Any, fields: str) -> list[tuple[Any, ...]]:
    """Returns the rows of a batch as tuples; `fields` are the names of a row's fields, divided by spaces."""
    listed, names = _as_list(name, rows), fields.split()
    if not ({tuple, list}.issuperset(map(type, listed)) and {len(names)}.issuperset(map(len, listed))):
        for at, row in enumerate(listed):
            if not isinstance(row, (tuple, list)) or len(row) != len(names):
                raise RequestValidationError(f"row {at} of {name} is {safe_repr(row)}, expected ({', '.join(names)})")
    return list(map(tuple, listed))


def _as_list(name: str, given: Any) -> list[Any]:
    try:
        return list(given)
    except (RuntimeError, TypeError):
        raise RequestValidationError(f"{name} is a {type(given).__name__}, expected a sequence") from None


def check_policy_count(num_rows: int, policies: Sequence[Any]) -> None:
    """Raises unless there is one policy per row."""
    given = check_count("policies", policies)
    if num_rows != given:
        raise RequestValidationError(f"{num_rows} rows need as many policies, {given} were given")


def check_count(name: str, given: Any) -> int:
    """Returns the length of a sequence."""
    try:
        return len(given)
    except (RuntimeError, TypeError):
        raise RequestValidationError(f"{name} are a {type(given).__name__}, expected a sequence") from None

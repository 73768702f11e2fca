"""Rows of a call, checked: whatever the caller did wrong is found here, before anything changes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.selecting import Greedy, checked_policy
from ferrum_jax.contract.checks import (
    checked_flag,
    checked_id,
    checked_rows,
    checked_singles,
    checked_tokens,
    refuse_mismatch,
    refuse_repeated,
    refuse_unequal,
)
from ferrum_jax.contract.errors import RequestValidationError, shown
from ferrum_jax.contract.policy import FullLogits, LogitsReturnPolicy
from ferrum_jax.contract.slots import KvSlotRequest

FULL = FullLogits()


class Work(NamedTuple):
    """Checked new tokens of one sequence, and how it answers."""

    cache_id: str
    tokens: NDArray[np.int32]  # [n]
    wanted: bool = True
    policy: Greedy | None = None  # None: all logits
    targets: NDArray[np.int32] | None = None  # [n]: tokens whose log-probabilities are wanted instead of logits


def appended(cache_id: str, tokens: Sequence[int], vocab_size: int) -> Work:
    """Checks tokens that go to a sequence's end."""
    return Work(cache_id, checked_tokens(checked_id(cache_id), tokens, vocab_size))


def appended_rows(rows: Sequence[Any], vocab_size: int) -> list[Work]:
    """Checks (cache id, tokens) rows that go to their sequences' ends."""
    checked = checked_rows("rows", rows, "cache_id tokens")
    work = [appended(cache_id, tokens, vocab_size) for cache_id, tokens in checked]
    refuse_repeated(row.cache_id for row in work)
    return work


def scored_rows(rows: Sequence[Any], vocab_size: int) -> list[Work]:
    """Checks (cache id, tokens, targets) rows: as many targets as tokens."""
    work = []
    for cache_id, tokens, targets in checked_rows("rows", rows, "cache_id tokens targets"):
        row = appended(cache_id, tokens, vocab_size)
        wanted = checked_tokens(cache_id, targets, vocab_size)
        if len(wanted) != len(row.tokens):
            raise RequestValidationError(f"{cache_id!r}: {len(row.tokens)} tokens, but {len(wanted)} targets")
        work.append(row._replace(targets=wanted))
    refuse_repeated(row.cache_id for row in work)
    return work


def decode_rows(
    batch: Sequence[Any],
    policies: Sequence[LogitsReturnPolicy] | None,
    vocab_size: int,
    length: Callable[[str], int],
) -> list[Work]:
    """Checks (cache id, token, position) rows; `length` tells where a sequence ends."""
    rows = checked_rows("batch", batch, "cache_id token pos")
    singles = checked_singles([token for _, token, _ in rows], vocab_size)
    placed = [(cache_id, [token], pos, True) for cache_id, token, pos in rows]
    return _placed(placed, policies, vocab_size, length, "pos", singles)


def unified_rows(
    items: Sequence[Any],
    policies: Sequence[LogitsReturnPolicy] | None,
    vocab_size: int,
    length: Callable[[str], int],
) -> list[Work]:
    """Checks (cache id, tokens, position offset, is final chunk) rows; `length` tells where a sequence ends."""
    rows = checked_rows("items", items, "cache_id q_tokens pos_offset is_final_chunk")
    return _placed(rows, policies, vocab_size, length, "pos_offset")


def checked_requests(requests: Iterable[Any]) -> list[KvSlotRequest]:
    """Gives the requests as a list, or raises unless every one is a `KvSlotRequest` for a string id."""
    try:
        listed = list(requests)
    except (RuntimeError, TypeError):
        raise RequestValidationError(f"requests are a {type(requests).__name__}, expected a sequence") from None
    for request in listed:
        if not isinstance(request, KvSlotRequest):
            raise RequestValidationError(f"{shown(request)} is a {type(request).__name__}, expected a KvSlotRequest")
        checked_id(request.cache_id)
    return listed


def _placed(
    rows: Sequence[tuple[Any, ...]],
    policies: Sequence[LogitsReturnPolicy] | None,
    vocab_size: int,
    length: Callable[[str], int],
    position: str,
    checked: Sequence[NDArray[np.int32]] | None = None,
) -> list[Work]:
    """Checks rows of a cache's end; `checked` are their tokens, where that is done."""
    if policies is None:
        policies = [FULL] * len(rows)
    refuse_unequal(len(rows), policies)
    work = []
    for row, ((cache_id, tokens, at, is_final), policy) in enumerate(zip(rows, policies, strict=True)):
        checked_id(cache_id)
        array = checked_tokens(cache_id, tokens, vocab_size) if checked is None else checked[row]
        if type(at) is not int or at != length(cache_id):
            refuse_mismatch(cache_id, position, at, length(cache_id))
        wanted = is_final is True or checked_flag(f"{cache_id!r}: is_final_chunk", is_final)
        work.append(Work(cache_id, array, wanted, None if policy is FULL else checked_policy(policy, vocab_size)))
    refuse_repeated(row.cache_id for row in work)
    return work

"""From what a caller hands in to checked rows of tokens. Nothing here knows a sequence's length."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.checks import checked_flag, checked_id, checked_int, checked_tokens, refuse_policy
from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError
from ferrum_jax.contract.policy import FullLogits, LogitsReturnPolicy
from ferrum_jax.contract.tensors import DecodeInput, PrefillInput, UnifiedBatchItem
from ferrum_jax.executor.llm_executor.metadata import (
    ATTENTION_LAYERS,
    FULL_LOGITS,
    HIDDEN_LAYERS,
    Options,
    read_options,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class RowInput:
    """New tokens of one sequence."""

    label: str  # what a message calls it
    tokens: NDArray[np.int32]  # [n]
    handle: Any = None  # of the sequence they are appended to
    name: str | None = None  # the sequence's id where there is no handle; None with neither: a new sequence
    offset: int | None = None  # position of the first token, as the caller believes
    positions: NDArray[np.integer] | None = None  # [n], the same for every token
    is_final: bool = True
    policy: LogitsReturnPolicy = FullLogits()
    options: Options = Options()


def checked_list(name: str, given: Any, kind: type[T]) -> list[T]:
    """Gives the items as a list, or raises naming the first that is of another type."""
    try:
        listed = list(given)
    except (RuntimeError, TypeError):
        raise RequestValidationError(f"{name} is a {type(given).__name__}, expected a sequence") from None
    for at, item in enumerate(listed):
        if not isinstance(item, kind):
            raise RequestValidationError(f"{name}[{at}] is a {type(item).__name__}, expected a {kind.__name__}")
    return listed


def prefill_row(label: str, given: PrefillInput, vocab_size: int) -> RowInput:
    """Reads a chunk of one prompt: `input_ids [1, n]`."""
    tokens = _one_row(f"{label}.input_ids", given.input_ids, vocab_size)
    _refuse_masked(f"{label}.attention_mask", given.attention_mask, len(tokens))
    return RowInput(
        label=label,
        tokens=tokens,
        handle=given.kv_cache,
        positions=_positions(f"{label}.position_ids", given.position_ids, len(tokens)),
        options=read_options(label, given.metadata),
    )


def decode_row(label: str, given: DecodeInput, vocab_size: int) -> RowInput:
    """Reads one token of one sequence: `input_ids [1, 1]`."""
    tokens = _one_row(f"{label}.input_ids", given.input_ids, vocab_size)
    if len(tokens) != 1:
        raise RequestValidationError(f"{label}.input_ids has shape [1, {len(tokens)}], expected [1, 1]")
    if given.kv_cache is None:
        raise RequestValidationError(f"{label}.kv_cache is None, decoding needs a handle")
    options = read_options(label, given.metadata)
    _refuse_contradiction(label, given.logits_policy, options, vocab_size)
    return RowInput(
        label=label,
        tokens=tokens,
        handle=given.kv_cache,
        positions=_positions(f"{label}.position_ids", given.position_ids, 1),
        policy=given.logits_policy,
        options=options,
    )


def unified_row(label: str, given: UnifiedBatchItem, vocab_size: int) -> RowInput:
    """Reads one row of a mixed batch."""
    options = read_options(label, given.metadata)
    _refuse_contradiction(label, given.logits_policy, options, vocab_size)
    return RowInput(
        label=label,
        tokens=checked_tokens(f"{label}.q_tokens", given.q_tokens, vocab_size),
        handle=given.kv_cache,
        name=checked_id(given.seq_id) if given.kv_cache is None else None,
        offset=checked_int(f"{label}.pos_offset", given.pos_offset, 0),
        is_final=checked_flag(f"{label}.is_final_chunk", given.is_final_chunk),
        policy=given.logits_policy,
        options=options,
    )


def draft_ids(given: Any, vocab_size: int) -> list[int]:
    """Gives drafted token ids, of which there may be none."""
    array = _array("draft_tokens", given)
    return [] if array.shape == (0,) else checked_tokens("draft_tokens", given, vocab_size).tolist()


def joined(rows: Sequence[RowInput]) -> RowInput:
    """Makes one row out of decode rows that follow each other in one sequence."""
    first = rows[0]
    for row in rows[1:]:
        if row.handle != first.handle:
            raise RequestValidationError(f"{row.label} has {row.handle!r}, {first.label} {first.handle!r}: share one")
        if row.options != first.options:
            raise RequestValidationError(f"{row.label} and {first.label} ask for different options of one sequence")
    given = [row.positions for row in rows if row.positions is not None]
    if given and len(given) != len(rows):
        raise RequestValidationError(f"{len(given)} of {len(rows)} inputs have position_ids: give all or none")
    return replace(
        first,
        label="inputs",
        tokens=np.concatenate([row.tokens for row in rows]),
        positions=np.concatenate(given) if given else None,
    )


def extended(row: RowInput, tokens: Sequence[int]) -> RowInput:
    """Appends tokens to a row of one, whose position they continue."""
    count = 1 + len(tokens)
    return replace(
        row,
        tokens=np.array([row.tokens[0], *tokens], np.int32),
        positions=None if row.positions is None else row.positions[0] + np.arange(count),
    )


def token_matrix(name: str, given: Any, vocab_size: int) -> list[NDArray[np.int32]]:
    """Gives the rows of an integer `[batch, seq]` array; every row has at least one token."""
    array = _array(name, given)
    if array.ndim != 2:
        raise RequestValidationError(f"{name} has shape {list(array.shape)}, expected [batch, seq]")
    if isinstance(given, list | tuple):
        array = np.asarray(given, object)  # a boolean among integers stays one, and is refused
    return [checked_tokens(f"{name}, row {at}", row, vocab_size) for at, row in enumerate(array)]


def _one_row(name: str, given: Any, vocab_size: int) -> NDArray[np.int32]:
    rows = token_matrix(name, given, vocab_size)
    if len(rows) != 1:
        raise RequestValidationError(f"{name} has {len(rows)} rows, expected 1: an input is one sequence")
    return rows[0]


def _array(name: str, given: Any) -> NDArray[Any]:
    """Copies an array to the host."""
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise RequestValidationError(f"{name} is no array: {problem}") from None


def _positions(name: str, given: Any, count: int) -> NDArray[np.integer] | None:
    if given is None:
        return None
    array = _array(name, given)
    if array.shape != (1, count) or array.dtype.kind not in "iu":
        raise RequestValidationError(
            f"{name} is {array.dtype} of shape {list(array.shape)}, expected integers of shape [1, {count}]"
        )
    return array[0]


def _refuse_masked(name: str, given: Any, count: int) -> None:
    if given is None:
        return
    array = _array(name, given)
    if array.shape != (1, count) or array.dtype.kind not in "iubf":
        raise RequestValidationError(
            f"{name} is {array.dtype} of shape {list(array.shape)}, expected numbers of shape [1, {count}]"
        )
    if not (array == 1).all():
        raise UnsupportedError(f"{name} hides {int((array != 1).sum())} of {count} tokens, only ones are supported")


def _refuse_contradiction(label: str, policy: LogitsReturnPolicy, options: Options, vocab_size: int) -> None:
    refuse_policy(policy, vocab_size)
    if options.is_watched:
        raise UnsupportedError(f"{label}: {HIDDEN_LAYERS} and {ATTENTION_LAYERS} are for prefill, and for it alone")
    if options.full_logits and not isinstance(policy, FullLogits):
        raise RequestValidationError(f"{label}: {FULL_LOGITS} contradicts the policy {type(policy).__name__}")

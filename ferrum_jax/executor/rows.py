"""From a caller's arguments to scheduled rows: a caller's mistakes are found here, before anything changes."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.sampler import MAX_BIAS, MAX_STOP_IDS, SlotSettings
from ferrum_jax.contract.checks import (
    check_cache_id,
    check_flag,
    check_int,
    check_policy_count,
    check_position,
    check_rows,
    check_single_tokens,
    check_tokens,
    is_integer,
    is_real,
)
from ferrum_jax.contract.decoding import FullLogits, LogitsReturnPolicy, check_mask, check_policy
from ferrum_jax.contract.errors import RequestValidationError, safe_repr
from ferrum_jax.executor.batch import (
    ALL_LOGITS,
    LAST_LOGITS,
    NO_OUTPUT,
    Output,
    SampledToken,
    ScheduledBatch,
    ScheduledRow,
    TargetScores,
)
from ferrum_jax.ops.sampling import MAX_TOP_LOGPROBS

Policies = Sequence[LogitsReturnPolicy] | None
Length = Callable[[str], int]  # positions of a cache id
_LARGEST = float(np.finfo(np.float32).max)
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, _LARGEST),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (float(np.finfo(np.float32).tiny), _LARGEST),
    "presence_penalty": (-_LARGEST, _LARGEST),
    "frequency_penalty": (-_LARGEST, _LARGEST),
    "top_k": (0, 2**31 - 1),
    "seed": (0, 2**32 - 1),
    "min_position": (0, 2**31 - 1),
    "num_logprobs": (-1, MAX_TOP_LOGPROBS),
}
_GREEDY = SampledToken(SlotSettings())
_OUTPUTS = frozenset(get_args(Output))


def check_batch(batch: ScheduledBatch, vocab_size: int) -> list[ScheduledRow]:
    """Returns the rows; raises RequestValidationError unless each is a `ScheduledRow` with an output that there is.

    Tokens must be int32 of the vocabulary, or None.
    """
    rows = []
    for row in batch:
        if not isinstance(row, ScheduledRow):
            raise RequestValidationError(f"{safe_repr(row)} is a {type(row).__name__}, expected a ScheduledRow")
        check_cache_id(row.cache_id)
        if type(row.output) not in _OUTPUTS:
            raise RequestValidationError(f"{row.cache_id!r}: the output is {safe_repr(row.output)}, no known kind")
        if type(row.start) is not int:
            row = row._replace(start=check_int(f"{row.cache_id!r}: start", row.start, 0))
        rows.append(row)
    tokens = [row.tokens for row in rows if row.tokens is not None]
    for array in tokens:
        if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1 or not len(array):
            raise RequestValidationError(f"tokens are {safe_repr(array)}, expected int32 [n] of at least one")
    if tokens:
        joined = np.concatenate(tokens)
        if joined.min() < 0 or joined.max() >= vocab_size:
            wrong = joined[(joined < 0) | (joined >= vocab_size)][0]
            raise RequestValidationError(f"token id {wrong}: ids go from 0 to {vocab_size - 1}")
    return rows


def check_settings(cache_id: str, settings: SlotSettings, position: int, vocab_size: int) -> None:
    """Raises RequestValidationError for settings out of range, or that forbid every token at `position`."""
    for name, (least, most) in _RANGES.items():
        value = getattr(settings, name)
        if not (is_integer(value) if isinstance(least, int) else is_real(value)) or not least <= value <= most:
            kind = "an integer" if isinstance(least, int) else "a number"
            raise RequestValidationError(
                f"{cache_id!r}: {name} is {safe_repr(value)}, expected {kind} from {least:g} to {most:g}"
            )
    for name, kind, size in (("bias", dict, MAX_BIAS), ("stop_ids", tuple, MAX_STOP_IDS)):
        if not isinstance(given := getattr(settings, name), kind) or len(given) > size:
            raise RequestValidationError(
                f"{cache_id!r}: {name} is {safe_repr(given)}, expected a {kind.__name__} of at most {size} tokens"
            )
    for token, value in settings.bias.items():
        if not is_integer(token) or not 0 <= token < vocab_size:
            most = vocab_size - 1
            raise RequestValidationError(
                f"{cache_id!r}: bias has the token {safe_repr(token)}, ids go from 0 to {most}"
            )
        if not is_real(value) or not (abs(value) <= _LARGEST or value == -np.inf):
            raise RequestValidationError(
                f"{cache_id!r}: the bias of {safe_repr(token)} is {safe_repr(value)}, expected a finite float32 or -inf"
            )
    for name in ("stop_ids", "allowed_ids", "seen", "generated"):
        ids: Any = getattr(settings, name)
        if ids is not None and len(ids):
            check_tokens(f"{cache_id}: {name}", ids, vocab_size)
    allowed: Sequence[int] | NDArray[np.intp] = range(vocab_size)
    mask = settings.allowed
    if mask is not None and not (isinstance(mask, np.ndarray) and mask.shape == (vocab_size,) and mask.dtype == bool):
        raise RequestValidationError(f"{cache_id!r}: allowed is {safe_repr(mask)}, expected bool [{vocab_size}]")
    forbidden = {token for token, value in settings.bias.items() if value == -np.inf}
    if position < settings.min_position:
        forbidden.update(settings.stop_ids)
    if settings.allowed_ids is not None:
        allowed = settings.allowed_ids
    elif mask is not None and (forbidden or not mask.any()):  # else the mask allows a token
        allowed = np.flatnonzero(mask)
    if all(token in forbidden for token in allowed):
        raise RequestValidationError(
            f"{cache_id!r}: no token may be chosen at position {position}: all {len(allowed)} that are allowed have a "
            "bias of -inf, complete a bad word, or would stop before min_tokens"
        )


def appended_row(cache_id: str, tokens: Sequence[int], output: Output, vocab_size: int, length: Length) -> ScheduledRow:
    """Checks tokens to be appended to a sequence; returns their row."""
    key = check_cache_id(cache_id)
    return ScheduledRow(key, check_tokens(key, tokens, vocab_size), length(key), output)


def verify_rows(rows: Sequence[Any], vocab_size: int, length: Length) -> list[ScheduledRow]:
    """Checks (cache id, tokens) rows that want the logits of every token."""
    checked = check_rows("rows", rows, "cache_id tokens")
    return [appended_row(cache_id, tokens, ALL_LOGITS, vocab_size, length) for cache_id, tokens in checked]


def score_rows(rows: Sequence[Any], vocab_size: int, length: Length) -> list[ScheduledRow]:
    """Checks (cache id, tokens, targets) rows: as many targets as tokens."""
    batch = []
    for cache_id, tokens, targets in check_rows("rows", rows, "cache_id tokens targets"):
        row = appended_row(cache_id, tokens, NO_OUTPUT, vocab_size, length)
        wanted = check_tokens(cache_id, targets, vocab_size)
        if len(wanted) != row.num_tokens:
            raise RequestValidationError(f"{cache_id!r}: {row.num_tokens} tokens, but {len(wanted)} targets")
        batch.append(row._replace(output=TargetScores(wanted)))
    return batch


def decode_rows(batch: Sequence[Any], policies: Policies, vocab_size: int, length: Length) -> list[ScheduledRow]:
    """Checks (cache id, token, position) rows."""
    rows = check_rows("batch", batch, "cache_id token pos")
    ids = [check_cache_id(row[0]) for row in rows]
    tokens = check_single_tokens(ids, [row[1] for row in rows], vocab_size)
    outputs = _outputs(len(rows), policies, vocab_size)
    return _placed(ids, tokens, "pos", [row[2] for row in rows], outputs, length)


def unified_rows(items: Sequence[Any], policies: Policies, vocab_size: int, length: Length) -> list[ScheduledRow]:
    """Checks (cache id, tokens, position offset, is final chunk) rows."""
    rows = check_rows("items", items, "cache_id q_tokens pos_offset is_final_chunk")
    ids = [check_cache_id(row[0]) for row in rows]
    tokens = [check_tokens(key, row[1], vocab_size) for key, row in zip(ids, rows, strict=True)]
    finals = [check_flag(f"{key!r}: is_final_chunk", row[3]) for key, row in zip(ids, rows, strict=True)]
    outputs = _outputs(len(rows), policies, vocab_size)
    outputs = [one if is_final else NO_OUTPUT for one, is_final in zip(outputs, finals, strict=True)]
    return _placed(ids, tokens, "pos_offset", [row[2] for row in rows], outputs, length)


def _placed(
    ids: Sequence[str],
    tokens: Sequence[NDArray[np.int32]],
    position: str,  # name of `starts` in messages
    starts: list[Any],
    outputs: Sequence[Output],
    length: Length,
) -> list[ScheduledRow]:
    lengths = list(map(length, ids))
    if not {int}.issuperset(map(type, starts)) or starts != lengths:
        starts = [check_position(key, position, *one) for key, *one in zip(ids, starts, lengths, strict=True)]
    return list(map(ScheduledRow, ids, tokens, starts, outputs))


def _outputs(count: int, policies: Policies, vocab_size: int) -> list[Output]:
    """Checks the policies of so many rows; returns what each row wants."""
    if policies is None:
        return [LAST_LOGITS] * count
    check_policy_count(count, policies)
    return [_output(policy, vocab_size) for policy in policies]


def _output(policy: LogitsReturnPolicy, vocab_size: int) -> Output:
    """Checks a policy; returns what its row wants."""
    policy = check_policy(policy, vocab_size)
    if isinstance(policy, FullLogits):
        return LAST_LOGITS
    mask, penalty = policy.token_mask, policy.repetition_penalty
    if penalty is not None and not len(penalty.token_ids):
        penalty = None
    if mask is None and penalty is None:
        return _GREEDY
    return SampledToken(
        SlotSettings(
            allowed=None if mask is None else check_mask(mask, vocab_size),
            repetition_penalty=1.0 if penalty is None else float(penalty.penalty),
            seen=None if penalty is None else np.asarray(penalty.token_ids, np.int64),
        )
    )

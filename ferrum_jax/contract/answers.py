"""What a model returns besides its config, and the checks of it, for models of third parties."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.checks import is_integer
from ferrum_jax.contract.decoding import FullLogits, LogitsReturnPolicy, check_mask
from ferrum_jax.contract.errors import ModelError, safe_repr

if TYPE_CHECKING:
    from ferrum_jax.contract.llm import DecoderOnlyLLM

T = TypeVar("T")
Logits: TypeAlias = NDArray[np.float32]  # [V]
Answer: TypeAlias = Logits | int  # of a row: logits, or the token id that its policy asks for


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenScores:
    """Log-probabilities of given tokens, and the likeliest tokens instead of them."""

    logprobs: NDArray[np.float32]  # [n]: of the given tokens, under the model's own distribution
    greedy_ids: NDArray[np.int32]  # [n]: the likeliest tokens there


@dataclass(frozen=True, eq=False, kw_only=True)
class Captured:
    """Logits of a chunk of n tokens, and activations of chosen layers; S is the sequence's length after the chunk."""

    logits: NDArray[np.float32]  # [n, vocab]
    hidden: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)  # [n, hidden], by the layers before
    attention_weights: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)  # [heads, n, S], by layer
    points: Mapping[Any, NDArray[Any]] = field(default_factory=dict)  # [n, ...], by hook point: (name, layer)


def score_targets(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> TokenScores:
    """Returns the scores of `targets` `[n]`; row i of `logits` `[n, vocab]` is the distribution of target i."""
    chosen = np.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    logprobs = chosen - np.logaddexp.reduce(logits, axis=1, dtype=np.float64)
    return TokenScores(logprobs=logprobs.astype(np.float32), greedy_ids=logits.argmax(axis=1).astype(np.int32))


def choose(logits: Logits, policy: LogitsReturnPolicy) -> Answer:
    """Returns the logits, or the token that a greedy policy, which `check_policy` has accepted, chooses of them."""
    if isinstance(policy, FullLogits):
        return logits
    scores = logits.copy()
    penalty = policy.repetition_penalty
    if penalty is not None and len(penalty.token_ids):
        ids = np.unique(np.asarray(penalty.token_ids, np.int64))
        with np.errstate(over="ignore"):
            scores[ids] = np.where(scores[ids] > 0, scores[ids] / penalty.penalty, scores[ids] * penalty.penalty)
    scores = np.maximum(scores, np.finfo(np.float32).min)  # above what is not allowed
    if policy.token_mask is not None:
        scores[~check_mask(policy.token_mask, len(scores))] = -np.inf
    return int(np.argmax(scores))


def check_logits(model: "DecoderOnlyLLM", logits: Any) -> Logits:
    """Returns a model's logits of one token as float32 `[vocab]`.

    Raises:
        ModelError: another shape, no numbers, a NaN, +inf, or -inf for every token. A token of -inf is never chosen.
    """
    return _check_array(model, "logits", logits, (model.config.vocab_size,))


def kept(logits: Any) -> Any:
    """Returns logits that stay as they are, also of a model that writes each call's to one place."""
    return logits.copy() if isinstance(logits, np.ndarray) else logits


def check_logit_rows(model: "DecoderOnlyLLM", logits: Any, num_rows: int) -> NDArray[np.float32]:
    """Returns a model's logits of `num_rows` tokens as float32 `[num_rows, vocab]`; ModelError as `check_logits`."""
    return _check_array(model, "logits", logits, (num_rows, model.config.vocab_size))


def check_answers(
    model: "DecoderOnlyLLM", answers: Any, wanted: Sequence[LogitsReturnPolicy | None]
) -> list[Answer | None]:
    """Returns one answer per row, as `wanted` says: logits, a token id, or None where it is None (no final chunk).

    Raises:
        ModelError: another number of answers, an answer where there should be none, none where there should be one,
            logits that `check_logits` refuses, or what is no token id.
    """
    check_answer_count(model, answers, len(wanted))
    name, vocab_size = type(model).__name__, model.config.vocab_size
    checked: list[Answer | None] = []
    for at, (answer, policy) in enumerate(zip(answers, wanted, strict=True)):
        if (answer is None) != (policy is None):
            raise ModelError(
                f"{name} returned {safe_repr(answer)} for row {at}, where is_final is {policy is not None}"
            )
        if policy is None:
            checked.append(None)
        elif isinstance(policy, FullLogits):
            checked.append(check_logits(model, answer))
        elif is_integer(answer) and 0 <= answer < vocab_size:
            checked.append(int(answer))
        else:
            limit = vocab_size - 1
            raise ModelError(f"{name} returned the token {safe_repr(answer)}, expected an id from 0 to {limit}")
    return checked


def check_answer_count(model: "DecoderOnlyLLM", answers: Any, num_rows: int) -> None:
    """Raises ModelError unless a model returned a sequence of one answer per row."""
    is_sequence = isinstance(answers, Sequence) or (hasattr(answers, "__array__") and np.ndim(answers) > 0)
    if not is_sequence or len(answers) != num_rows:
        given = f"{len(answers)} answers" if is_sequence else f"a {type(answers).__name__}"
        raise ModelError(f"{type(model).__name__} returned {given} for {num_rows} rows")


def check_captured(
    model: "DecoderOnlyLLM", captured: Any, num_tokens: int, hidden: Sequence[int], attention_weights: Sequence[int]
) -> Captured:
    """Returns what a model captured of `num_tokens` tokens: the layers that were asked for, with finite values."""
    if not isinstance(captured, Captured):
        raise ModelError(f"{type(model).__name__}.capture returned {safe_repr(captured)}, expected a Captured")
    missing = sorted({*hidden} - {*captured.hidden}), sorted({*attention_weights} - {*captured.attention_weights})
    if any(missing):
        raise ModelError(f"{type(model).__name__} captured no hidden states {missing[0]} and no weights {missing[1]}")
    states = {
        layer: _check_array(model, "hidden states", captured.hidden[layer], (num_tokens, model.config.hidden_size))
        for layer in hidden
    }
    weights = {}
    for layer in attention_weights:
        given = captured.attention_weights[layer]
        heads, _, positions = (*np.shape(given), 0, 0, 0)[:3]
        weights[layer] = _check_array(model, "attention weights", given, (heads, num_tokens, positions))
    logits = check_logit_rows(model, captured.logits, num_tokens)
    return Captured(logits=logits, hidden=states, attention_weights=weights)


def check_scores(model: "DecoderOnlyLLM", scores: Any, num_targets: int) -> TokenScores:
    """Returns a model's scores of `num_targets` tokens; a target may be impossible, but no score is NaN or +inf."""
    if not isinstance(scores, TokenScores):
        raise ModelError(f"{type(model).__name__}.score_batch returned {safe_repr(scores)}, expected TokenScores")
    logprobs = _check_shape(model, "log-probabilities", scores.logprobs, (num_targets,))
    ids = _check_shape(model, "greedy ids", scores.greedy_ids, (num_targets,), np.int64)
    limit = model.config.vocab_size - 1
    if not (logprobs < np.inf).all():
        raise ModelError(f"{type(model).__name__} returned log-probabilities that are NaN or infinite")
    if num_targets and not 0 <= ids.min() <= ids.max() <= limit:
        wrong = ids[(ids < 0) | (ids > limit)][0]
        raise ModelError(f"{type(model).__name__} returned the greedy id {wrong}, expected ids from 0 to {limit}")
    return TokenScores(logprobs=logprobs, greedy_ids=ids.astype(np.int32))


def check_kind(model: "DecoderOnlyLLM", method: str, value: Any, kind: type[T]) -> T | None:
    """Returns what a method returned, which must be None or of one type."""
    if value is not None and not isinstance(value, kind):
        name = f"{type(model).__name__}.{method}"
        raise ModelError(f"{name} returned {safe_repr(value)}, expected a {kind.__name__}")
    return value


def check_length(model: "DecoderOnlyLLM", method: str, value: Any) -> int:
    """Returns a number of positions."""
    if not is_integer(value) or value < 0:
        name = f"{type(model).__name__}.{method}"
        raise ModelError(f"{name} returned {safe_repr(value)}, expected an integer of at least 0")
    return int(value)


def _check_array(model: "DecoderOnlyLLM", what: str, given: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    array = _check_shape(model, what, given, shape)
    if array.size and not np.isfinite(array.max(axis=-1)).all():  # a NaN is the maximum of its row
        raise ModelError(f"{type(model).__name__} returned {what} that are not finite")
    return array


def _check_shape(
    model: "DecoderOnlyLLM", what: str, given: Any, shape: tuple[int, ...], dtype: Any = np.float32
) -> NDArray[Any]:
    name, kinds = type(model).__name__, "fiu" if dtype is np.float32 else "iu"
    try:
        array = np.asarray(given)
        if array.dtype.kind in kinds or (array.dtype.name == "bfloat16" and dtype is np.float32):
            with np.errstate(over="ignore"):  # an infinity is found below
                array = array.astype(dtype, copy=False)
    except (RuntimeError, TypeError, ValueError) as problem:
        raise ModelError(f"{name} returned {what} that are no array: {problem}") from None
    if array.dtype != dtype:
        raise ModelError(f"{name} returned {what} of dtype {array.dtype}, expected {np.dtype(dtype)}")
    if array.shape != shape:
        raise ModelError(f"{name} returned {what} of shape {list(array.shape)}, expected {list(shape)}")
    return array

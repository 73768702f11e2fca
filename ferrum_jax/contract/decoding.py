"""How a row's next token is chosen: all its logits for the caller, an arg-max where the model runs, or many draws."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.checks import check_count, check_setting, check_tokens, is_integer, is_real
from ferrum_jax.contract.errors import RequestValidationError, safe_repr

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSelectionMask:
    """Which token ids may be chosen.

    `valid_token_mask` is int8 `[<= vocab]`: nonzero is allowed, ids past its end are not. `fingerprint` names
    the mask's content, so that the same mask need not be uploaded twice.
    """

    fingerprint: int | str
    valid_token_mask: Any  # array-like int8 [<= V]


@dataclass(frozen=True, kw_only=True)
class GreedyRepetitionPenalty:
    """Divides positive and multiplies negative logits of `token_ids` by `penalty` before the arg-max.

    Keskar et al. 2019, "CTRL", section 4.1.
    """

    penalty: float
    token_ids: Sequence[int]

    def __post_init__(self):
        if not is_real(self.penalty) or not _LEAST <= self.penalty <= _MOST:
            raise RequestValidationError(
                f"repetition penalty is {safe_repr(self.penalty)}, it must be a positive and finite number in float32"
            )


@dataclass(frozen=True)
class FullLogits:
    """All `vocab` logits are copied to the host."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GreedyArgmax:
    """The arg-max is taken on the device and one token id is copied to the host."""

    token_mask: TokenSelectionMask | None = None
    repetition_penalty: GreedyRepetitionPenalty | None = None


LogitsReturnPolicy: TypeAlias = FullLogits | GreedyArgmax


def check_mask(mask: Any, vocab_size: int) -> NDArray[np.bool_]:
    """Returns which tokens a `TokenSelectionMask` allows, `[vocab_size]`; at least one must be.

    Ids past the mask's end are not allowed; a mask that is longer than the vocabulary is cut.
    """
    if not isinstance(mask, TokenSelectionMask):
        raise RequestValidationError(f"token mask {safe_repr(mask)}: expected a TokenSelectionMask")
    label = safe_repr(mask.fingerprint)
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


def check_policy(policy: LogitsReturnPolicy | type[LogitsReturnPolicy], vocab_size: int) -> LogitsReturnPolicy:
    """Returns a policy whose mask allows a token and whose penalised ids are in the vocabulary.

    One of the two classes itself stands for its instance without arguments.
    """
    if policy is FullLogits or policy is GreedyArgmax:
        return policy()
    if isinstance(policy, FullLogits):
        return policy
    if not isinstance(policy, GreedyArgmax):
        raise RequestValidationError(f"logits policy {safe_repr(policy)}: expected FullLogits or GreedyArgmax")
    penalty, mask = policy.repetition_penalty, policy.token_mask
    if penalty is not None:
        if not isinstance(penalty, GreedyRepetitionPenalty):
            raise RequestValidationError(f"repetition penalty {safe_repr(penalty)}: expected a GreedyRepetitionPenalty")
        if check_count("token ids of a repetition penalty", penalty.token_ids):
            check_tokens("repetition penalty", penalty.token_ids, vocab_size)
    if mask is not None:
        check_mask(mask, vocab_size)
    return policy


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn from the logits. The defaults are greedy.

    Args:
        temperature: 0 takes the best token; above, logits are divided by it before drawing.
        top_k: draw among the k best; 0 is off.
        top_p: draw among the fewest tokens whose probabilities reach this; 1 is off.
        min_p: draw among tokens at least this likely relative to the best; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of the sequence's tokens so far.

    Raises:
        InvalidParameterError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        check_setting("temperature", self, lambda x: is_real(x) and 0 <= x <= _MOST, "a number from 0 to 3.4e38")
        check_setting("top_k", self, lambda x: is_integer(x) and x >= 0, "an integer of at least 0")
        check_setting("top_p", self, lambda x: is_real(x) and 0 < x <= 1, "more than 0 and at most 1")
        check_setting("min_p", self, lambda x: is_real(x) and 0 <= x <= 1, "from 0 to 1")
        expected = "a positive number of at most 3.4e38"
        check_setting("repetition_penalty", self, lambda x: is_real(x) and _LEAST <= x <= _MOST, expected)


@dataclass(frozen=True, kw_only=True)
class DecodeRun:
    """Asks `decode_n` for up to `max_tokens` tokens of one sequence.

    Args:
        cache_id: the sequence.
        token: its newest token, which is not in the KV yet.
        pos: where that token goes: the cache's length.
        max_tokens: tokens to choose at most.
        stop_ids: at most 16 ids that end the run once they are chosen.
        sampling: how tokens are chosen.
        seed: of the draws; the draw of a token depends on this and its position alone.
    """

    cache_id: str
    token: int
    pos: int
    max_tokens: int
    stop_ids: Collection[int] = ()
    sampling: Sampling = Sampling()
    seed: int = 0


@dataclass(frozen=True)
class DecodedRun:
    """The chosen tokens, and each one's log-probability under the model's own distribution.

    A log-probability is NaN where a `ModelRunner`'s logits are not finite; the token then means nothing.
    `processed_logprobs` are those under the distribution that it was drawn from, where the model tells. `LLM` calls
    `decode_n` of a model that is no `ModelRunner` only where that is the model's own, or nobody asked.

    All but the last are in the KV, after `DecodeRun.token`.
    """

    token_ids: list[int]
    logprobs: list[float]
    processed_logprobs: list[float] | None = None

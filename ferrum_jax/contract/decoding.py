"""Many tokens of several sequences in one call, chosen where the model runs."""

import numbers
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ferrum_jax.contract.errors import InvalidParameterError, shown

_MOST = 3e38  # in float32
MOST_STOP_IDS = 16  # of one run


def is_real(value: Any) -> bool:
    """True of a number that is no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """True of an integer that is no boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def refuse_unless(name: str, settings: Any, holds: Callable[[Any], bool], expected: str) -> None:
    """Raises InvalidParameter, naming the value and what was expected, unless a setting's value holds."""
    value = getattr(settings, name)
    if not holds(value):
        raise InvalidParameterError(f"{name} is {shown(value)}, expected {expected}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen from the logits. The defaults are greedy.

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
        refuse_unless("temperature", self, lambda x: is_real(x) and 0 <= x <= _MOST, "a number of at least 0")
        refuse_unless("top_k", self, lambda x: is_integer(x) and x >= 0, "an integer of at least 0")
        refuse_unless("top_p", self, lambda x: is_real(x) and 0 < x <= 1, "more than 0 and at most 1")
        refuse_unless("min_p", self, lambda x: is_real(x) and 0 <= x <= 1, "from 0 to 1")
        refuse_unless("repetition_penalty", self, lambda x: is_real(x) and 0 < x <= _MOST, "a positive number")


@dataclass(frozen=True, kw_only=True)
class DecodeRun:
    """Asks `decode_n` for up to `max_tokens` tokens of one sequence.

    Args:
        cache_id: the sequence.
        token: its newest token, which is not in the KV yet.
        pos: where that goes: the cache's length.
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
    """The tokens that were chosen, and each one's log-probability under the model's own distribution.

    All but the last are in the KV, after the token that was handed in.
    """

    token_ids: list[int]
    logprobs: list[float]

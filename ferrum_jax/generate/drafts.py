"""What speculation guesses: tokens that may come next, and who proposes them."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.generate.sampler import Turn


@dataclass(frozen=True)
class Draft:
    """Tokens that are proposed to follow a sequence.

    `probabilities`, `[n, vocab]` float64, says from which distributions they were drawn independently of everything
    else; None where the tokens are no such draws.
    """

    tokens: list[int]
    probabilities: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class DraftWant:
    """A sequence for which up to `count` tokens are to be proposed."""

    cache_id: str  # of the request: stays the same while it lives
    turn: Turn
    count: int


class DraftSource(abc.ABC):
    """Proposes tokens. Whatever it proposes, answers stay right: a bad proposal costs time only."""

    num_tokens: int  # proposed at most
    has_probabilities: bool = False  # whether drafts may come with them

    @abc.abstractmethod
    def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
        """Gives one draft per sequence, in order; an empty one where nothing comes to mind."""

    def refuse_target(self, target: DecoderOnlyLLM) -> None:
        """Raises if proposals make no sense for this model."""
        return None

    def warmup(self, *, progress: bool = True) -> None:
        """Compiles whatever proposing may need."""
        return None

    def release(self, cache_id: str) -> None:
        """Forgets a sequence; an unknown one is no error."""
        return None

    def reset(self) -> None:
        """Forgets every sequence; also the way back after a failure."""
        return None

    def close(self) -> None:
        """Frees what the source owns."""
        return None


def checked_count(name: str, value: Any) -> int:
    """Gives a number of tokens, or raises if it is none of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidParameterError(f"{name} is {value!r}, expected an integer of at least 1")
    return value

"""What speculation guesses: tokens that may come next, and who proposes them."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract.checks import check_int
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.contract.llm import DecoderOnlyLLM


@dataclass(frozen=True)
class Draft:
    """Tokens that are proposed to follow a sequence.

    `probabilities`, `[n, vocab]` float64, says from which distributions they were drawn independently of everything
    else; None where the tokens are no such draws. `masks` are those of `VerifiedTokens`, for an answer that has a form.
    """

    tokens: list[int]
    probabilities: NDArray[np.float64] | None = None
    masks: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class DraftWant:
    """A sequence for which up to `count` tokens are to be proposed."""

    cache_id: str  # of the request: stays the same while it lives
    tokens: Sequence[int]  # its prompt and answer so far
    settings: SlotSettings  # how its next token is chosen
    count: int
    num_prompt: int = 0  # of the tokens, those that were not generated


class DraftSource(abc.ABC):
    """Proposes tokens. Whatever it proposes, answers stay right: a bad proposal costs time only."""

    num_tokens: int  # proposed at most
    has_probabilities: bool = False  # whether drafts may come with them

    @abc.abstractmethod
    def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
        """Returns one draft per sequence, in order; empty where there is no proposal."""

    def check_target(self, target: DecoderOnlyLLM) -> None:
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


class PromptLookup(DraftSource):
    """Proposes what followed the last tokens where they stood before, in the prompt or in the answer.

    The longest run of at most `max_ngram` last tokens that occurred before decides, and its most recent occurrence.
    Saxena 2023, "Prompt Lookup Decoding".
    """

    def __init__(self, max_ngram: int = 3, num_tokens: int = 4):
        self.max_ngram = check_int("max_ngram", max_ngram, 1, InvalidParameterError)
        self.num_tokens = check_int("num_tokens", num_tokens, 1, InvalidParameterError)

    def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
        """Returns each sequence's continuation after the n-gram that it ends in."""
        return [Draft(look_up(want.tokens, self.max_ngram, want.count)) for want in wants]


def look_up(tokens: Sequence[int], max_ngram: int, count: int) -> list[int]:
    """Returns `count` tokens that followed the longest known end of `tokens`, or none.

    Where fewer follow, they go round: the end is taken to repeat itself as it just did.
    """
    ids = np.asarray(tokens)
    hits = np.flatnonzero(ids[:-1] == ids[-1])  # where an n-gram ends that equals the last one
    if not len(hits):
        return []
    for n in range(2, max_ngram + 1):
        longer = hits[hits >= n - 1]
        longer = longer[ids[longer - (n - 1)] == ids[-n]] if len(longer) else longer
        if not len(longer):
            break
        hits = longer
    followed = tokens[int(hits[-1]) + 1 :]
    return [followed[at % len(followed)] for at in range(count)]

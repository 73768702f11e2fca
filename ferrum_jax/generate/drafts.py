"""Drafts for speculative decoding, and the sources that propose them."""

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

    `probabilities`, `[n, V]` float64, are the distributions from which the tokens were drawn, with noise used nowhere
    else; None if they were chosen otherwise. `masks` are those of `VerifiedTokens`, for an answer that has a form.
    """

    tokens: list[int]
    probabilities: NDArray[np.float64] | None = None
    masks: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class DraftWant:
    """A sequence for which a source is to propose up to `count` tokens."""

    cache_id: str  # the request's; constant while the sequence lives
    tokens: Sequence[int]  # prompt and answer so far
    settings: SlotSettings  # how the next token is chosen
    count: int
    num_prompt: int = 0  # how many of `tokens` are the prompt


class DraftSource(abc.ABC):
    """Proposes tokens. Answers stay right whatever it proposes: a bad proposal only costs time."""

    num_tokens: int  # the most that it proposes

    @abc.abstractmethod
    def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
        """Returns one draft per sequence, in order; a draft without tokens where there is no proposal."""

    def check_target(self, target: DecoderOnlyLLM) -> None:
        """Raises if the source cannot draft for this model."""
        return None

    def warmup(self, *, progress: bool = True) -> None:
        """Compiles all programs that proposing may need."""
        return None

    def release(self, cache_id: str) -> None:
        """Forgets a sequence; an unknown one is no error."""
        return None

    def reset(self) -> None:
        """Forgets every sequence; also recovers from a failure."""
        return None

    def close(self) -> None:
        """Frees what the source owns."""
        return None


class PromptLookup(DraftSource):
    """Proposes the tokens that followed an earlier occurrence of the last tokens, in the prompt or the answer.

    It looks for the longest n-gram, of at most `max_ngram` tokens, at the end of the sequence that occurred before, and
    takes its most recent occurrence. Saxena 2023, "Prompt Lookup Decoding".
    """

    def __init__(self, max_ngram: int = 3, num_tokens: int = 4):
        self.max_ngram = check_int("max_ngram", max_ngram, 1, InvalidParameterError)
        self.num_tokens = check_int("num_tokens", num_tokens, 1, InvalidParameterError)

    def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
        """Returns for each sequence what followed the n-gram at its end before."""
        return [Draft(look_up(want.tokens, self.max_ngram, want.count)) for want in wants]


def look_up(tokens: Sequence[int], max_ngram: int, count: int) -> list[int]:
    """Returns `count` tokens that followed an earlier occurrence of the last n-gram of `tokens`, or none.

    If fewer tokens follow it, they are repeated cyclically: the text is assumed to repeat itself.
    """
    ids = np.asarray(tokens)
    hits = np.flatnonzero(ids[:-1] == ids[-1])  # ends of n-grams that equal the last one
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

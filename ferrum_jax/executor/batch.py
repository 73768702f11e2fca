"""Batches as the pipeline takes them: rows of new tokens, each with the output that it wants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.models.hooks import Point


class NoOutput(NamedTuple):
    """Nothing comes back: an intermediate chunk of a prompt."""


class LastLogits(NamedTuple):
    """The last token's logits come back, float32 `[V]`."""


class AllLogits(NamedTuple):
    """Every token's logits come back, float32 `[n, V]`; known prefixes are not reused."""


class SampledToken(NamedTuple):
    """A token is chosen on the device after the last one; a `TokenChoice` comes back.

    `mask` returns int32 `[V / 32]`, bits of the tokens allowed now, where the settings have masks. It is called while
    the step runs, and must not raise.
    """

    settings: SlotSettings  # one object while they do not change: it is compared by identity
    mask: Callable[[], NDArray[np.int32]] | None = None


class VerifiedTokens(NamedTuple):
    """The tokens are the newest one and drafted ones; a list of `TokenChoice` comes back, one after each of them.

    `masks` are int32 `[n, V / 32]`, bits of the tokens allowed after each, where the settings have masks.
    """

    settings: SlotSettings
    masks: NDArray[np.int32] | None = None


class Distributions(NamedTuple):
    """For each token, the distribution that the next one is drawn from comes back, float32 `[n, V]`."""

    settings: SlotSettings


class TargetScores(NamedTuple):
    """Log-probabilities of given tokens come back, as `Scores`; known prefixes are not reused."""

    targets: NDArray[np.int32]  # [n]: the token after each one
    with_alternatives: bool = False
    settings: SlotSettings | None = None  # scores under these, too; the targets count as generated from then on


Output: TypeAlias = NoOutput | LastLogits | AllLogits | SampledToken | VerifiedTokens | Distributions | TargetScores
NO_OUTPUT, LAST_LOGITS, ALL_LOGITS = NoOutput(), LastLogits(), AllLogits()


class ScheduledRow(NamedTuple):
    """New tokens of one sequence."""

    cache_id: str
    tokens: NDArray[np.int32] | None  # [n], in the vocabulary; None: the one token that was sampled last for it
    start: int  # position of the first one: the sequence's length
    output: Output = LAST_LOGITS
    capture: tuple[Point, ...] = ()  # hook points of its tokens; known prefixes are not reused where there are any

    @property
    def num_tokens(self) -> int:
        """How many tokens the row has."""
        return 1 if self.tokens is None else len(self.tokens)


ScheduledBatch: TypeAlias = Sequence[ScheduledRow]


class WithCaptures(NamedTuple):
    """The answer of a row that captures."""

    answer: Any  # as its output says
    points: dict[Point, NDArray[Any]]  # [n, ...] of its tokens; of attention [N, n, S], S being its length after them


NOT_FINITE = "its logits are not finite: weights, adapter or intervention may hold NaN, or float16 has overflowed"


class TokenChoice(NamedTuple):
    """A token that was chosen on the device; log-probabilities are 0 where its settings want none.

    `logprob` is NaN, whatever the settings want, if the logits are not finite; the token then means nothing.
    """

    token_id: int
    logprob: float  # under the model's own distribution
    processed_logprob: float  # under the distribution that it was drawn from
    alternatives: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first, as many as were asked for


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """Log-probabilities and likeliest tokens, one for each scored token."""

    logprobs: NDArray[np.float32]  # [n]: of the given tokens, under the model's own distribution
    greedy_ids: NDArray[np.int32]  # [n]: the likeliest tokens there
    top_ids: NDArray[np.int32] | None = None  # [n, k]: the likeliest ones, best first
    top_logprobs: NDArray[np.float32] | None = None  # [n, k]
    processed: NDArray[np.float32] | None = None  # [n]: under the settings that were given

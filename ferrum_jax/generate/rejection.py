"""Speculative sampling with a draft's own probabilities, on the host in float64.

Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1; Chen et al.
2023, "Accelerating Large Language Model Decoding with Speculative Sampling", algorithm 2.
"""

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Distributions = NDArray[np.float64]  # [n, V], each row sums to 1


class Purpose(enum.Enum):
    """What a random number is for: each purpose has its own numbers, so that none is used twice."""

    PROPOSE = 0
    ACCEPT = 1
    REDRAW = 2


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """Returns the random number in [0, 1) for a seed, a position and a purpose."""
    return float(np.random.default_rng([seed, position, purpose.value]).random())


def draw(weights: NDArray[np.float64], number: float) -> int:
    """Returns the first token at which the cumulative sum of `weights` exceeds `number` times their total."""
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, number * sums[-1], side="right").clip(max=np.flatnonzero(weights)[-1]))


def accept(
    tokens: Sequence[int], draft: Distributions, target: Distributions, *, seed: int, position: int
) -> list[int]:
    """Returns the accepted tokens of a draft and one more; together they have the target's distribution.

    Args:
        tokens: n drafted tokens, each drawn from its row of `draft`.
        draft: the draft's distributions, `[n, V]`.
        target: `[n + 1, V]`: row i is the target's distribution after i of the tokens.
        seed: the request's.
        position: position of the first drafted token in the sequence.
    """
    for at, token in enumerate(tokens):
        p, q = target[at], draft[at]
        if uniform(seed, position + at, Purpose.ACCEPT) * q[token] < p[token]:
            continue
        rest = np.maximum(p - q, 0.0)
        # `rest` is zero only if both distributions are equal; then only rounding has rejected the token.
        return [*tokens[:at], draw(rest if rest.any() else p, uniform(seed, position + at, Purpose.REDRAW))]
    last = position + len(tokens)
    return [*tokens, draw(target[len(tokens)], uniform(seed, last, Purpose.REDRAW))]

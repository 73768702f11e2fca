"""What a model says of tokens that were given, not chosen."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenScores:
    """One figure for each token of a row that was scored."""

    logprobs: NDArray[np.float32]  # [n]: of the given tokens, under the model's own distribution
    greedy_ids: NDArray[np.int32]  # [n]: the likeliest tokens there


def scores_of(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> TokenScores:
    """Scores targets on the host: row i of `logits` `[n, vocab]` is the distribution that target i comes from."""
    given = np.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    logprobs = given - np.logaddexp.reduce(logits, axis=1, dtype=np.float64)
    return TokenScores(logprobs=logprobs.astype(np.float32), greedy_ids=logits.argmax(axis=1).astype(np.int32))

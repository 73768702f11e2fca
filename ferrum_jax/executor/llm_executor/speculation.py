"""How many drafted tokens a model agrees with."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import RequestValidationError, shown
from ferrum_jax.contract.llm import Logits
from ferrum_jax.executor.llm_executor import forwards
from ferrum_jax.executor.llm_executor.ledger import TrackedSequence
from ferrum_jax.executor.llm_executor.profile import overrides
from ferrum_jax.executor.llm_executor.savepoint import Savepoint


def checked_threshold(threshold: Any) -> float:
    """Gives an acceptance threshold between 0 and 1, or raises."""
    number = isinstance(threshold, int | float | np.integer | np.floating) and not isinstance(threshold, bool)
    if not number or not 0 <= threshold <= 1:
        raise RequestValidationError(f"acceptance_threshold is {shown(threshold)}, expected a number from 0 to 1")
    return float(threshold)


def is_accepted(logits: Logits, token: int, threshold: float) -> bool:
    """Says whether p(token) >= threshold · max p, taken in the logarithm: softmax's denominator cancels."""
    if threshold == 0:
        return True
    return bool(np.float64(logits[token]) - np.float64(logits.max()) >= math.log(threshold))


def advance(point: Savepoint, live: TrackedSequence, tokens: Sequence[int], threshold: float) -> tuple[int, Logits]:
    """Appends the first token and what is accepted of the rest; gives how many were, and the logits after them.

    One forward over all of them and a roll back of the rest; token by token where the model cannot roll back.
    """
    draft = tokens[1:]
    if not overrides(point.ledger.model, "truncate_kv"):
        logits = forwards.step(point, live, tokens[0])
        for accepted, drafted in enumerate(draft):
            if not is_accepted(logits, drafted, threshold):
                return accepted, logits
            logits = forwards.step(point, live, drafted)
        return len(draft), logits
    end = live.length + 1
    rows = forwards.verify(point, live, np.array(tokens, np.int32))
    accepted = count_accepted(rows, draft, threshold)
    point.ledger.truncate(live, end + accepted)
    return accepted, rows[accepted]


def count_accepted(rows: NDArray[np.float32], draft: Sequence[int], threshold: float) -> int:
    """Counts the drafted tokens before the first that is not accepted; `rows[i]` judges `draft[i]`."""
    for at, drafted in enumerate(draft):
        if not is_accepted(rows[at], drafted, threshold):
            return at
    return len(draft)

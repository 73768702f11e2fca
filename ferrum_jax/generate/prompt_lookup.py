"""Drafts without a model: what followed the same words before."""

from collections.abc import Sequence

import numpy as np

from ferrum_jax.generate.drafts import Draft, DraftSource, DraftWant, checked_count


class PromptLookup(DraftSource):
    """Proposes what followed the last tokens where they stood before, in the prompt or in the answer.

    The longest run of at most `max_ngram` last tokens that occurred before decides, and its most recent occurrence.
    Saxena 2023, "Prompt Lookup Decoding".
    """

    def __init__(self, max_ngram: int = 3, num_tokens: int = 4):
        self.max_ngram = checked_count("max_ngram", max_ngram)
        self.num_tokens = checked_count("num_tokens", num_tokens)

    def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
        """Gives each sequence's continuation after the n-gram that it ends in."""
        return [Draft(look_up(want.turn.tokens, self.max_ngram, want.count)) for want in wants]


def look_up(tokens: Sequence[int], max_ngram: int, count: int) -> list[int]:
    """Gives `count` tokens that followed the longest known end of `tokens`, or none.

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

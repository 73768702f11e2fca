"""The usual decode step, found quickly: one token for each of several sequences that have room for it."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from ferrum_jax.contract.checks import PLAIN_INTEGERS
from ferrum_jax.kvcache.slots import LiveSequence, SlotTable


class Steady(NamedTuple):
    """Rows that need no slot, no block and no copy, and ask for all logits."""

    lives: list[LiveSequence]
    tokens: Sequence[int]
    lengths: list[int]  # positions before these tokens


def steady_rows(batch: Sequence[Any], slots: SlotTable, vocab_size: int) -> Steady | None:
    """Gives (cache id, token, position) rows, with no adapters, as a usual step; None if anything is unusual, or wrong.

    It only recognises: `work.decode_rows` and `kvcache.growth` serve everything else, and say what is wrong with it.
    """
    if type(batch) not in (list, tuple) or set(map(type, batch)) != {tuple} or set(map(len, batch)) != {3}:
        return None
    ids, tokens, at = zip(*batch, strict=True)
    if set(map(type, ids)) != {str} or set(map(type, at)) != {int} or not PLAIN_INTEGERS.issuperset(map(type, tokens)):
        return None
    if len(set(ids)) != len(ids) or min(tokens) < 0 or max(tokens) >= vocab_size:
        return None
    lives = slots.find(ids)
    if lives is None or any(live.adapter is not None for live in lives):
        return None
    lengths = [len(live.tokens) for live in lives]
    rooms = [live.room for live in lives]
    if lengths != list(at) or any(map(operator.ge, lengths, rooms)):
        return None
    return Steady(lives, tokens, lengths)

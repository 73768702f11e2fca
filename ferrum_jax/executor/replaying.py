"""Sequences whose rings have lost what their next token would see: what it takes to read them again."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ferrum_jax.compile import buckets
from ferrum_jax.compile.buckets import Ladders, StepPlan
from ferrum_jax.executor.adapters import with_adapters
from ferrum_jax.executor.device import Row
from ferrum_jax.kvcache.slots import LiveSequence, SlotTable


class Replay(NamedTuple):
    """Sequences that are read again, as rows of steps that answer nothing."""

    lives: list[LiveSequence]
    rows: list[Row]
    plans: list[StepPlan]


def plan_replay(slots: SlotTable, rows: Iterable[tuple[LiveSequence | None, int]], ladders: Ladders) -> Replay:
    """Plans to compute the sequences among `rows` that are cut, each with its adapter, from their beginning.

    What a layer keeps depends on what the layer below it made of a window, and so on down to the first token.
    """
    cut = [(live, use) for live, use in rows if live is not None and slots.is_cut(live)]
    again = [Row(np.array(live.tokens, np.int32), 0, live.slot, False, None, use) for live, use in cut]
    plans = buckets.plan([len(row.tokens) for row in again], ladders)
    return Replay([live for live, _ in cut], again, [with_adapters(plan, [use for _, use in cut]) for plan in plans])

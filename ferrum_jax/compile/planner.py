"""Plans the steps of a batch: rows of any number of tokens in the cheapest sequence of programs."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.buckets import Buckets, choose_bucket
from ferrum_jax.compile.step import StepKey


class Piece(NamedTuple):
    """A run of one row's tokens, taken by one row of a step."""

    row: int
    start: int
    size: int  # tokens


@dataclass(frozen=True)
class StepPlan:
    """One step: its shape, and what its rows hold."""

    key: StepKey
    decodes: Sequence[Piece] = ()
    blocks: Sequence[Piece] = ()

    @functools.cached_property
    def columns(self) -> list[tuple[NDArray[np.intp], ...]]:
        """Rows, starts and sizes of the pieces in decode rows, and of those in blocks: `[n]` each."""
        groups = self.decodes, self.blocks
        return [tuple(np.array(pieces, np.intp).reshape(-1, len(Piece._fields)).T) for pieces in groups]


def plan_steps(counts: Sequence[int], buckets: Buckets) -> list[StepPlan]:
    """Plans rows of `counts` tokens that want logits of their last token alone; a row of 0 takes no part.

    Rows of one token decode; a longer one takes consecutive query blocks, of which those of one step see each other's
    keys and values. Decode rows run beside the first blocks, or after all of them where that costs less.
    """
    if set(counts) == {1}:
        return list(_plan_decodes(len(counts), buckets))
    size = buckets.block_tokens
    singles, pieces = [], []
    for row, count in enumerate(counts):
        if count == 1:
            singles.append(Piece(row, 0, 1))
        else:
            pieces += [Piece(row, at, min(size, count - at)) for at in range(0, count, size)]
    together = _plan_blocks(pieces, singles, buckets)
    if not singles:
        return together
    apart = _plan_blocks(pieces, [], buckets) + _decode_steps(singles, buckets)
    return min(together, apart, key=lambda steps: sum(cost(step.key, buckets) for step in steps))


def _plan_blocks(pieces: Sequence[Piece], singles: Sequence[Piece], buckets: Buckets) -> list[StepPlan]:
    """Plans blocks, decode rows beside the first of them, and then the other decode rows."""
    steps: list[StepPlan] = []
    most = buckets.decode_rows[-1]
    while pieces:
        beside, singles = singles[:most], singles[most:]
        sizes = buckets.mixed_blocks if beside else buckets.query_blocks
        taken = _choose(len(pieces), buckets, sizes, buckets.query_blocks)
        steps.append(StepPlan(buckets.blocks(taken, mixed=bool(beside)), beside, pieces[:taken]))
        pieces = pieces[taken:]
    return steps + _decode_steps(singles, buckets)


@functools.lru_cache(maxsize=4096)
def _plan_decodes(count: int, buckets: Buckets) -> tuple[StepPlan, ...]:
    return tuple(_decode_steps([Piece(row, 0, 1) for row in range(count)], buckets))


def _decode_steps(singles: Sequence[Piece], buckets: Buckets) -> list[StepPlan]:
    most = buckets.decode_rows[-1]
    groups = [singles[start : start + most] for start in range(0, len(singles), most)]
    return [StepPlan(buckets.decode(len(rows)), rows) for rows in groups]


def plan_all_logits(counts: Sequence[int], buckets: Buckets) -> list[StepPlan]:
    """Plans rows that want logits of every token: short ones together, longer ones one by one; rows of 0 not at all."""
    small, size, most = buckets.verify_tokens, buckets.block_tokens, buckets.verify_blocks[-1]
    short, steps = [], []
    for row, count in enumerate(counts):
        at = 0
        while count - at > small:
            end = min(at + buckets.logit_blocks * size, count)
            blocks = [Piece(row, start, min(size, end - start)) for start in range(at, end, size)]
            steps.append(StepPlan(buckets.all_logits(buckets.logit_blocks, size), blocks=blocks))
            at = end
        if at < count:
            short.append(Piece(row, at, count - at))
    for start in range(0, len(short), most):
        rows = short[start : start + most]
        key = buckets.all_logits(choose_bucket(buckets.verify_blocks, len(rows)), small)
        steps.append(StepPlan(key, blocks=rows))
    return steps


def plan_scores(counts: Sequence[int], buckets: Buckets) -> list[StepPlan]:
    """Plans rows whose every token is scored: blocks of all rows together, short ends separately if that is cheaper."""
    size, small = buckets.block_tokens, buckets.verify_tokens
    ends = [count - max(0, count - 1) // size * size for count in counts]  # tokens of each row's last block
    plans = [_plan_scores(counts, [0] * len(counts), buckets)]
    if any(0 < end <= small for end in ends):
        plans.append(_plan_scores(counts, [end if end <= small else 0 for end in ends], buckets))
    return min(plans, key=lambda steps: sum(cost(step.key, buckets) for step in steps))


def _plan_scores(counts: Sequence[int], rests: Sequence[int], buckets: Buckets) -> list[StepPlan]:
    """As `plan_scores`; the last `rests` tokens of the rows are short ends."""
    size = buckets.block_tokens
    pieces = [
        Piece(row, at, min(size, count - rest - at))
        for row, (count, rest) in enumerate(zip(counts, rests, strict=True))
        for at in range(0, count - rest, size)
    ]
    steps = []
    while pieces:
        taken = _choose(len(pieces), buckets, buckets.score_blocks, buckets.score_blocks)
        steps.append(StepPlan(buckets.scores(choose_bucket(buckets.score_blocks, taken)), blocks=pieces[:taken]))
        pieces = pieces[taken:]
    short = plan_all_logits(rests, buckets)
    starts = [count - rest for count, rest in zip(counts, rests, strict=True)]
    return steps + [
        replace(one, blocks=[piece._replace(start=starts[piece.row]) for piece in one.blocks]) for one in short
    ]


def cost(key: StepKey, buckets: Buckets) -> int:
    """The cost of a step in tokens: those it computes, and `step_overhead` for reading the weights."""
    return buckets.step_overhead + key.num_tokens


@functools.lru_cache(maxsize=4096)
def _choose(count: int, buckets: Buckets, sizes: tuple[int, ...], later: tuple[int, ...]) -> int:
    """Decides how many of `count` blocks a step of one of `sizes` takes, so that it and `later` ones cost least."""
    if count >= 2 * later[-1]:
        return sizes[-1]

    def total(size: int) -> int:
        return size * buckets.block_tokens + _least(max(0, count - size), buckets, later)

    return min(min(reversed(sizes), key=total), count)


@functools.lru_cache(maxsize=4096)
def _least(count: int, buckets: Buckets, sizes: tuple[int, ...]) -> int:
    """Returns the least cost of `count` blocks without decode rows, in steps of these sizes."""
    costs = [0]
    for blocks in range(1, count + 1):
        costs.append(min(size * buckets.block_tokens + costs[max(0, blocks - size)] for size in sizes))
        costs[-1] += buckets.step_overhead
    return costs[count]

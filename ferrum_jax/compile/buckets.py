"""Ladders of static shapes, and how rows of any size are served with them."""

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ferrum_jax.contract.errors import ConfigError


class Outputs(enum.Enum):
    """What a step hands back."""

    LAST = "last"  # float32 logits of every row's last token, [D + P, V]
    ALL = "all"  # float32 logits of every token, [D + P * C, V]


@dataclass(frozen=True, order=True)
class StepKey:
    """The static shape of one compiled step."""

    decode_rows: int  # D rows of one token
    chunk_rows: int  # P rows of up to C tokens
    chunk_tokens: int  # C
    table_columns: int  # M blocks per row
    outputs: str = Outputs.LAST.value
    adapters: bool = False  # whether rows may have a LoRA adapter
    hidden: tuple[int, ...] = ()  # layers whose hidden states are shown
    attention: tuple[int, ...] = ()  # layers whose attention weights are shown

    @property
    def is_watched(self) -> bool:
        """True if it shows anything beside its outputs."""
        return bool(self.hidden or self.attention)

    @property
    def num_logit_rows(self) -> int:
        """R, the rows of the logits it hands back."""
        return self.num_tokens if self.outputs == Outputs.ALL.value else self.decode_rows + self.chunk_rows

    @property
    def num_tokens(self) -> int:
        """X, the tokens its matrix products run over."""
        return self.decode_rows + self.chunk_rows * self.chunk_tokens

    def __str__(self) -> str:
        name = f"D{self.decode_rows} P{self.chunk_rows}x{self.chunk_tokens} M{self.table_columns} {self.outputs}"
        name = f"{name} adapters" if self.adapters else name
        return f"{name} hidden {self.hidden} attention {self.attention}" if self.is_watched else name


@dataclass(frozen=True, order=True)
class LoopKey:
    """Up to so many decode steps in one device call, the tokens chosen there."""

    rows: int  # D
    tokens: int  # N, chosen for each row at most
    table_columns: int  # M blocks per row
    adapters: bool = False  # whether rows may have a LoRA adapter

    def __str__(self) -> str:
        name = f"loop D{self.rows} N{self.tokens} M{self.table_columns}"
        return f"{name} adapters" if self.adapters else name


@dataclass(frozen=True, order=True)
class SelectKey:
    """The best allowed token of each row of a step's logits, and all logits of one of them."""

    logit_rows: int  # R

    def __str__(self) -> str:
        return f"select R{self.logit_rows}"


@dataclass(frozen=True, order=True)
class ScoreKey:
    """The log-probability of a given token after each row of a step's logits, and the best token there."""

    logit_rows: int  # R

    def __str__(self) -> str:
        return f"score R{self.logit_rows}"


@dataclass(frozen=True, order=True)
class CopyKey:
    """Copies of up to so many KV blocks, for sequences that stop sharing one."""

    blocks: int

    def __str__(self) -> str:
        return f"copy {self.blocks} blocks"


@dataclass(frozen=True, order=True)
class GatherKey:
    """One layer's keys and values of one sequence."""

    table_columns: int  # M blocks

    def __str__(self) -> str:
        return f"gather M{self.table_columns}"


@dataclass(frozen=True, order=True)
class InstallKey:
    """An adapter put into one row of the stacks."""

    max_loras: int  # A
    max_rank: int  # R

    def __str__(self) -> str:
        return f"install A{self.max_loras} R{self.max_rank}"


AnyKey = StepKey | LoopKey | SelectKey | ScoreKey | CopyKey | GatherKey | InstallKey


@dataclass(frozen=True, kw_only=True)
class Ladders:
    """The sizes that steps are compiled for. Each ladder ascends and ends in its maximum."""

    decode_rows: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    verify_tokens: tuple[int, ...]
    max_step_tokens: int  # of chunks in one step: P * C stays within it
    table_columns: int
    verify_rows: tuple[int, ...] = (1,)
    loop_tokens: int = 0  # that one loop chooses for each row; 0: there are no loops

    def __post_init__(self):
        for name in ("decode_rows", "chunk_rows", "chunk_tokens", "verify_tokens", "verify_rows"):
            ladder = getattr(self, name)
            if not ladder or list(ladder) != sorted(set(ladder)) or ladder[0] < 1:
                raise ConfigError(f"{name} is {ladder!r}, expected ascending sizes of at least 1")
        for rows, tokens in ((self.chunk_rows[0], self.chunk_tokens[-1]), (self.chunk_rows[-1], self.chunk_tokens[0])):
            if rows * tokens > self.max_step_tokens:
                raise ConfigError(
                    f"no step could hold {rows} chunks of {tokens} tokens, which the ladders chunk_rows and "
                    f"chunk_tokens ask for: max_step_tokens is {self.max_step_tokens}"
                )

    def widths(self, chunk_rows: int) -> tuple[int, ...]:
        """The chunk sizes C compiled for P rows."""
        return tuple(c for c in self.chunk_tokens if c * chunk_rows <= self.max_step_tokens)

    def steps(self, *, adapters: bool = False) -> list[StepKey]:
        """Every forward that legal traffic can need, the largest first; `adapters`: also for rows that have one."""
        columns, last = self.table_columns, Outputs.LAST.value
        keys = {StepKey(d, 0, 0, columns, last) for d in self.decode_rows}
        for d in (0, self.decode_rows[-1]):
            keys |= {StepKey(d, p, c, columns, last) for p in self.chunk_rows for c in self.widths(p)}
        keys |= {StepKey(0, p, c, columns, Outputs.ALL.value) for p in self.verify_rows for c in self.verify_tokens}
        if adapters:
            keys |= {replace(key, adapters=True) for key in keys}
        return sorted(keys, key=lambda key: (-key.num_tokens, key))

    def loops(self, *, adapters: bool = False) -> list[LoopKey]:
        """Every loop that `decode_n` can need; `adapters`: also for rows that have one."""
        if not self.loop_tokens:
            return []
        kinds = (False, True) if adapters else (False,)
        return [LoopKey(d, self.loop_tokens, self.table_columns, kind) for d in self.decode_rows for kind in kinds]

    def declared(self, *, adapters: bool = False) -> list[AnyKey]:
        """Every device call that legal traffic can need: the steps, and the small calls beside them."""
        steps = self.steps(adapters=adapters)
        selects = {SelectKey(key.num_logit_rows) for key in steps if key.outputs == Outputs.LAST.value}
        scores = {ScoreKey(key.num_logit_rows) for key in steps if key.outputs == Outputs.ALL.value}
        return [
            *steps,
            *self.loops(adapters=adapters),
            *sorted(selects),
            *sorted(scores),
            CopyKey(self.max_copies),
            GatherKey(self.table_columns),
        ]

    @property
    def max_copies(self) -> int:
        """Blocks that one device call can copy."""
        return self.decode_rows[-1]


def ladder(maximum: int, start: int = 1, factor: int = 2) -> tuple[int, ...]:
    """Gives start, start·factor, … below `maximum`, and `maximum` itself."""
    sizes = []
    while start < maximum:
        sizes.append(start)
        start *= factor
    return (*sizes, maximum)


def choose_bucket(sizes: Sequence[int], needed: int) -> int:
    """Gives the smallest size that holds `needed`, or the largest there is."""
    return sizes[min(bisect.bisect_left(sizes, needed), len(sizes) - 1)]


class Piece(NamedTuple):
    """A run of one row's tokens, taken in one step."""

    row: int
    start: int
    size: int  # tokens


@dataclass(frozen=True)
class StepPlan:
    """One step: its shape, and what sits in its rows."""

    key: StepKey
    decodes: list[Piece] = field(default_factory=list)
    chunks: list[Piece] = field(default_factory=list)


def plan(counts: Sequence[int], ladders: Ladders) -> list[StepPlan]:
    """Serves rows of `counts` tokens (each at least 1) in as few steps as the ladders allow; one, if they fit."""
    if 0 < len(counts) <= ladders.decode_rows[-1] and max(counts) == 1:  # the usual step, and many of its rows
        key = StepKey(choose_bucket(ladders.decode_rows, len(counts)), 0, 0, ladders.table_columns)
        return [StepPlan(key, [Piece(row, 0, 1) for row in range(len(counts))])]
    done = [0] * len(counts)
    steps = []
    while pending := [row for row, count in enumerate(counts) if done[row] < count]:
        left = {row: counts[row] - done[row] for row in pending}
        singles = [row for row in pending if left[row] == 1][: ladders.decode_rows[-1]]
        longer = [row for row in pending if left[row] > 1][: ladders.chunk_rows[-1]]
        decodes = [Piece(row, done[row], 1) for row in singles]
        if not longer:
            rows = choose_bucket(ladders.decode_rows, len(singles))
            steps.append(StepPlan(StepKey(rows, 0, 0, ladders.table_columns), decodes))
        else:
            rows = choose_bucket(ladders.chunk_rows, len(longer))
            width = choose_bucket(ladders.widths(rows), max(left[row] for row in longer))
            chunks = [Piece(row, done[row], min(left[row], width)) for row in longer]
            beside = ladders.decode_rows[-1] if singles else 0
            steps.append(StepPlan(StepKey(beside, rows, width, ladders.table_columns), decodes, chunks))
        for piece in (*steps[-1].decodes, *steps[-1].chunks):
            done[piece.row] += piece.size
    return steps


def plan_verify(counts: Sequence[int], ladders: Ladders) -> list[StepPlan]:
    """Serves rows whose every token wants logits."""
    done = [0] * len(counts)
    steps = []
    while pending := [row for row, count in enumerate(counts) if done[row] < count]:
        taken = pending[: ladders.verify_rows[-1]]
        width = choose_bucket(ladders.verify_tokens, max(counts[row] - done[row] for row in taken))
        pieces = [Piece(row, done[row], min(counts[row] - done[row], width)) for row in taken]
        rows = choose_bucket(ladders.verify_rows, len(pieces))
        key = StepKey(0, rows, width, ladders.table_columns, Outputs.ALL.value)
        steps.append(StepPlan(key, chunks=pieces))
        for piece in pieces:
            done[piece.row] += piece.size
    return steps

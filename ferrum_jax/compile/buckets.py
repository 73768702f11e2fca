"""The shapes that steps are compiled for, and the programs that legal traffic can need."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ferrum_jax.compile.block_programs import CopyKey, GatherKey
from ferrum_jax.compile.multi_step import MultiStepKey
from ferrum_jax.compile.sampler import BRANCHES, ConfigureKey, DistributionKey, MaskKey, SampleKey, VerifyKey, Way
from ferrum_jax.compile.scores import ProcessedScoreKey
from ferrum_jax.compile.step import StepKey

ProgramKey = Any  # a frozen dataclass with `lower(context)`; its repr names what is kept on disk


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The sizes that steps are compiled for. Tuples ascend, and end in their maximum.

    A prompt takes as many query blocks as it needs, in one step up to `query_blocks[-1]`; more, or more rows than
    `decode_rows[-1]`, run in several steps.
    """

    decode_rows: tuple[int, ...]  # D
    query_blocks: tuple[int, ...]  # P, of steps without decode rows
    mixed_blocks: tuple[int, ...]  # P, of steps with the most decode rows
    block_tokens: int  # C
    verify_blocks: tuple[int, ...]  # P, of steps that return the logits of every token
    verify_tokens: int  # their C; longer rows take `logit_blocks` of `block_tokens` at a time
    table_columns: int  # M
    kv_capacity: int  # positions of a sequence
    max_rows: int  # sequences of one batch; each may end in the same step
    logit_blocks: int = 1  # P, of the step that returns the logits of every token of a long row
    multi_step_tokens: int = 0  # N of multi-step programs; 0: there are none
    step_overhead: int = 16  # tokens whose products take as long as reading the weights once
    sample_ways: tuple[Way, ...] = (BRANCHES,)  # those of `WAYS` that have sampler programs

    @property
    def max_step_tokens(self) -> int:
        """Tokens of prompts in one step."""
        return self.query_blocks[-1] * self.block_tokens

    def decode(self, rows: int) -> StepKey:
        """The step of so many decode rows."""
        d = choose_bucket(self.decode_rows, rows)
        return StepKey(d, 0, 0, self.table_columns, d)

    def blocks(self, count: int, *, mixed: bool) -> StepKey:
        """The step of so many query blocks, and of decode rows where it is `mixed`."""
        p = choose_bucket(self.mixed_blocks if mixed else self.query_blocks, count)
        d = self.decode_rows[-1] if mixed else 0
        ends = min(d + p, self.max_rows)
        rows = choose_bucket((*self.decode_rows, max(self.max_rows, self.decode_rows[-1])), ends)
        return StepKey(d, p, self.block_tokens, self.table_columns, rows)

    def all_logits(self, count: int, tokens: int) -> StepKey:
        """The step that returns the logits of every token of so many query blocks of C tokens."""
        return StepKey(0, count, tokens, self.table_columns, count * tokens, "all")

    def scores(self, count: int) -> StepKey:
        """The step that scores every token of so many query blocks; up to `logit_blocks`, the step of all logits."""
        if count <= self.logit_blocks:
            return self.all_logits(self.logit_blocks, self.block_tokens)
        return replace(self.all_logits(count, self.block_tokens), outputs="scores")

    @property
    def score_blocks(self) -> tuple[int, ...]:
        """P of the steps that score."""
        return (self.logit_blocks, *(size for size in two_sizes(self.query_blocks) if size > self.logit_blocks))

    def steps(self, *, adapters: bool = False) -> list[StepKey]:
        """Every step that legal traffic can need, the largest first; `adapters`: also for rows that have one."""
        keys = {self.decode(d) for d in self.decode_rows}
        keys |= {self.blocks(p, mixed=False) for p in self.query_blocks}
        keys |= {self.blocks(p, mixed=True) for p in self.mixed_blocks}
        keys |= {self.scores(p) for p in self.score_blocks}
        keys |= {self.all_logits(p, self.verify_tokens) for p in self.verify_blocks}
        if adapters:
            keys |= {replace(key, adapters=True) for key in keys}
        return sorted(keys, key=lambda key: (-key.num_tokens, key))

    def needed(self, count: int, *, adapters: bool = False) -> list[StepKey]:
        """The steps that one sequence needs alone for any prompt of at most `count` tokens, and for decoding."""
        most = -(-count // self.block_tokens) if count > 1 else 0
        sizes = [size for size in self.query_blocks if size <= most or choose_bucket(self.query_blocks, most) == size]
        keys = [self.decode(1), *(self.blocks(size, mixed=False) for size in sizes if most)]
        return [replace(key, adapters=adapters) for key in keys]

    def multi_steps(self, *, adapters: bool = False) -> list[MultiStepKey]:
        """Every multi-step program; `adapters`: also for rows that have one."""
        if not self.multi_step_tokens:
            return []
        kinds = (False, True) if adapters else (False,)
        return [
            MultiStepKey(d, self.multi_step_tokens, self.table_columns, kind)
            for d in self.decode_rows
            for kind in kinds
        ]

    def declared(self, *, adapters: bool = False, drafts: bool = False) -> list[ProgramKey]:
        """Every program that legal traffic can need; `drafts`: also those that verify drafted tokens on the device."""
        steps = self.steps(adapters=adapters)
        samples = {one for key in steps if key.outputs == "last" for one in self.samples(key.logit_rows)}
        verifies: list[ProgramKey] = [VerifyKey(p, self.verify_tokens) for p in self.verify_blocks] if drafts else []
        verifies += self.distributions() if drafts else []
        return [
            *steps,
            *self.multi_steps(adapters=adapters),
            *sorted(samples),
            *verifies,
            ConfigureKey(self.kv_capacity),
            CopyKey(self.max_copies),
            GatherKey(self.table_columns),
        ]

    def samples(self, logit_rows: int) -> list[SampleKey]:
        """The programs that choose a token for each row of a step's logits."""
        return [SampleKey(logit_rows, way) for way in self.sample_ways]

    def masks(self, *, drafts: bool = False) -> list[ProgramKey]:
        """The programs that take masks of allowed tokens, which structured output needs."""
        verifies = [VerifyKey(p, self.verify_tokens, is_masked=True) for p in self.verify_blocks] if drafts else []
        return [MaskKey(self.decode_rows[-1]), *verifies]

    def distributions(self) -> list[ProgramKey]:
        """The programs of the distributions that tokens are drawn from, which drafts with probabilities need."""
        return [DistributionKey(*one) for one in self._blocks_of_logits()]

    def processed_scores(self) -> list[ProgramKey]:
        """The programs of scores under sampler settings."""
        return [ProcessedScoreKey(*one) for one in self._blocks_of_logits()]

    def _blocks_of_logits(self) -> list[tuple[int, int]]:
        blocks = [(self.logit_blocks, self.block_tokens), *((p, self.verify_tokens) for p in self.verify_blocks)]
        return sorted(set(blocks))

    @property
    def max_copies(self) -> int:
        """Blocks that one device call can copy."""
        return self.decode_rows[-1]


def bucket_sizes(maximum: int, start: int = 1, factor: int = 2) -> tuple[int, ...]:
    """Returns start, start·factor, … below `maximum`, and `maximum` itself."""
    sizes = []
    while start < maximum:
        sizes.append(start)
        start *= factor
    return (*sizes, maximum)


def two_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the largest size, and the one two before it if there is one: a quarter, where sizes double."""
    return tuple(sorted(sizes[::-2][:2]))


def choose_bucket(sizes: Sequence[int], needed: int) -> int:
    """Returns the smallest size that holds `needed`, or the largest there is."""
    return sizes[min(bisect.bisect_left(sizes, needed), len(sizes) - 1)]

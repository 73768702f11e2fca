"""`decode_n`: many tokens of several sequences in a few device calls, their KV reserved ahead."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.buckets import LoopKey, choose_bucket
from ferrum_jax.compile.looping import LoopRow
from ferrum_jax.contract.checks import (
    checked_id,
    checked_int,
    checked_singles,
    checked_tokens,
    refuse_mismatch,
    refuse_repeated,
)
from ferrum_jax.contract.decoding import MOST_STOP_IDS, DecodedRun, DecodeRun, Sampling
from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError, shown
from ferrum_jax.executor.adapters import NONE
from ferrum_jax.executor.sequences import Sequences
from ferrum_jax.kvcache.growth import Growth, Want
from ferrum_jax.kvcache.slots import LiveSequence

MOST_SEED = 2**32 - 1


@dataclass(frozen=True, eq=False)
class CheckedRun:
    """A run that can be served."""

    cache_id: str
    token: NDArray[np.int32]  # [1]
    max_tokens: int
    stop_ids: list[int]
    sampling: Sampling
    seed: int


class Loops:
    """Runs loops over the sequences of one model."""

    def __init__(self, sequences: Sequences, vocab_size: int):
        self._sequences = sequences
        self._vocab_size = vocab_size

    def decode(self, runs: Sequence[DecodeRun], *, until_one_ends: bool) -> list[DecodedRun]:
        """Chooses up to `max_tokens` tokens of each run; in order.

        Whatever can refuse does so before anything changes, and a loop that fails takes the whole call back.

        Args:
            runs: of different sequences, which are live.
            until_one_ends: stop all when a run of the same loop is over.
        """
        sequences = self._sequences
        if not sequences.plan.ladders.loop_tokens:
            raise UnsupportedError("this engine has no loops: set loop_tokens in its EngineConfig")
        listed = _runs(runs)
        singles = checked_singles([run.token for run in listed], self._vocab_size) or [None] * len(listed)
        checked = [self._checked(run, token) for run, token in zip(listed, singles, strict=True)]
        refuse_repeated(run.cache_id for run in checked)
        if not checked:
            return []
        wants = [Want(run.cache_id, run.token, 0, sequences.adapters.of(run.cache_id)) for run in checked]
        lengths = [sequences.slots.length(run.cache_id) for run in checked]
        growth = Growth(sequences.slots, wants, [at + run.max_tokens for at, run in zip(lengths, checked, strict=True)])
        groups = self._groups(checked)
        replay = sequences.plan_replay((run.cache_id, sequences.adapters.row_of(run.cache_id)) for run in checked)
        steps = [*(plan.key for plan in replay.plans), *(key for key, _ in groups)]
        sequences.make_ready([*steps, *sequences.extra_keys(growth)])
        found: dict[int, DecodedRun] = {}

        def work() -> list[NDArray[np.int32]]:
            sequences.replay(replay)
            for key, indices in groups:
                live = {index: growth.live(index) for index in indices}
                found.update(self._run(key, {index: checked[index] for index in indices}, live, until_one_ends))
            return [np.array([*run.token, *found[at].token_ids[:-1]], np.int32) for at, run in enumerate(checked)]

        sequences.perform(growth, work)
        sequences.adapters.count(run.cache_id for run in checked)
        return [found[at] for at in range(len(checked))]

    def _groups(self, runs: Sequence[CheckedRun]) -> list[tuple[LoopKey, list[int]]]:
        """Puts rows into as few loops as the ladder allows."""
        ladders, adapters = self._sequences.plan.ladders, self._sequences.adapters
        groups = []
        for start in range(0, len(runs), ladders.decode_rows[-1]):
            indices = list(range(start, min(start + ladders.decode_rows[-1], len(runs))))
            adapted = any(adapters.row_of(runs[index].cache_id) != NONE for index in indices)
            rows = choose_bucket(ladders.decode_rows, len(indices))
            groups.append((LoopKey(rows, ladders.loop_tokens, ladders.table_columns, adapted), indices))
        return groups

    def _run(
        self, key: LoopKey, runs: dict[int, CheckedRun], live: dict[int, LiveSequence], until_one_ends: bool
    ) -> dict[int, DecodedRun]:
        """Runs the rows of one group, loop after loop, until they end."""
        sequences = self._sequences
        done = {index: DecodedRun([], []) for index in runs}
        going = list(runs)
        while going:
            rows = [self._row(runs[index], live[index], done[index].token_ids) for index in going]
            stacks = sequences.adapters.stacks
            found = sequences.device.run_loop(key, rows, sequences.steps.get, stacks, until_one_ends=until_one_ends)
            for index, part in zip(going, found, strict=True):
                done[index].token_ids.extend(part.token_ids)
                done[index].logprobs.extend(part.logprobs)
            left = [index for index in going if not _has_ended(runs[index], done[index].token_ids)]
            going = [] if until_one_ends and len(left) < len(going) else left
        return done

    def _row(self, run: CheckedRun, live: LiveSequence, chosen: list[int]) -> LoopRow:
        sequences = self._sequences
        penalised = run.sampling.repetition_penalty != 1.0
        return LoopRow(
            token=chosen[-1] if chosen else int(run.token[0]),
            length=live.length + len(chosen),
            limit=run.max_tokens - len(chosen),
            table=sequences.slots.table[live.slot],
            stop_ids=run.stop_ids,
            sampling=run.sampling,
            seed=run.seed,
            adapter=sequences.adapters.row_of(run.cache_id),
            seen=np.concatenate([live.tokens, run.token, np.array(chosen, np.int32)]) if penalised else run.token,
        )

    def _checked(self, run: DecodeRun, token: NDArray[np.int32] | None) -> CheckedRun:
        """Checks a run, whose token is checked already if there is one."""
        key = checked_id(run.cache_id)
        slots = self._sequences.slots
        refuse_mismatch(key, "pos", run.pos, slots.length(key))
        if slots.get(key) is None:
            raise RequestValidationError(f"{key!r} is unknown, decode_n goes on with a live sequence")
        if not isinstance(run.sampling, Sampling):
            raise RequestValidationError(f"{key!r}: sampling is {shown(run.sampling)}, expected a Sampling")
        seed = checked_int(f"{key!r}: seed", run.seed, 0)
        if seed > MOST_SEED:
            raise RequestValidationError(f"{key!r}: seed is {seed}, expected at most {MOST_SEED}")
        stops = _stop_ids(key, run.stop_ids, self._vocab_size)
        return CheckedRun(
            cache_id=key,
            token=checked_tokens(key, [run.token], self._vocab_size) if token is None else token,
            max_tokens=checked_int(f"{key!r}: max_tokens", run.max_tokens, 1),
            stop_ids=stops,
            sampling=run.sampling,
            seed=seed,
        )


def _stop_ids(cache_id: str, given: Any, vocab_size: int) -> list[int]:
    """Gives the ids that can be chosen at all."""
    listed = _listed(f"{cache_id!r}: stop_ids", given, "token ids")
    checked = [checked_int(f"{cache_id!r}: a stop id", stop, 0) for stop in listed]
    stops = sorted({stop for stop in checked if stop < vocab_size})
    if len(stops) > MOST_STOP_IDS:
        raise RequestValidationError(f"{cache_id!r}: {len(stops)} stop_ids, expected at most {MOST_STOP_IDS}")
    return stops


def _runs(runs: Any) -> list[DecodeRun]:
    listed = _listed("runs", runs, "DecodeRun")
    for run in listed:
        if not isinstance(run, DecodeRun):
            raise RequestValidationError(f"{shown(run)} is a {type(run).__name__}, expected a DecodeRun")
    return listed


def _listed(name: str, given: Any, items: str) -> list[Any]:
    try:
        if isinstance(given, (str, bytes)):
            raise TypeError("text")
        return list(given)
    except (LookupError, RuntimeError, TypeError, ValueError):  # RuntimeError: a deleted array
        raise RequestValidationError(f"{name} are {shown(given)}, expected a sequence of {items}") from None


def _has_ended(run: CheckedRun, chosen: Sequence[int]) -> bool:
    return len(chosen) >= run.max_tokens or chosen[-1] in run.stop_ids

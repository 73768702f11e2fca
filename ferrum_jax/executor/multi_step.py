"""`decode_n`: many tokens of several sequences in a few device calls, their KV allocated ahead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile import multi_step
from ferrum_jax.compile.block_programs import CopyKey
from ferrum_jax.compile.buckets import choose_bucket
from ferrum_jax.compile.multi_step import MultiStepKey
from ferrum_jax.compile.sampler import MAX_STOP_IDS, ConfigureKey, SlotSettings
from ferrum_jax.contract.checks import (
    check_cache_id,
    check_distinct,
    check_int,
    check_items,
    check_position,
    check_tokens,
)
from ferrum_jax.contract.decoding import DecodedRun, DecodeRun, Sampling
from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError, safe_repr
from ferrum_jax.executor.adapters import NONE
from ferrum_jax.executor.pipeline import Pipeline
from ferrum_jax.kvcache.transaction import KvTransaction

MAX_SEED = 2**32 - 1


@dataclass(eq=False)
class _Run:
    """A checked run, and the tokens chosen for it so far."""

    cache_id: str
    token: NDArray[np.int32]  # [1]
    max_tokens: int
    stop_ids: list[int]
    settings: SlotSettings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """True after a stop id or at the limit."""
        return len(self.token_ids) >= self.max_tokens or (bool(self.token_ids) and self.token_ids[-1] in self.stop_ids)


def plan(pipeline: Pipeline, runs: Sequence[DecodeRun], *, until_one_ends: bool) -> Callable[[], list[DecodedRun]]:
    """Returns a function that decodes up to `max_tokens` tokens of each run; runs are of different sequences.

    Whatever can be refused is refused here, before anything changes. With `until_one_ends`, all runs of a device call
    stop when one of them ends.
    """
    buckets, table = pipeline.plan.buckets, pipeline.table
    if not buckets.multi_step_tokens:
        raise UnsupportedError("this engine has no multi-step programs: set multi_step_tokens in its EngineConfig")
    pipeline.device.check_params_live()
    pipeline.settle()  # penalties and recomputing need every token
    checked = [_check_run(run, pipeline) for run in check_items("runs", runs, DecodeRun)]
    check_distinct(run.cache_id for run in checked)
    if not checked:
        return list
    cache_ids = [run.cache_id for run in checked]
    transaction = KvTransaction(
        table,
        cache_ids,
        [run.token for run in checked],
        adapters=list(map(pipeline.adapters.of, cache_ids)),
        targets=[table.length(run.cache_id) + run.max_tokens for run in checked],
    )
    changed = [one for one in cache_ids if pipeline.interventions.of(one) is not None]
    if changed:
        raise UnsupportedError(f"{changed[0]!r} has interventions: decode it token by token")
    uses = list(map(pipeline.adapters.row_of, cache_ids))
    recompute = pipeline.plan_recompute(zip(cache_ids, uses, strict=True))
    most = buckets.decode_rows[-1]
    groups = [list(range(start, min(start + most, len(checked)))) for start in range(0, len(checked), most)]
    keys = [
        MultiStepKey(
            choose_bucket(buckets.decode_rows, len(group)),
            buckets.multi_step_tokens,
            buckets.table_columns,
            any(uses[at] != NONE for at in group),
        )
        for group in groups
    ]
    copy = [CopyKey(buckets.max_copies)] if transaction.copied_ids else []
    for key in [*copy, *(plan.key for _, plan in recompute), *keys, ConfigureKey(pipeline.plan.kv_capacity)]:
        pipeline.programs.get(key)

    def decode() -> list[DecodedRun]:
        try:
            pipeline.begin(transaction, recompute)
            for key, group in zip(keys, groups, strict=True):
                _run_group(pipeline, key, transaction, {at: checked[at] for at in group}, uses, until_one_ends)
            transaction.commit([[int(run.token[0]), *run.token_ids[:-1]] for run in checked])
        except BaseException:  # an interrupt, too: any part of the runs may be done
            pipeline.device.lose()
            raise
        pipeline.adapters.count(run.cache_id for run in checked)
        return [DecodedRun(run.token_ids, run.logprobs, run.processed) for run in checked]

    return decode


def _run_group(
    pipeline: Pipeline,
    key: MultiStepKey,
    transaction: KvTransaction,
    runs: dict[int, _Run],
    uses: Sequence[int],
    until_one_ends: bool,
) -> None:
    """Runs the rows of one program, call after call, until they end."""
    for at, run in runs.items():
        pipeline.install_settings(transaction.lives[at], run.settings)
    going = dict(runs)
    while going:
        buffer, rows = multi_step.blank(key, until_one_ends=until_one_ends)
        for row, (at, run) in enumerate(going.items()):
            live = transaction.lives[at]
            rows.tokens[row] = run.token_ids[-1] if run.token_ids else run.token[0]
            rows.slots[row] = live.slot
            rows.lengths[row] = live.length + len(run.token_ids)
            rows.limits[row] = run.max_tokens - len(run.token_ids)
            rows.adapters[row] = uses[at]
            rows.stop_ids[row, : len(run.stop_ids)] = run.stop_ids
            rows.tables[row] = pipeline.table.table[live.slot]
        chosen = pipeline.device.fetch(pipeline.device.multi_step(key, buffer))  # [N, D, 3]
        ids, logprobs, processed = chosen[:, :, 0], *(chosen[:, :, at].copy().view(np.float32) for at in (1, 2))
        for row, run in enumerate(going.values()):
            count = int((ids[:, row] >= 0).sum())
            run.token_ids += ids[:count, row].tolist()
            run.logprobs += logprobs[:count, row].tolist()
            run.processed += processed[:count, row].tolist()
        left = {at: run for at, run in going.items() if not run.has_ended}
        going = {} if until_one_ends and len(left) < len(going) else left


def _check_run(run: DecodeRun, pipeline: Pipeline) -> _Run:
    key, table = check_cache_id(run.cache_id), pipeline.table
    check_position(key, "pos", run.pos, table.length(key))
    live = table.live.get(key)
    if live is None:
        raise RequestValidationError(f"{key!r} is unknown, decode_n goes on with a live sequence")
    if not isinstance(run.sampling, Sampling):
        raise RequestValidationError(f"{key!r}: sampling is {safe_repr(run.sampling)}, expected a Sampling")
    seed = check_int(f"{key!r}: seed", run.seed, 0)
    if seed > MAX_SEED:
        raise RequestValidationError(f"{key!r}: seed is {seed}, expected at most {MAX_SEED}")
    name = f"{key!r}: stop_ids"
    checked = [check_int(f"{name}[{at}]", stop, 0) for at, stop in enumerate(check_items(name, run.stop_ids, object))]
    stops = sorted({stop for stop in checked if stop < pipeline.plan.vocab_size})
    if len(stops) > MAX_STOP_IDS:
        raise RequestValidationError(f"{key!r}: {len(stops)} stop_ids, expected at most {MAX_STOP_IDS}")
    token = check_tokens(key, [run.token], pipeline.plan.vocab_size)
    seen = np.concatenate([live.tokens, token]) if run.sampling.repetition_penalty != 1.0 else None
    how = {one.name: getattr(run.sampling, one.name) for one in fields(Sampling)}  # of its subclasses, too
    settings = SlotSettings(**how, seed=seed, num_logprobs=0, seen=seen)
    return _Run(key, token, check_int(f"{key!r}: max_tokens", run.max_tokens, 1), stops, settings)

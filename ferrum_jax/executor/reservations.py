"""Reservations: positions made writable before the steps that write them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ferrum_jax.compile.block_programs import CopyKey
from ferrum_jax.compile.buckets import ProgramKey
from ferrum_jax.compile.sampler import ConfigureKey, DistributionKey, VerifyKey
from ferrum_jax.contract.checks import check_cache_id, check_items
from ferrum_jax.contract.slots import KvSlotAllocation, KvSlotRequest, KvSlotReservation
from ferrum_jax.executor.pipeline import Pipeline
from ferrum_jax.kvcache.sequences import SequenceTable
from ferrum_jax.kvcache.transaction import KvTransaction


def plan(pipeline: Pipeline, requests: Sequence[KvSlotRequest]) -> Callable[[], KvSlotReservation]:
    """Returns a function that makes the requested positions writable, all or nothing.

    Raises as `ModelRunner.reserve_kv_slots`, with nothing changed.
    """
    table, pool = pipeline.table, pipeline.table.pool
    targets: dict[str, int] = {}
    admissions: dict[str, int] = {}
    for request in check_items("requests", requests, KvSlotRequest):
        key, admission = check_cache_id(request.cache_id), request.admission_target_len or 0
        targets[key] = max(targets.get(key, 0), request.target_len)
        admissions[key] = max(admissions.get(key, 0), admission, targets[key])
    for key, target in admissions.items():
        table.check_capacity(key, target)
    table.check_new_slots(list(targets))
    # An id that is unknown and wants no position yet is admitted, but gets no slot.
    wanted = [key for key, target in targets.items() if target or key in table.live]
    nothing = np.zeros(0, np.int32)
    transaction = KvTransaction(
        table,
        wanted,
        [nothing] * len(wanted),
        adapters=list(map(pipeline.owner_of, wanted)),
        targets=[max(targets[key], table.length(key)) for key in wanted],
    )
    before = {key: _num_blocks(table, key) for key in targets}
    later = sum(max(0, table.num_blocks(admissions[key]) - held) for key, held in before.items())
    pool.check_enough_free(max(transaction.num_new_blocks, later + len(transaction.copied_ids)), len(targets))
    if transaction.copied_ids:
        pipeline.programs.get(CopyKey(pipeline.plan.buckets.max_copies))

    def reserve() -> KvSlotReservation:
        free, copied = pool.num_free, set(transaction.copied_ids)
        with pipeline.device.changing():
            pipeline.begin(transaction, [])
            transaction.commit()
        after = {key: _num_blocks(table, key) for key in targets}
        return KvSlotReservation(
            block_size=pipeline.plan.cache.block_size,
            total_blocks=pool.num_blocks,
            free_blocks_before=free,
            free_blocks_after=pool.num_free,
            allocations=tuple(
                KvSlotAllocation(
                    cache_id=key,
                    blocks_before=before[key],
                    blocks_after=after[key],
                    new_blocks=after[key] - before[key] + (key in copied),
                )
                for key in targets
            ),
        )

    return reserve


def prepare(pipeline: Pipeline, key: str, count: int) -> None:
    """Takes a slot for an id, and compiles the programs that a prompt of at most `count` tokens and decoding need."""
    buckets = pipeline.plan.buckets
    pipeline.table.check_capacity(key, pipeline.table.length(key) + count)
    nothing = np.zeros(0, np.int32)
    transaction = KvTransaction(pipeline.table, [key], [nothing], adapters=[pipeline.owner_of(key)])
    is_adapted = pipeline.adapters.of(key) is not None
    steps = buckets.needed(count, adapters=is_adapted)
    chained: list[ProgramKey] = [key for step in steps for key in buckets.samples(step.logit_rows)]
    chained += [replace(many, adapters=is_adapted) for many in buckets.multi_steps()[:1]]  # of the fewest rows
    if pipeline.plan.spec_tokens:
        blocks, tokens = buckets.verify_blocks[0], buckets.verify_tokens
        verify = replace(buckets.all_logits(blocks, tokens), adapters=is_adapted)
        chained += [verify, VerifyKey(blocks, tokens), DistributionKey(blocks, tokens)]
    beside = [ConfigureKey(pipeline.plan.kv_capacity), CopyKey(buckets.max_copies)]
    pipeline.programs.ensure([*steps, *chained, *beside])
    with pipeline.device.changing():
        pipeline.begin(transaction, [])
        transaction.commit()


def _num_blocks(table: SequenceTable, cache_id: str) -> int:
    live = table.live.get(cache_id)
    return 0 if live is None else len(live.blocks)

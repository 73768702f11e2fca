"""From the rows of a call to the live sequences they are appended to."""

import contextlib
from collections.abc import Sequence

import numpy as np

from ferrum_jax.contract.checks import check_distinct, check_position
from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError
from ferrum_jax.contract.slots import KvSlotRequest
from ferrum_jax.executor.llm_executor.handle import current_sequence
from ferrum_jax.executor.llm_executor.requests import RowRequest
from ferrum_jax.executor.llm_executor.sequences import SequenceTable, TrackedSequence, UndoLog


def open_rows(log: UndoLog, rows: Sequence[RowRequest]) -> list[TrackedSequence]:
    """Finds or begins the sequence of every row, binds adapters, and checks that the KV admits what was announced.

    Nothing is reserved: the forward takes what it needs, and a refused call leaves no block behind. An adapter that
    was unloaded for another one is not loaded again where the call fails after that; its next use loads it.
    """
    table, model = log.table, log.table.model
    found = [_find(table, row) for row in rows]
    ids = [row.name if sequence is None else sequence.cache_id for row, sequence in zip(rows, found, strict=True)]
    check_distinct(cache_id for cache_id in ids if cache_id is not None)
    sequences, admissions = [], []
    for row, sequence in zip(rows, found, strict=True):
        if sequence is None:
            sequence = log.begin(row.name)
        else:
            log.record(sequence)
        sequences.append(sequence)
        options = row.options
        if options.capacity_hint is not None:
            model.prepare_kv_capacity(sequence.cache_id, options.capacity_hint)
        if options.admission_target is not None:
            start = sequence.length
            most = max(options.admission_target, start + len(row.tokens))
            admissions.append(KvSlotRequest(cache_id=sequence.cache_id, target_len=start, admission_target_len=most))
    if admissions:
        model.reserve_kv_slots(admissions)
    adapted = [
        (sequence, row.options.adapter)
        for sequence, row in zip(sequences, rows, strict=True)
        if row.options.adapter not in (None, sequence.adapter)
    ]
    # A sequence that gets no slot or block is refused before an adapter is unloaded for it.
    ids = [sequence.cache_id for sequence, _ in adapted if not sequence.length]
    if empty := [KvSlotRequest(cache_id=cache_id, target_len=0, admission_target_len=1) for cache_id in ids]:
        with contextlib.suppress(UnsupportedError):
            model.reserve_kv_slots(empty)
    for sequence, adapter in adapted:
        model.set_lora_adapter_for_cache(sequence.cache_id, adapter)
        sequence.adapter = adapter
    return sequences


def _find(table: SequenceTable, row: RowRequest) -> TrackedSequence | None:
    """Returns the live sequence of a row, or None if the row begins one; refuses tokens at a wrong position."""
    if row.handle is not None:
        sequence = current_sequence(row.handle, table)
    else:
        sequence = None if row.name is None else table.find(row.name)
        if sequence is None and row.name is not None:
            table.check_new_id(row.name)
    start = 0 if sequence is None else sequence.length
    end = start + len(row.tokens)
    if row.offset is not None:
        check_position(row.label, "pos_offset", row.offset, start)
    if row.positions is not None and not np.array_equal(row.positions, np.arange(start, end)):
        raise UnsupportedError(
            f"{row.label}.position_ids are {row.positions[:8].tolist()}…, only consecutive ones from the cache's end, "
            f"{start}, are supported"
        )
    if end > table.capacity:
        raise RequestValidationError(
            f"{row.label} needs {end} positions, the KV capacity of a sequence is {table.capacity}"
        )
    return sequence

"""What each kind of call does with the model: opens its rows, runs the forward, counts tokens, builds outputs.

Each function runs with the table's lock held and takes the call's undo log, which knows the table. An error leaves
every change in the log.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.answers import (
    Answer,
    Logits,
    check_answer_count,
    check_answers,
    check_captured,
    check_logit_rows,
    check_logits,
    choose,
    kept,
)
from ferrum_jax.contract.checks import check_distinct, check_position
from ferrum_jax.contract.decoding import FullLogits, LogitsReturnPolicy
from ferrum_jax.contract.errors import RequestValidationError, ResourceExhaustedError, UnsupportedError
from ferrum_jax.contract.slots import KvSlotRequest
from ferrum_jax.contract.tensors import DecodeOutput, PrefillOutput, SpeculativeDecodeOutput
from ferrum_jax.executor.llm_executor.description import overrides
from ferrum_jax.executor.llm_executor.handle import LlmKvCacheHandle, current_sequence, handle_of
from ferrum_jax.executor.llm_executor.requests import RowRequest
from ferrum_jax.executor.llm_executor.sequences import TrackedSequence, TrackedSequences, UndoLog


def prefill(log: UndoLog, rows: Sequence[RowRequest], *, together: bool = False) -> list[PrefillOutput]:
    """Appends chunks: logits `[1, 1, V]` of the last token, or `[1, n, V]` where full logits are asked for.

    With `together`, one forward takes all chunks that want neither full logits nor activations.
    """
    table = log.table
    open_rows(log, rows)
    joined = [row for row in rows if together and not (row.options.captures or row.options.full_logits)]
    if joined:
        _unified(table, joined)
    for row in rows:
        if row.options.captures:
            row.answer = _capture(table, row)
        elif row.options.full_logits:
            row.answer = _verify(table, row.sequence, row.tokens)
        elif row.answer is None:
            row.answer = _prefill_chunk(table, row)
    return [_prefill_output(table, row) for row in rows]


def decode(log: UndoLog, rows: Sequence[RowRequest]) -> list[DecodeOutput]:
    """Appends one token to every sequence, in one forward except for rows that capture activations."""
    table = log.table
    open_rows(log, rows)
    batched = [row for row in rows if not row.options.captures]
    for row in rows:
        if row.options.captures:
            row.answer = choose(_capture(table, row)[0], row.policy)
    if batched:
        _decode_batch(table, batched)
    return [_decode_output(handle_of(table, row.sequence), row.answer, row) for row in rows]


def unified(log: UndoLog, rows: Sequence[RowRequest]) -> list[Answer | None]:
    """Appends every row, in one forward if the model can; final rows answer as their policies ask, others None.

    A model that cannot runs a prefill per chunk and one decode of all single tokens of live sequences.
    """
    table = log.table
    open_rows(log, rows)
    if not _unified(table, rows):
        singles = [row for row in rows if row.sequence.length and row.is_final and len(row.tokens) == 1]
        for row in rows:
            if row not in singles:
                logits = _prefill_chunk(table, row)
                row.answer = choose(logits, row.policy) if row.is_final else None
        if singles:
            _decode_batch(table, singles)
    return [row.answer for row in rows]


def verify(log: UndoLog, rows: Sequence[RowRequest], *, policies: Sequence[LogitsReturnPolicy]) -> list[DecodeOutput]:
    """Appends the one row's tokens; output i answers as policy i asks, with a handle that ends after token i."""
    table, (row,) = log.table, rows
    open_rows(log, rows)
    start = handle_of(table, row.sequence)
    logits = _capture(table, row) if row.options.captures else _verify(table, row.sequence, row.tokens)
    outputs = []
    for at, policy in enumerate(policies):
        handle = start.with_sequence_length(start.num_tokens + at + 1)
        outputs.append(_decode_output(handle, choose(logits[at], policy), row, at))
    return outputs


def speculate(log: UndoLog, rows: Sequence[RowRequest], *, threshold: float) -> SpeculativeDecodeOutput:
    """Appends the first token of the one row and the drafted tokens that the model accepts.

    It runs one forward over all tokens and rolls back the others; token by token where the model cannot roll back.
    """
    table, (row,) = log.table, rows
    open_rows(log, rows)
    sequence, (first, *draft) = row.sequence, row.tokens
    accepted = 0
    if overrides(table.model, "truncate_kv"):
        end = sequence.length + 1
        matrix = _verify(table, sequence, row.tokens)
        while accepted < len(draft) and is_accepted(matrix[accepted], draft[accepted], threshold):
            accepted += 1
        table.truncate(sequence, end + accepted)
        logits = matrix[accepted]
    else:
        (logits,) = _verify(table, sequence, [first])
        while accepted < len(draft) and is_accepted(logits, draft[accepted], threshold):
            (logits,) = _verify(table, sequence, [draft[accepted]])
            accepted += 1
    return SpeculativeDecodeOutput(
        accepted_tokens=draft[:accepted],
        next_logits=logits[None],
        kv_cache=handle_of(table, sequence),
        acceptance_count=accepted,
    )


def forward(log: UndoLog, rows: Sequence[RowRequest]) -> NDArray[np.float32]:
    """Returns the logits of every token of every row, `[B, n, V]`, and releases the sequences that it began."""
    table, model = log.table, log.table.model
    longest = max(len(row.tokens) for row in rows)
    if longest > table.capacity:
        raise RequestValidationError(
            f"input_ids have {longest} positions, the KV capacity of a sequence is {table.capacity}"
        )
    if len(rows) > 1 and overrides(model, "forward_verify_batch"):
        items = [(log.begin(kind="forward").cache_id, row.tokens) for row in rows]
        with contextlib.suppress(ResourceExhaustedError, UnsupportedError):  # with few free slots, row by row
            found = model.forward_verify_batch(items)
            log.undo()
            check_answer_count(model, found, len(rows))
            return np.stack([check_logit_rows(model, logits, longest) for logits in found])
    answers = []
    for row in rows:
        answers.append(_verify(table, log.begin(kind="forward"), row.tokens))
        log.undo()
    return np.stack(answers)


def is_accepted(logits: Logits, token: int, threshold: float) -> bool:
    """True if p(token) >= threshold · max p, compared as logarithms: softmax's denominator cancels."""
    if threshold == 0:
        return True
    return bool(np.float64(logits[token]) - np.float64(logits.max()) >= math.log(threshold))


def open_rows(log: UndoLog, rows: Sequence[RowRequest]) -> None:
    """Finds or begins the sequence of every row, binds adapters, and checks that the KV admits the announced lengths.

    Nothing is reserved: the forward takes what it needs, and a refused call leaves no block behind. An adapter that
    was unloaded for another one is not loaded again where the call fails after that; its next use loads it.
    """
    table, model = log.table, log.table.model
    found = [_find(table, row) for row in rows]
    ids = [row.name if sequence is None else sequence.cache_id for row, sequence in zip(rows, found, strict=True)]
    check_distinct(cache_id for cache_id in ids if cache_id is not None)
    admissions = []
    for row, live in zip(rows, found, strict=True):
        row.sequence = log.begin(row.name) if live is None else log.record(live)
        cache_id, length, options = row.sequence.cache_id, row.sequence.length, row.options
        if options.capacity_hint is not None:
            model.prepare_kv_capacity(cache_id, options.capacity_hint)
        if options.admission_target is not None:
            most = max(options.admission_target, length + len(row.tokens))
            admissions.append(KvSlotRequest(cache_id=cache_id, target_len=length, admission_target_len=most))
    if admissions:
        model.reserve_kv_slots(admissions)
    # An empty sequence is bound again, as a direct call may have unbound it; one with positions keeps its adapter.
    adapted = [
        row for row in rows if row.options.adapter not in (None, row.sequence.adapter if row.sequence.length else None)
    ]
    # A sequence that gets no slot or block is refused before an adapter is unloaded for it.
    ids = [row.sequence.cache_id for row in adapted if not row.sequence.length]
    if empty := [KvSlotRequest(cache_id=cache_id, target_len=0, admission_target_len=1) for cache_id in ids]:
        with contextlib.suppress(UnsupportedError):
            model.reserve_kv_slots(empty)
    for row in adapted:
        model.set_lora_adapter_for_cache(row.sequence.cache_id, row.options.adapter)
        row.sequence.adapter = row.options.adapter


def _find(table: TrackedSequences, row: RowRequest) -> TrackedSequence | None:
    """Returns the live sequence of a row, or None if the row begins one; refuses tokens at a wrong position."""
    sequence = None
    if row.handle is not None:
        sequence = current_sequence(row.handle, table)
    elif row.name is not None:
        sequence = table.find_or_adopt(row.name)
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


def _unified(table: TrackedSequences, rows: Sequence[RowRequest]) -> bool:
    """Appends every row in one forward; if the model cannot, counts that and returns False with nothing changed."""
    model, policies = table.model, [row.policy for row in rows]
    items = [(row.sequence.cache_id, row.tokens, row.sequence.length, row.is_final) for row in rows]
    wanted = [row.policy if row.is_final else None for row in rows]
    if FullLogits() in wanted and not model.unified_forward_can_return_full_logits():
        table.unsupported_fallback_calls += 1
        return False
    is_plain = all(isinstance(policy, FullLogits) for policy in policies)
    try:
        if is_plain:
            answers = model.unified_forward(items)
        else:
            answers = model.unified_forward_with_logits_policy(items, policies)
    except UnsupportedError:
        if overrides(model, "unified_forward") and any(row.sequence.may_be_adapted for row in rows):
            table.lora_fallback_calls += 1
        else:
            table.unsupported_fallback_calls += 1
            table.lacks_unified |= is_plain
        return False
    _take_answers(table, rows, answers, wanted)
    return True


def _decode_batch(table: TrackedSequences, rows: Sequence[RowRequest]) -> None:
    """Appends one token to every sequence; row by row if the model has no batch, or none with these adapters."""
    model, policies = table.model, [row.policy for row in rows]
    batch = [(row.sequence.cache_id, row.tokens[0], row.sequence.length) for row in rows]
    if not all(isinstance(policy, FullLogits) for policy in policies):
        name, more = "decode_batch_with_logits_policy", (policies,)
    elif any(row.options.full_logits for row in rows):
        name, more = "decode_batch_with_full_logits", (True,)
    else:
        name, more = "decode_batch", ()
    if overrides(model, name, "decode_batch"):  # the contract's own would decode row by row, uncounted
        try:
            answers = getattr(model, name)(batch, *more)
        except UnsupportedError:
            if len(rows) == 1 or not any(row.sequence.may_be_adapted for row in rows):
                raise
            table.lora_fallback_calls += 1
        else:
            return _take_answers(table, rows, answers, policies)
    for row, item in zip(rows, batch, strict=True):  # an error leaves a known length
        logits = model.decode(*item)
        table.advance(row.sequence, 1)
        row.answer = choose(check_logits(model, logits).copy(), row.policy)  # the next call may write there


def _take_answers(
    table: TrackedSequences, rows: Sequence[RowRequest], answers: Any, wanted: Sequence[LogitsReturnPolicy | None]
) -> None:
    for row in rows:
        table.advance(row.sequence, len(row.tokens))
    for row, answer in zip(rows, check_answers(table.model, answers, wanted), strict=True):
        row.answer = _own(table, answer)


def _own(table: TrackedSequences, array: Any) -> Any:
    """Returns an array of the model's that the next call leaves as it is: other models may write to one place."""
    return array if table.is_runner else kept(array)


def _prefill_chunk(table: TrackedSequences, row: RowRequest) -> Logits:
    """Appends a row's tokens and returns the logits of the last, `[V]`."""
    logits = table.model.prefill(row.sequence.cache_id, row.tokens)
    table.advance(row.sequence, len(row.tokens))
    return check_logits(table.model, logits).copy()  # the next call may write there


def _verify(table: TrackedSequences, sequence: TrackedSequence, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Appends tokens in one forward, `[n, V]`; token by token where the model cannot."""
    model, cache_id = table.model, sequence.cache_id
    try:
        logits = model.forward_verify(cache_id, tokens)
    except UnsupportedError:
        rows = []
        for token in tokens:
            length = sequence.length
            logits = model.decode(cache_id, token, length) if length else model.prefill(cache_id, [token])
            table.advance(sequence, 1)
            rows.append(check_logits(model, logits).copy())
        return np.stack(rows)
    table.advance(sequence, len(tokens))
    return _own(table, check_logit_rows(model, logits, len(tokens)))


def _capture(table: TrackedSequences, row: RowRequest) -> NDArray[np.float32]:
    """Appends a row's tokens, `[n, V]`, and keeps the activations that it asks for."""
    hidden, weights = row.options.hidden_layers, row.options.attention_layers
    captured = table.model.capture(row.sequence.cache_id, row.tokens, hidden=hidden, attention_weights=weights)
    table.advance(row.sequence, len(row.tokens))
    found = check_captured(table.model, captured, len(row.tokens), hidden, weights)
    row.captured = replace(
        found,
        logits=_own(table, found.logits),
        hidden={layer: _own(table, states) for layer, states in found.hidden.items()},
        attention_weights={layer: _own(table, one) for layer, one in found.attention_weights.items()},
    )
    return row.captured.logits


def _prefill_output(table: TrackedSequences, row: RowRequest) -> PrefillOutput:
    """Builds the output of one chunk; activations are in the order in which they were asked for."""
    captured, options = row.captured, row.options
    hidden = [captured.hidden[layer][None] for layer in options.hidden_layers] if captured else []
    weights = [captured.attention_weights[layer][None] for layer in options.attention_layers] if captured else []
    logits = np.atleast_2d(row.answer)
    return PrefillOutput(
        logits=(logits if options.full_logits else logits[-1:])[None],
        kv_cache=handle_of(table, row.sequence),
        hidden_states=hidden or None,
        attention_weights=weights or None,
    )


def _decode_output(handle: LlmKvCacheHandle, answer: Answer, row: RowRequest, at: int = 0) -> DecodeOutput:
    """Builds the output of token `at` of a row: `[1, V]` logits or a `[1, 1]` id, and what was captured there."""
    captured, options, length = row.captured, row.options, handle.num_tokens
    hidden = [captured.hidden[layer][at][None] for layer in options.hidden_layers] if captured else []
    weights = captured.attention_weights if captured else {}
    return DecodeOutput(
        logits=np.array([[answer]], np.int32) if isinstance(answer, int) else answer[None],
        kv_cache=handle,
        hidden_state=hidden[0] if hidden else None,  # [1, D]
        attention_weights=[weights[layer][None, :, at, :length] for layer in options.attention_layers] or None,
    )

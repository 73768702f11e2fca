"""What each kind of call does with the model: opens its rows, runs the forward, counts tokens, builds outputs.

Each function runs with the table's lock held and takes the call's undo log, which knows the table. An error leaves
every change in the log.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.answers import (
    Answer,
    Captured,
    Logits,
    check_answer_count,
    check_answers,
    check_captured,
    check_logit_rows,
    check_logits,
    choose,
)
from ferrum_jax.contract.decoding import FullLogits, LogitsReturnPolicy
from ferrum_jax.contract.errors import RequestValidationError, ResourceExhaustedError, UnsupportedError
from ferrum_jax.contract.tensors import DecodeOutput, PrefillOutput, SpeculativeDecodeOutput
from ferrum_jax.executor.llm_executor.description import overrides
from ferrum_jax.executor.llm_executor.handle import LlmKvCacheHandle, handle_of
from ferrum_jax.executor.llm_executor.opening import open_rows
from ferrum_jax.executor.llm_executor.requests import Options, RowRequest
from ferrum_jax.executor.llm_executor.sequences import SequenceTable, TrackedSequence, UndoLog

DECODE_METHODS = ("decode_batch", "decode_batch_with_full_logits", "decode_batch_with_logits_policy")


def prefill(log: UndoLog, rows: Sequence[RowRequest], *, together: bool = False) -> list[PrefillOutput]:
    """Appends chunks: logits `[1, 1, V]` of the last token, or `[1, n, V]` where full logits are asked for.

    With `together`, one forward takes all chunks that want neither full logits nor activations.
    """
    table, sequences = log.table, open_rows(log, rows)
    captures = _capture_rows(table, sequences, rows)
    joined = [at for at, row in enumerate(rows) if together and not (row.options.captures or row.options.full_logits)]
    answers = _unified(table, [sequences[at] for at in joined], [rows[at] for at in joined]) if joined else None
    last_logits = {} if answers is None else dict(zip(joined, answers, strict=True))
    outputs = []
    for at, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
        captured = captures.get(at)
        if captured is not None:
            logits = captured.logits
        elif at in last_logits:
            logits = np.asarray(last_logits[at])[None]
        elif row.options.full_logits:
            logits = _verify(table, sequence, row.tokens)
        else:
            logits = _prefill_chunk(table, sequence, row)[None]
        outputs.append(_prefill_output(table, sequence, logits, row.options, captured))
    return outputs


def decode(log: UndoLog, rows: Sequence[RowRequest]) -> list[DecodeOutput]:
    """Appends one token to every sequence, in one forward except for rows that capture activations."""
    table, sequences = log.table, open_rows(log, rows)
    captures = _capture_rows(table, sequences, rows)
    batched = [at for at in range(len(rows)) if at not in captures]
    answers = _decode_batch(table, [sequences[at] for at in batched], [rows[at] for at in batched]) if batched else []
    found = dict(zip(batched, answers, strict=True))
    outputs = []
    for at, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
        captured = captures.get(at)
        answer = found[at] if captured is None else choose(captured.logits[0], row.policy)
        outputs.append(_decode_output(handle_of(table, sequence), answer, row.options, captured))
    return outputs


def unified(log: UndoLog, rows: Sequence[RowRequest]) -> list[Answer | None]:
    """Appends every row, in one forward if the model can; final rows answer as their policies ask, others None.

    A model that cannot runs a prefill per chunk and one decode of all single tokens of live sequences.
    """
    table, sequences = log.table, open_rows(log, rows)
    together = _unified(table, sequences, rows)
    if together is not None:
        return together
    answers: list[Answer | None] = [None] * len(rows)
    singles = []
    for at, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
        if sequence.length and row.is_final and len(row.tokens) == 1:
            singles.append(at)
            continue
        logits = _prefill_chunk(table, sequence, row)
        answers[at] = choose(logits, row.policy) if row.is_final else None
    if singles:
        decoded = _decode_batch(table, [sequences[at] for at in singles], [rows[at] for at in singles])
        for at, answer in zip(singles, decoded, strict=True):
            answers[at] = answer
    return answers


def verify(log: UndoLog, rows: Sequence[RowRequest], *, policies: Sequence[LogitsReturnPolicy]) -> list[DecodeOutput]:
    """Appends the one row's tokens; output i answers as policy i asks, with a handle that ends after token i."""
    table, (sequence,), (row,) = log.table, open_rows(log, rows), rows
    start = handle_of(table, sequence)
    captured = _capture_rows(table, [sequence], rows).get(0)
    logits = _verify(table, sequence, row.tokens) if captured is None else captured.logits
    outputs = []
    for at, policy in enumerate(policies):
        handle = start.with_sequence_length(start.num_tokens + at + 1)
        outputs.append(_decode_output(handle, choose(logits[at], policy), row.options, captured, at))
    return outputs


def speculate(log: UndoLog, rows: Sequence[RowRequest], *, threshold: float) -> SpeculativeDecodeOutput:
    """Appends the first token of the one row and what the model accepts of the rest.

    One forward over all tokens and a roll back of the rest; token by token where the model cannot roll back.
    """
    table, (sequence,) = log.table, open_rows(log, rows)
    first, *draft = rows[0].tokens.tolist()
    if overrides(table.model, "truncate_kv"):
        end = sequence.length + 1
        matrix = _verify(table, sequence, rows[0].tokens)
        judged = (is_accepted(matrix[at], token, threshold) for at, token in enumerate(draft))
        accepted = next((at for at, good in enumerate(judged) if not good), len(draft))
        table.truncate(sequence, end + accepted)
        logits = matrix[accepted]
    else:
        logits, accepted = append_token(table, sequence, first), 0
        while accepted < len(draft) and is_accepted(logits, draft[accepted], threshold):
            logits = append_token(table, sequence, draft[accepted])
            accepted += 1
    return SpeculativeDecodeOutput(
        accepted_tokens=draft[:accepted],
        next_logits=logits[None],
        kv_cache=handle_of(table, sequence),
        acceptance_count=accepted,
    )


def forward(log: UndoLog, rows: Sequence[RowRequest]) -> NDArray[np.float32]:
    """Returns the logits of every token of every row, `[B, n, V]`, and releases what it began."""
    table, model = log.table, log.table.model
    longest = max(len(row.tokens) for row in rows)
    if longest > table.capacity:
        raise RequestValidationError(
            f"input_ids have {longest} positions, the KV capacity of a sequence is {table.capacity}"
        )
    if len(rows) > 1 and overrides(model, "forward_verify_batch"):
        items = [(log.begin(kind="forward").cache_id, row.tokens.tolist()) for row in rows]
        with contextlib.suppress(ResourceExhaustedError):  # with few free slots, row by row
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


def append_token(table: SequenceTable, sequence: TrackedSequence, token: int) -> Logits:
    """Appends one token, `[V]`; the first of a sequence is a prefill."""
    cache_id, length, model = sequence.cache_id, sequence.length, table.model
    logits = model.decode(cache_id, token, length) if length else model.prefill(cache_id, [token])
    table.advance(sequence, 1)
    return check_logits(model, logits)


def _unified(
    table: SequenceTable, sequences: Sequence[TrackedSequence], rows: Sequence[RowRequest]
) -> list[Answer | None] | None:
    """Appends every row in one forward; None, and counted, if the model cannot: nothing has changed then."""
    model = table.model
    items = [
        (sequence.cache_id, row.tokens.tolist(), sequence.length, row.is_final)
        for sequence, row in zip(sequences, rows, strict=True)
    ]
    wanted = [row.policy if row.is_final else None for row in rows]
    wants_logits = any(isinstance(policy, FullLogits) for policy in wanted)
    try:
        if wants_logits and not model.unified_forward_can_return_full_logits():
            raise UnsupportedError(f"{type(model).__name__} has no unified forward with full logits")
        if all(isinstance(row.policy, FullLogits) for row in rows):
            answers = model.unified_forward(items)
        else:
            answers = model.unified_forward_with_logits_policy(items, [row.policy for row in rows])
    except UnsupportedError:
        if overrides(model, "unified_forward") and any(sequence.adapter for sequence in sequences):
            table.lora_fallback_calls += 1
        else:
            table.unsupported_fallback_calls += 1
        return None
    for sequence, row in zip(sequences, rows, strict=True):
        table.advance(sequence, len(row.tokens))
    return check_answers(model, answers, wanted)


def _decode_batch(
    table: SequenceTable, sequences: Sequence[TrackedSequence], rows: Sequence[RowRequest]
) -> list[Answer]:
    """Appends one token to every sequence; row by row if the model has no batch, or none with these adapters."""
    model, policies = table.model, [row.policy for row in rows]
    batch = [
        (sequence.cache_id, int(row.tokens[0]), sequence.length) for sequence, row in zip(sequences, rows, strict=True)
    ]
    if overrides(model, *DECODE_METHODS):
        try:
            if not all(isinstance(policy, FullLogits) for policy in policies):
                answers = model.decode_batch_with_logits_policy(batch, policies)
            elif any(row.options.full_logits for row in rows):
                answers = model.decode_batch_with_full_logits(batch, True)
            else:
                answers = model.decode_batch(batch)
        except UnsupportedError:
            if len(rows) == 1 or not any(sequence.adapter for sequence in sequences):
                raise
            table.lora_fallback_calls += 1
        else:
            for sequence in sequences:
                table.advance(sequence, 1)
            return [answer for answer in check_answers(model, answers, policies) if answer is not None]
    found: list[Answer] = []
    for sequence, row, policy in zip(sequences, batch, policies, strict=True):  # an error leaves a known length
        logits = model.decode(*row)
        table.advance(sequence, 1)
        found.append(choose(check_logits(model, logits), policy))
    return found


def _prefill_chunk(table: SequenceTable, sequence: TrackedSequence, row: RowRequest) -> Logits:
    """Appends a row's tokens and returns the logits of the last, `[V]`."""
    logits = table.model.prefill(sequence.cache_id, row.tokens.tolist())
    table.advance(sequence, len(row.tokens))
    return check_logits(table.model, logits)


def _verify(table: SequenceTable, sequence: TrackedSequence, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Appends tokens in one forward, `[n, V]`; token by token where the model cannot."""
    model, cache_id, ids = table.model, sequence.cache_id, tokens.tolist()
    try:
        logits = model.forward_verify(cache_id, ids)
    except UnsupportedError:
        rows = []
        for token in ids:
            length = sequence.length
            logits = model.decode(cache_id, token, length) if length else model.prefill(cache_id, [token])
            table.advance(sequence, 1)
            rows.append(check_logits(model, logits))
        return np.stack(rows)
    table.advance(sequence, len(ids))
    return check_logit_rows(model, logits, len(ids))


def _capture_rows(
    table: SequenceTable, sequences: Sequence[TrackedSequence], rows: Sequence[RowRequest]
) -> dict[int, Captured]:
    """Appends the rows that ask for activations, by index; first of all, for a model refuses a layer it lacks."""
    model, captures = table.model, {}
    for at, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
        if row.options.captures:
            layers = {"hidden": row.options.hidden_layers, "attention_weights": row.options.attention_layers}
            captured = model.capture(sequence.cache_id, row.tokens.tolist(), **layers)
            table.advance(sequence, len(row.tokens))
            captures[at] = check_captured(model, captured, len(row.tokens), **layers)
    return captures


def _prefill_output(
    table: SequenceTable, sequence: TrackedSequence, logits: Any, options: Options, captured: Captured | None
) -> PrefillOutput:
    """Builds the output of one chunk of `logits [n, V]`; activations are in the order in which they were asked for."""
    hidden = [captured.hidden[layer][None] for layer in options.hidden_layers] if captured else []
    weights = [captured.attention_weights[layer][None] for layer in options.attention_layers] if captured else []
    return PrefillOutput(
        logits=(logits if options.full_logits else logits[-1:])[None],
        kv_cache=handle_of(table, sequence),
        hidden_states=hidden or None,
        attention_weights=weights or None,
    )


def _decode_output(
    handle: LlmKvCacheHandle, answer: Answer, options: Options, captured: Captured | None, at: int = 0
) -> DecodeOutput:
    """Builds the output of one token: `[1, V]` logits or a `[1, 1]` id, and what was captured at token `at`."""
    hidden = [captured.hidden[layer][at][None] for layer in options.hidden_layers] if captured else []
    weights, length = captured.attention_weights if captured else {}, handle.num_tokens
    return DecodeOutput(
        logits=np.array([[answer]], np.int32) if isinstance(answer, int) else answer[None],
        kv_cache=handle,
        hidden_state=hidden[0] if hidden else None,  # [1, D]
        attention_weights=[weights[layer][None, :, at, :length] for layer in options.attention_layers] or None,
    )

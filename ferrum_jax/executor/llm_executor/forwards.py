"""What a call does with its model: opens its rows, runs the forward, and counts the tokens that are now cached.

Each function is called by the holder of the lock, and raises with every change noted in the savepoint.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.checks import refuse_mismatch, refuse_repeated
from ferrum_jax.contract.errors import ModelError, RequestValidationError, ResourceExhaustedError, UnsupportedError
from ferrum_jax.contract.llm import Logits, choose
from ferrum_jax.contract.policy import FullLogits
from ferrum_jax.contract.slots import KvSlotRequest
from ferrum_jax.contract.watching import Watched
from ferrum_jax.executor.llm_executor.handle import current
from ferrum_jax.executor.llm_executor.inputs import RowInput
from ferrum_jax.executor.llm_executor.ledger import Ledger, TrackedSequence
from ferrum_jax.executor.llm_executor.profile import overrides
from ferrum_jax.executor.llm_executor.savepoint import Savepoint

Answer = Logits | int
Prefilled = NDArray[np.float32] | Watched
Prefill = Callable[[Savepoint, Sequence[TrackedSequence], Sequence[RowInput]], list[Prefilled]]


def open_rows(point: Savepoint, rows: Sequence[RowInput]) -> list[TrackedSequence]:
    """Finds or begins the sequence of every row, binds adapters, asks whether the KV has room for what may come.

    Nothing is reserved: the forward takes what it needs, and a call that is refused leaves no block behind. An adapter
    that made room for another one stays away where the call is refused after that: it is read again when asked for.
    """
    ledger = point.ledger
    found = [_find(ledger, row) for row in rows]
    for row, live in zip(rows, found, strict=True):
        _refuse_misplaced(row, 0 if live is None else live.length, ledger.capacity)
    ids = [row.name if live is None else live.cache_id for row, live in zip(rows, found, strict=True)]
    refuse_repeated(cache_id for cache_id in ids if cache_id is not None)
    opened, requests = [], []
    for row, live in zip(rows, found, strict=True):
        if live is None:
            live = point.begin(row.name)
        else:
            point.note(live)
        opened.append(live)
        options = row.options
        if options.capacity_hint is not None:
            ledger.model.prepare_kv_capacity(live.cache_id, options.capacity_hint)
        if options.admission_target is not None:
            most = max(options.admission_target, live.length + len(row.tokens))
            requests.append(KvSlotRequest(cache_id=live.cache_id, target_len=live.length, admission_target_len=most))
    if requests:
        ledger.model.reserve_kv_slots(requests)
    _refuse_without_slots(ledger, [one for row, one in zip(rows, opened, strict=True) if _changes_adapter(row, one)])
    for row, live in zip(rows, opened, strict=True):
        if _changes_adapter(row, live):
            ledger.model.set_lora_adapter_for_cache(live.cache_id, row.options.adapter)
            live.adapter = row.options.adapter
    return opened


def _refuse_without_slots(ledger: Ledger, adapted: Sequence[TrackedSequence]) -> None:
    """Raises ResourceExhausted before an adapter is given up for a sequence that gets no slot, or no block at all."""
    empty = [
        KvSlotRequest(cache_id=live.cache_id, target_len=0, admission_target_len=1)
        for live in adapted
        if not live.length
    ]
    if empty:
        with contextlib.suppress(UnsupportedError):
            ledger.model.reserve_kv_slots(empty)


def _changes_adapter(row: RowInput, live: TrackedSequence) -> bool:
    return row.options.adapter is not None and row.options.adapter != live.adapter


def prefill(point: Savepoint, opened: Sequence[TrackedSequence], rows: Sequence[RowInput]) -> list[Prefilled]:
    """Appends one chunk after another: `[1, V]` of its last token, or `[n, V]` where all logits are asked for."""
    model, answers = point.ledger.model, []
    for live, row in zip(opened, rows, strict=True):
        if _is_apart(row):
            answers.append(_apart(point, live, row))
            continue
        logits = model.prefill(live.cache_id, row.tokens.tolist())
        point.ledger.advance(live, len(row.tokens))
        answers.append(checked_answer(model, logits)[None])
    return answers


def _is_apart(row: RowInput) -> bool:
    """True of a chunk that has a forward of its own, for all logits or for what its layers show."""
    return row.options.full_logits or row.options.is_watched


def _apart(point: Savepoint, live: TrackedSequence, row: RowInput) -> Prefilled:
    options, model = row.options, point.ledger.model
    if not options.is_watched:
        return verify(point, live, row.tokens)
    layers = {"hidden": options.hidden_layers, "attention_weights": options.attention_layers}
    seen = model.watch(live.cache_id, row.tokens.tolist(), **layers)
    point.ledger.advance(live, len(row.tokens))
    return seen if options.full_logits else replace(seen, logits=seen.logits[-1:])


def prefill_cohort(point: Savepoint, opened: Sequence[TrackedSequence], rows: Sequence[RowInput]) -> list[Prefilled]:
    """As `prefill`, with one forward for all chunks of which only the last token's logits are asked for."""
    last = [pair for pair in zip(opened, rows, strict=True) if not _is_apart(pair[1])]
    answers = iter(unified(point, [live for live, _ in last], [row for _, row in last]) if last else [])
    return [
        _apart(point, live, row) if _is_apart(row) else np.asarray(next(answers))[None]
        for live, row in zip(opened, rows, strict=True)
    ]


def unified(point: Savepoint, opened: Sequence[TrackedSequence], rows: Sequence[RowInput]) -> list[Answer | None]:
    """Appends every row, in one forward if the model has one; final rows answer as their policies ask, others None."""
    model = point.ledger.model
    items = [
        (live.cache_id, row.tokens.tolist(), live.length, row.is_final) for live, row in zip(opened, rows, strict=True)
    ]
    try:
        if all(isinstance(row.policy, FullLogits) for row in rows):
            answers = model.unified_forward(items)
        else:
            answers = model.unified_forward_with_logits_policy(items, [row.policy for row in rows])
    except UnsupportedError:
        point.ledger.num_fallbacks += 1
        return one_by_one(point, opened, rows)
    for live, row in zip(opened, rows, strict=True):
        point.ledger.advance(live, len(row.tokens))
    return _checked_answers(model, "unified_forward", answers, rows)


def one_by_one(point: Savepoint, opened: Sequence[TrackedSequence], rows: Sequence[RowInput]) -> list[Answer | None]:
    """As `unified` for a model that cannot: a prefill per chunk, then one decode of all single tokens."""
    answers: list[Answer | None] = [None] * len(rows)
    singles = [
        at
        for at, (live, row) in enumerate(zip(opened, rows, strict=True))
        if live.length and row.is_final and len(row.tokens) == 1
    ]
    model = point.ledger.model
    for at in sorted(set(range(len(rows))) - set(singles)):
        live, row = opened[at], rows[at]
        logits = model.prefill(live.cache_id, row.tokens.tolist())
        point.ledger.advance(live, len(row.tokens))
        answers[at] = choose(checked_answer(model, logits), row.policy) if row.is_final else None
    if singles:
        decoded = decode(point, [opened[at] for at in singles], [rows[at] for at in singles])
        for at, answer in zip(singles, decoded, strict=True):
            answers[at] = answer
    return answers


def decode(point: Savepoint, opened: Sequence[TrackedSequence], rows: Sequence[RowInput]) -> list[Answer]:
    """Appends one token to every sequence, in one forward if the model has one."""
    model = point.ledger.model
    batch = [(live.cache_id, int(row.tokens[0]), live.length) for live, row in zip(opened, rows, strict=True)]
    policies = [row.policy for row in rows]
    if not overrides(model, "decode_batch", "decode_batch_with_full_logits", "decode_batch_with_logits_policy"):
        # The contract's loop would not tell how far it came before a failure.
        answers = []
        for live, token, policy in zip(opened, batch, policies, strict=True):
            logits = model.decode(*token)
            point.ledger.advance(live, 1)
            answers.append(choose(checked_answer(model, logits), policy))
        return answers
    if not all(isinstance(policy, FullLogits) for policy in policies):
        given = model.decode_batch_with_logits_policy(batch, policies)
    elif any(row.options.full_logits for row in rows):
        given = model.decode_batch_with_full_logits(batch, True)
    else:
        given = model.decode_batch(batch)
    for live in opened:
        point.ledger.advance(live, 1)
    if len(given) != len(rows):
        raise ModelError(f"{type(model).__name__}.decode_batch gave {len(given)} answers for {len(rows)} rows")
    return [_as_asked(model, answer, row) for answer, row in zip(given, rows, strict=True)]


def verify(point: Savepoint, live: TrackedSequence, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Appends tokens in one forward, or token by token where the model cannot: `[n, V]`."""
    model = point.ledger.model
    try:
        logits = model.forward_verify(live.cache_id, tokens.tolist())
    except UnsupportedError:
        return np.stack([step(point, live, token) for token in tokens.tolist()])
    point.ledger.advance(live, len(tokens))
    return _checked_matrix(model, logits, len(tokens))


def forward(point: Savepoint, rows: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
    """Gives the logits of every token of every row, `[n, V]` each, and releases what it began."""
    model = point.ledger.model
    longest, capacity = max(len(tokens) for tokens in rows), point.ledger.capacity
    if longest > capacity:
        raise RequestValidationError(f"input_ids have {longest} positions, the KV capacity of a sequence is {capacity}")
    if len(rows) > 1 and overrides(model, "forward_verify_batch"):
        items = [(point.begin_passing().cache_id, tokens.tolist()) for tokens in rows]
        with contextlib.suppress(ResourceExhaustedError):
            given = model.forward_verify_batch(items)
            point.roll_back()
            if len(given) != len(rows):
                raise ModelError(f"{type(model).__name__} gave {len(given)} answers for {len(rows)} rows")
            return [_checked_matrix(model, logits, len(tokens)) for logits, tokens in zip(given, rows, strict=True)]
    answers = []
    for tokens in rows:
        answers.append(verify(point, point.begin_passing(), tokens))
        point.roll_back()
    return answers


def step(point: Savepoint, live: TrackedSequence, token: int) -> Logits:
    """Appends one token: `[V]`."""
    model = point.ledger.model
    cache_id, length = live.cache_id, live.length
    logits = model.decode(cache_id, token, length) if length else model.prefill(cache_id, [token])
    point.ledger.advance(live, 1)
    return checked_answer(model, logits)


def checked_answer(model: Any, logits: Any) -> Logits:
    """Gives a model's logits, or raises if they are not `[V]`."""
    array = np.asarray(logits, np.float32)
    expected = model.config.vocab_size
    if array.shape != (expected,):
        raise ModelError(f"{type(model).__name__} gave logits of shape {list(array.shape)}, expected [{expected}]")
    return array


def _checked_matrix(model: Any, logits: Any, count: int) -> NDArray[np.float32]:
    array = np.asarray(logits, np.float32)
    expected = (count, model.config.vocab_size)
    if array.shape != expected:
        raise ModelError(f"{type(model).__name__} gave logits of shape {list(array.shape)}, expected {list(expected)}")
    return array


def _checked_answers(model: Any, method: str, answers: Sequence[Any], rows: Sequence[RowInput]) -> list[Answer | None]:
    if len(answers) != len(rows):
        raise ModelError(f"{type(model).__name__}.{method} gave {len(answers)} answers for {len(rows)} rows")
    for answer, row in zip(answers, rows, strict=True):
        if (answer is not None) != row.is_final:
            raise ModelError(f"{type(model).__name__}.{method} gave {answer!r} where is_final is {row.is_final}")
    return [
        None if answer is None else _as_asked(model, answer, row) for answer, row in zip(answers, rows, strict=True)
    ]


def _as_asked(model: Any, answer: Any, row: RowInput) -> Answer:
    return checked_answer(model, answer) if isinstance(row.policy, FullLogits) else int(answer)


def _find(ledger: Ledger, row: RowInput) -> TrackedSequence | None:
    if row.handle is not None:
        return current(row.handle, ledger)
    if row.name is None:
        return None
    live = ledger.find(row.name)
    if live is None:
        ledger.refuse_name(row.name)
    return live


def _refuse_misplaced(row: RowInput, start: int, capacity: int) -> None:
    if row.offset is not None:
        refuse_mismatch(row.label, "pos_offset", row.offset, start)
    if row.positions is not None and not np.array_equal(row.positions, np.arange(start, start + len(row.tokens))):
        raise UnsupportedError(
            f"{row.label}.position_ids are {row.positions[:8].tolist()}…, only consecutive ones from the cache's end, "
            f"{start}, are supported"
        )
    if start + len(row.tokens) > capacity:
        raise RequestValidationError(
            f"{row.label} needs {start + len(row.tokens)} positions, the KV capacity of a sequence is {capacity}"
        )

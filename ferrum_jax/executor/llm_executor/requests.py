"""From a caller's arguments to checked rows of tokens. Nothing here knows a sequence's length."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.answers import Captured
from ferrum_jax.contract.checks import check_cache_id, check_flag, check_int, check_items, check_tokens, is_real
from ferrum_jax.contract.decoding import FullLogits, LogitsReturnPolicy, check_policy
from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError, safe_repr
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.contract.tensors import DecodeInput, PrefillInput, UnifiedBatchItem
from ferrum_jax.executor.llm_executor.handle import LlmKvCacheHandle
from ferrum_jax.executor.llm_executor.sequences import TrackedSequence

PREFIX = "ferrum_"
LORA_ADAPTER = "ferrum_lora_adapter"
LORA_PATH = "ferrum_lora_path"
FULL_LOGITS = "ferrum_require_full_logits"
CAPACITY_HINT = "ferrum_kv_capacity_hint"
ADMISSION_TARGET = "ferrum_kv_admission_target_len"
HIDDEN_LAYERS = "ferrum_hidden_layers"
ATTENTION_LAYERS = "ferrum_attention_layers"
KEYS = (LORA_ADAPTER, LORA_PATH, FULL_LOGITS, CAPACITY_HINT, ADMISSION_TARGET, HIDDEN_LAYERS, ATTENTION_LAYERS)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The metadata of a request."""

    adapter: ActiveLoraAdapter | None = None  # to be bound before the first token
    full_logits: bool = False  # of every position in a prefill; no shortcut in a decode
    capacity_hint: int | None = None  # positions the sequence may reach
    admission_target: int | None = None  # positions that must fit before anything runs
    hidden_layers: tuple[int, ...] = ()  # whose hidden states to return, as `DecoderOnlyLLM.capture` counts them
    attention_layers: tuple[int, ...] = ()  # whose attention weights to return

    @property
    def captures(self) -> bool:
        """True if any layer's activations are asked for."""
        return bool(self.hidden_layers or self.attention_layers)


@dataclass(kw_only=True, eq=False)
class RowRequest:
    """New tokens of one sequence, and, once they have run, the model's answer."""

    label: str  # its name in messages
    tokens: list[int]
    handle: Any = None  # of the sequence they are appended to
    name: str | None = None  # the sequence's id where there is no handle; without either, a new sequence
    offset: int | None = None  # position of the first token, as the caller believes
    positions: NDArray[np.integer] | None = None  # [n], of every token, as the caller believes
    is_final: bool = True
    policy: LogitsReturnPolicy = FullLogits()
    options: Options = Options()
    sequence: TrackedSequence = field(init=False)
    answer: Any = field(init=False, default=None)  # as the policy asks; logits [n, V] where all were asked for
    captured: Captured | None = field(init=False, default=None)


def prefill_rows(inputs: Any, vocab_size: int) -> list[RowRequest]:
    """Reads chunks of prompts, each `input_ids [1, n]`."""
    rows = []
    for at, given in enumerate(check_items("inputs", inputs, PrefillInput)):
        row = _read_input(f"inputs[{at}]", given, vocab_size)
        count = len(row.tokens)
        mask = _array_of_shape(f"{row.label}.attention_mask", given.attention_mask, count, "iubf", "numbers")
        if mask is not None and (num_hidden := int((mask != 1).sum())):
            raise UnsupportedError(
                f"{row.label}.attention_mask hides {num_hidden} of {count} tokens, only ones are supported"
            )
        rows.append(row)
    return rows


def decode_rows(inputs: Any, vocab_size: int) -> list[RowRequest]:
    """Reads one token of each sequence, `input_ids [1, 1]`."""
    rows = []
    for at, given in enumerate(check_items("inputs", inputs, DecodeInput)):
        row = _read_input(f"inputs[{at}]", given, vocab_size)
        if len(row.tokens) != 1:
            raise RequestValidationError(f"{row.label}.input_ids has shape [1, {len(row.tokens)}], expected [1, 1]")
        if given.kv_cache is None:
            raise RequestValidationError(f"{row.label}.kv_cache is None, decoding needs a handle")
        if len(row.options.hidden_layers) > 1:
            asked = list(row.options.hidden_layers)
            raise RequestValidationError(
                f"{row.label}: {HIDDEN_LAYERS} is {asked}, a DecodeOutput has the hidden state of one layer"
            )
        row.policy = _check_policy(row, given.logits_policy, vocab_size)
        rows.append(row)
    return rows


def unified_rows(items: Any, vocab_size: int) -> list[RowRequest]:
    """Reads the rows of a mixed batch."""
    rows = []
    for at, given in enumerate(check_items("items", items, UnifiedBatchItem)):
        label = f"items[{at}]"
        row = RowRequest(
            label=label,
            tokens=check_tokens(f"{label}.q_tokens", given.q_tokens, vocab_size).tolist(),
            handle=given.kv_cache,
            name=check_cache_id(given.seq_id) if given.kv_cache is None else None,
            offset=check_int(f"{label}.pos_offset", given.pos_offset, 0),
            is_final=check_flag(f"{label}.is_final_chunk", given.is_final_chunk),
            options=read_options(label, given.metadata),
        )
        check_no_captures(row, "unified_decode")
        row.policy = _check_policy(row, given.logits_policy, vocab_size)
        rows.append(row)
    return rows


def token_rows(name: str, given: Any, vocab_size: int) -> list[RowRequest]:
    """Reads an integer `[batch, seq]` array, both at least 1, as new sequences."""
    matrix = _token_matrix(name, given, vocab_size)
    if not matrix:
        raise RequestValidationError(f"{name} has no rows, expected at least one")
    return [RowRequest(label=name, tokens=tokens) for tokens in matrix]


def check_no_captures(row: RowRequest, method: str) -> None:
    """Raises UnsupportedError for captures, for which the output of a method has no field."""
    if row.options.captures:
        raise UnsupportedError(
            f"{row.label}: {HIDDEN_LAYERS} and {ATTENTION_LAYERS} have no place in {method}'s output"
        )


def check_threshold(threshold: Any) -> float:
    """Returns an acceptance threshold between 0 and 1."""
    if not is_real(threshold) or not 0 <= threshold <= 1:
        raise RequestValidationError(f"acceptance_threshold is {safe_repr(threshold)}, expected a number from 0 to 1")
    return float(threshold)


def join_rows(rows: Sequence[RowRequest]) -> RowRequest:
    """Returns decode rows that follow each other in one sequence as one row."""
    first = rows[0]
    for row in rows[1:]:
        if row.handle is not first.handle and not (
            isinstance(first.handle, LlmKvCacheHandle) and row.handle == first.handle
        ):
            raise RequestValidationError(f"{row.label} has {row.handle!r}, {first.label} {first.handle!r}: share one")
        if row.options != first.options:
            raise RequestValidationError(f"{row.label} and {first.label} ask for different options of one sequence")
    given = {at: int(row.positions[0]) for at, row in enumerate(rows) if row.positions is not None}
    starts = {position - at for at, position in given.items()}
    if len(starts) > 1:
        raise UnsupportedError(f"inputs have position_ids {list(given.values())}, only consecutive ones are possible")
    positions = np.array([start + at for start in starts for at in range(len(rows))], object) if given else None
    tokens = [token for row in rows for token in row.tokens]
    return replace(first, label="inputs", tokens=tokens, positions=positions)


def extend_row(row: RowRequest, draft_tokens: Any, vocab_size: int) -> RowRequest:
    """Appends drafted tokens, perhaps none, to a row of one token; their positions follow that token's."""
    draft = []
    if _array("draft_tokens", draft_tokens).shape != (0,):
        draft = check_tokens("draft_tokens", draft_tokens, vocab_size).tolist()
    positions = None if row.positions is None else row.positions[0] + np.arange(1 + len(draft))
    return replace(row, tokens=row.tokens + draft, positions=positions)


def read_options(label: str, metadata: Any) -> Options:
    """Reads the keys that begin with `ferrum_`; all others are the caller's own. A value of None counts as absent.

    Raises:
        RequestValidationError: an unknown key, a value of the wrong type, or one half of a LoRA adapter.
    """
    if not isinstance(metadata, Mapping):
        raise RequestValidationError(f"{label}: metadata is a {type(metadata).__name__}, expected a mapping")
    ours = {key: value for key, value in metadata.items() if isinstance(key, str) and key.startswith(PREFIX)}
    unknown = sorted(ours.keys() - set(KEYS))
    if unknown:
        raise RequestValidationError(f"{label}: metadata keys {unknown} are unknown, known are {', '.join(KEYS)}")
    given = {key: value for key, value in ours.items() if value is not None}

    def positions(key: str) -> int | None:
        return check_int(f"{label}: {key}", given[key], 0) if key in given else None

    def layers(key: str) -> tuple[int, ...]:
        value = given.get(key, ())
        if not isinstance(value, list | tuple):
            raise RequestValidationError(f"{label}: {key} is {safe_repr(value)}, expected a list of layers")
        return tuple(check_int(f"{label}: {key}", layer, 0) for layer in value)

    return Options(
        adapter=_read_adapter(label, given.get(LORA_ADAPTER), given.get(LORA_PATH)),
        full_logits=check_flag(f"{label}: {FULL_LOGITS}", given.get(FULL_LOGITS, False)),
        capacity_hint=positions(CAPACITY_HINT),
        admission_target=positions(ADMISSION_TARGET),
        hidden_layers=layers(HIDDEN_LAYERS),
        attention_layers=layers(ATTENTION_LAYERS),
    )


def _read_adapter(label: str, name: Any, path: Any) -> ActiveLoraAdapter | None:
    if name is None and path is None:
        return None
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not (isinstance(name, str) and isinstance(path, str) and name):
        raise RequestValidationError(
            f"{label}: {LORA_ADAPTER} is {safe_repr(name)} and {LORA_PATH} is {safe_repr(path)}, expected both or "
            "neither, a string and a path, which is '' for the adapter that is loaded under this name"
        )
    return ActiveLoraAdapter(name=name, path=path)


def _read_input(label: str, given: PrefillInput | DecodeInput, vocab_size: int) -> RowRequest:
    rows = _token_matrix(f"{label}.input_ids", given.input_ids, vocab_size)
    if len(rows) != 1:
        raise RequestValidationError(f"{label}.input_ids has {len(rows)} rows, expected 1: an input is one sequence")
    return RowRequest(
        label=label,
        tokens=rows[0],
        handle=given.kv_cache,
        positions=_array_of_shape(f"{label}.position_ids", given.position_ids, len(rows[0]), "iu", "integers"),
        options=read_options(label, given.metadata),
    )


def _check_policy(row: RowRequest, policy: LogitsReturnPolicy, vocab_size: int) -> LogitsReturnPolicy:
    policy = check_policy(policy, vocab_size)
    if row.options.full_logits and not isinstance(policy, FullLogits):
        raise RequestValidationError(f"{row.label}: {FULL_LOGITS} contradicts the policy {type(policy).__name__}")
    return policy


def _token_matrix(name: str, given: Any, vocab_size: int) -> list[list[int]]:
    array = _array(name, given)
    if array.ndim != 2:
        raise RequestValidationError(f"{name} has shape {list(array.shape)}, expected [batch, seq]")
    if isinstance(given, list | tuple):
        array = np.asarray(given, object)  # a boolean among integers stays one, and is refused
    return [check_tokens(f"{name}, row {at}", row, vocab_size).tolist() for at, row in enumerate(array)]


def _array(name: str, given: Any) -> NDArray[Any]:
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise RequestValidationError(f"{name} is no array: {problem}") from None


def _array_of_shape(name: str, given: Any, count: int, kinds: str, expected: str) -> NDArray[Any] | None:
    """Returns the row of a `[1, count]` array of one of some dtype kinds, or None."""
    if given is None:
        return None
    array = _array(name, given)
    if array.shape != (1, count) or array.dtype.kind not in kinds:
        raise RequestValidationError(
            f"{name} is {array.dtype} of shape {list(array.shape)}, expected {expected} of shape [1, {count}]"
        )
    return array[0]

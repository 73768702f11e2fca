"""Inputs and outputs of a `ModelExecutor`. Arrays are NumPy or JAX arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ferrum_jax.contract.decoding import FullLogits, LogitsReturnPolicy
from ferrum_jax.contract.errors import RequestValidationError
from ferrum_jax.contract.handles import KvCacheHandle


def _shape(name: str, array: Any, rank: int) -> tuple[int, ...]:
    try:
        shape = np.shape(array)
    except (RuntimeError, TypeError, ValueError) as problem:
        raise RequestValidationError(f"{name} are no array: {problem}") from None
    if len(shape) != rank:
        raise RequestValidationError(f"{name} has shape {list(shape)}, expected {rank} dimensions")
    return shape


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillInput:
    """Prompt tokens, appended to the handle's sequence if one is given."""

    input_ids: Any  # int [batch, seq]
    attention_mask: Any | None = None  # [batch, seq], ones
    position_ids: Any | None = None  # int [batch, seq], consecutive from the cache's end
    kv_cache: KvCacheHandle | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def batch_size(self) -> int:
        """Rows of `input_ids`."""
        return _shape("input_ids", self.input_ids, 2)[0]

    def sequence_length(self) -> int:
        """Tokens per row of `input_ids`."""
        return _shape("input_ids", self.input_ids, 2)[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillOutput:
    """Logits of a prompt and the handle at its end."""

    logits: Any  # float32 [batch, seq, vocab]
    kv_cache: KvCacheHandle
    hidden_states: Sequence[Any] | None = None  # [batch, seq, hidden] of each layer that was asked for
    attention_weights: Sequence[Any] | None = None  # [batch, heads, seq, positions] of each layer that was asked for

    def last_token_logits(self) -> Any:
        """Logits of the last position, `[batch, vocab]`; an empty sequence has none and is RequestValidation."""
        shape = _shape("logits", self.logits, 3)
        if not shape[1]:
            raise RequestValidationError(f"logits have shape {list(shape)}: an empty sequence has no last token")
        return self.logits[:, -1, :]


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeInput:
    """One new token of one live sequence."""

    input_ids: Any  # int [batch, 1]
    kv_cache: KvCacheHandle
    position_ids: Any | None = None  # int [batch, 1]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    logits_policy: LogitsReturnPolicy = FullLogits()

    def batch_size(self) -> int:
        """Rows of `input_ids`."""
        return _shape("input_ids", self.input_ids, 2)[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeOutput:
    """Logits of one decoded token and the handle after it."""

    logits: Any  # float32 [batch, vocab], or int [batch, 1] ids under GreedyArgmax
    kv_cache: KvCacheHandle
    hidden_state: Any | None = None  # [batch, hidden] of the one layer that was asked for
    attention_weights: Sequence[Any] | None = None  # [batch, heads, positions] of each layer that was asked for


@dataclass(frozen=True, kw_only=True, eq=False)
class SpeculativeDecodeOutput:
    """How many drafted tokens were accepted, and the logits after them."""

    accepted_tokens: Sequence[int]  # drafted tokens that are now in the KV, after the input's own
    next_logits: Any  # float32 [1, vocab], after the last accepted token
    kv_cache: KvCacheHandle  # ends with the last accepted token
    acceptance_count: int


@dataclass(frozen=True, kw_only=True, eq=False)
class UnifiedBatchItem:
    """One row of a mixed batch: a decode token or a chunk of a prompt.

    With a handle the row belongs to the handle's sequence and `seq_id` is the caller's own name for it. Without one
    `seq_id` is the sequence's id: a live one, or, at position 0, one that begins here.
    """

    seq_id: str
    q_tokens: Sequence[int]
    pos_offset: int  # position of the first token
    is_final_chunk: bool
    kv_cache: KvCacheHandle | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    logits_policy: LogitsReturnPolicy = FullLogits()


@dataclass(frozen=True)
class UnifiedBatch:
    """Rows that run in one forward."""

    items: Sequence[UnifiedBatchItem]

    def total_q_tokens(self) -> int:
        """Tokens of all rows together."""
        return sum(len(item.q_tokens) for item in self.items)

    def num_sampled_items(self) -> int:
        """Rows that answer with logits or a token id."""
        return sum(item.is_final_chunk for item in self.items)

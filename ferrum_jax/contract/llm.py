"""`DecoderOnlyLLM`: the small mutable contract every model stands behind."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError
from ferrum_jax.contract.policy import FullLogits, GreedyArgmax, LogitsReturnPolicy
from ferrum_jax.contract.slots import (
    ActiveLoraAdapter,
    KvSlotCapacitySnapshot,
    KvSlotRequest,
    KvSlotReservation,
)
from ferrum_jax.contract.values import LlmRuntimeConfig

Logits = NDArray[np.float32]  # [V]
DecodeRow = tuple[str, int, int]  # cache id, token id, position
UnifiedRow = tuple[str, Sequence[int], int, bool]  # cache id, token ids, position offset, is final chunk


class DecoderOnlyLLM(abc.ABC):
    """A decoder-only language model with live sequences, each known by a string cache id.

    Logits come back as NumPy float32 on the host. A subclass must provide `config`, `prefill`, `decode` and
    `release`; everything else has a default that is either correct on top of those four or a clear refusal.
    The class holds no state. An error leaves every sequence as it was.
    """

    @property
    @abc.abstractmethod
    def config(self) -> LlmRuntimeConfig:
        """Sizes a scheduler needs."""

    @abc.abstractmethod
    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        """Appends `tokens` to the sequence (created if unknown) and returns the last token's logits, `[vocab]`."""

    @abc.abstractmethod
    def decode(self, cache_id: str, token: int, pos: int) -> Logits:
        """Appends one token at position `pos`, the number of tokens already consumed; returns `[vocab]`."""

    @abc.abstractmethod
    def release(self, cache_id: str) -> None:
        """Frees the sequence, its blocks and its adapter binding; an unknown id is no error."""

    def decode_batch(self, batch: Sequence[DecodeRow]) -> list[Logits]:
        """Decodes one token of each sequence, in order.

        The default calls `decode` row by row, so a row that fails leaves the rows before it advanced.

        Raises:
            RequestValidationError: an id occurs twice; nothing was decoded.
        """
        ids = [cache_id for cache_id, _, _ in batch]
        if repeated := [cache_id for cache_id in dict.fromkeys(ids) if ids.count(cache_id) > 1]:
            raise RequestValidationError(f"{repeated[0]!r} occurs twice in one batch, a sequence can have one row")
        return [self.decode(cache_id, token, pos) for cache_id, token, pos in batch]

    def decode_batch_with_full_logits(self, batch: Sequence[DecodeRow], force_full_logits: bool) -> list[Logits]:
        """As `decode_batch`; `force_full_logits` forbids any shortcut that would not produce all logits."""
        return self.decode_batch(batch)

    def decode_batch_with_logits_policy(
        self, batch: Sequence[DecodeRow], policies: Sequence[LogitsReturnPolicy]
    ) -> list[Logits | int]:
        """As `decode_batch`, each row answering as its policy asks: `[vocab]` logits or a token id."""
        refuse_unequal(len(batch), len(policies))
        for policy in policies:
            refuse_policy(policy, self.config.vocab_size)
        logits = self.decode_batch(batch)
        return [choose(row, policy) for row, policy in zip(logits, policies, strict=True)]

    def forward_verify(self, cache_id: str, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends `tokens` and returns `[n, vocab]`: row i is the distribution after token i.

        The default decodes token by token from the cache's end, which needs `kv_len`.
        """
        if len(tokens) == 0:
            raise RequestValidationError(f"{cache_id!r}: forward_verify needs at least one token, none were given")
        start = self.kv_len(cache_id)
        if start is None:
            raise UnsupportedError(f"{type(self).__name__} does not know where {cache_id!r} ends, so it cannot verify")
        return np.stack([self.decode(cache_id, token, start + i) for i, token in enumerate(tokens)])

    def unified_forward(self, items: Sequence[UnifiedRow]) -> list[Logits | None]:
        """Runs decode rows, final chunks and intermediate chunks in one forward; None where a chunk is not final."""
        raise UnsupportedError(f"{type(self).__name__} has no unified forward")

    def unified_forward_with_logits_policy(
        self, items: Sequence[UnifiedRow], policies: Sequence[LogitsReturnPolicy]
    ) -> list[Logits | int | None]:
        """As `unified_forward`, each final row answering as its policy asks."""
        refuse_unequal(len(items), len(policies))
        for policy in policies:
            refuse_policy(policy, self.config.vocab_size)
        rows = self.unified_forward(items)
        return [None if row is None else choose(row, policy) for row, policy in zip(rows, policies, strict=True)]

    def unified_forward_can_return_full_logits(self) -> bool:
        """Says whether `unified_forward` gives `[vocab]` logits rather than token ids."""
        return True

    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        """Rolls the sequence back to `new_len` positions; past its end, or an unknown id, is no error."""
        raise UnsupportedError(f"{type(self).__name__} cannot roll its KV back")

    def reset(self) -> None:
        """Drops every sequence; keeps weights, loaded adapters and compiled steps."""
        return None

    def prepare(self, cache_id: str, max_tokens: int) -> None:
        """Gets ready for calls of up to `max_tokens` tokens on `cache_id`; changes no KV and no counter."""
        return None

    def prepare_kv_capacity(self, cache_id: str, capacity_hint: int) -> None:
        """Tells the whole length, in positions, that the request may reach."""
        return None

    def kv_capacity(self) -> int:
        """Longest sequence one id can reach, in positions."""
        return self.config.max_seq_len

    def kv_len(self, cache_id: str) -> int | None:
        """Positions held for `cache_id`; None for an unknown id, or where the model cannot tell."""
        return None

    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation | None:
        """Makes positions writable, all or nothing; None where the model does not account for blocks."""
        return None

    def kv_slot_capacity_snapshot(self) -> KvSlotCapacitySnapshot | None:
        """Counts the pool's blocks; None where the model does not account for blocks."""
        return None

    def set_lora_adapter_for_cache(self, cache_id: str, adapter: ActiveLoraAdapter | None) -> None:
        """Binds an adapter to one id, or clears the binding with None."""
        if adapter is not None:
            raise UnsupportedError(f"{type(self).__name__} has no LoRA, adapter {adapter.name!r} cannot be bound")

    def cache_metrics_snapshot(self) -> Mapping[str, Any] | None:
        """Counters of KV reuse and batching; None where the model keeps none."""
        return None

    def lora_metrics_snapshot(self) -> Mapping[str, Any] | None:
        """Counters of LoRA; None where the model keeps none."""
        return None


def refuse_unequal(num_rows: int, num_policies: int) -> None:
    """Raises RequestValidation unless there is one policy per row."""
    if num_rows != num_policies:
        raise RequestValidationError(f"{num_rows} rows need as many policies, {num_policies} were given")


def refuse_policy(policy: LogitsReturnPolicy, vocab_size: int) -> None:
    """Raises RequestValidation where a mask allows no token, or a penalised id is outside the vocabulary."""
    if isinstance(policy, FullLogits):
        return
    if not isinstance(policy, GreedyArgmax):
        raise RequestValidationError(f"logits policy {policy!r}: expected FullLogits or GreedyArgmax")
    penalty, mask = policy.repetition_penalty, policy.token_mask
    if penalty is not None and any(not 0 <= token < vocab_size for token in penalty.token_ids):
        raise RequestValidationError(f"penalised ids {list(penalty.token_ids)} leave the vocabulary of {vocab_size}")
    if mask is not None and not np.asarray(mask.valid_token_mask)[:vocab_size].any():
        raise RequestValidationError(f"mask {mask.fingerprint!r} allows none of {vocab_size} tokens")


def choose(logits: Logits, policy: LogitsReturnPolicy) -> Logits | int:
    """Answers one row on the host as its policy, which `refuse_policy` has let pass, asks."""
    if isinstance(policy, FullLogits):
        return logits
    scores = logits.copy()
    penalty = policy.repetition_penalty
    if penalty is not None and len(penalty.token_ids):
        ids = np.unique(np.asarray(penalty.token_ids, np.int64))
        scores[ids] = np.where(scores[ids] > 0, scores[ids] / penalty.penalty, scores[ids] * penalty.penalty)
    if policy.token_mask is not None:
        given = np.asarray(policy.token_mask.valid_token_mask).astype(bool)[: len(scores)]
        allowed = np.zeros(len(scores), bool)
        allowed[: len(given)] = given
        scores[~allowed] = -np.inf
    return int(np.argmax(scores))

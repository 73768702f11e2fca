"""`DecoderOnlyLLM`: the small mutable contract every model stands behind."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.answers import (
    Captured,
    Logits,
    TokenScores,
    check_answer_count,
    check_logit_rows,
    check_logits,
    kept,
    score_targets,
)
from ferrum_jax.contract.answers import choose as choose
from ferrum_jax.contract.checks import (
    check_cache_id,
    check_count,
    check_distinct,
    check_policy_count,
    check_rows,
    check_tokens,
)
from ferrum_jax.contract.decoding import DecodedRun, DecodeRun, LogitsReturnPolicy, check_policy
from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError
from ferrum_jax.contract.execution import ExecutorCapabilities, ExecutorMemoryUsage, ExecutorState
from ferrum_jax.contract.handles import BlockTable
from ferrum_jax.contract.slots import ActiveLoraAdapter, KvSlotCapacitySnapshot, KvSlotRequest, KvSlotReservation
from ferrum_jax.contract.values import LlmRuntimeConfig, ModelInfo

DecodeRow = tuple[str, int, int]  # cache id, token id, position
UnifiedRow = tuple[str, Sequence[int], int, bool]  # cache id, token ids, position offset, is final chunk
VerifyRow = tuple[str, Sequence[int]]  # cache id, token ids
ScoreRow = tuple[str, Sequence[int], Sequence[int]]  # cache id, token ids, and the token after each of them


class DecoderOnlyLLM(abc.ABC):
    """A decoder-only language model with live sequences, each known by a string cache id.

    Logits come back as NumPy float32 on the host. A subclass must provide `config`, `prefill`, `decode` and
    `release`; everything else has a default that is either correct on top of those four or a clear refusal.
    The class holds no state. An error leaves every sequence as it was.

    Attributes:
        state: where the model is in its life, to be read in every state. Like the next one it is no property, so that a
            subclass may use the name for something else: what is no `ExecutorState` counts as Ready.
        loop_tokens: tokens per row and call for which `decode_n` is quickest; 0 where the model has no such thing.
    """

    state: ExecutorState = ExecutorState.Ready
    loop_tokens: int = 0

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
            RequestValidationError: an id occurs twice, or a token is no id; nothing was decoded.
        """
        rows = check_rows("batch", batch, "cache_id token pos")
        check_distinct(check_cache_id(cache_id) for cache_id, _, _ in rows)
        for cache_id, token, _ in rows:
            check_tokens(cache_id, [token], self.config.vocab_size)
        return [kept(self.decode(cache_id, token, pos)) for cache_id, token, pos in rows]

    def decode_batch_with_full_logits(self, batch: Sequence[DecodeRow], force_full_logits: bool) -> list[Logits]:
        """As `decode_batch`; `force_full_logits` forbids any shortcut that would not produce all logits."""
        return self.decode_batch(batch)

    def decode_batch_with_logits_policy(
        self, batch: Sequence[DecodeRow], policies: Sequence[LogitsReturnPolicy]
    ) -> list[Logits | int]:
        """As `decode_batch`, each row answering as its policy asks: `[vocab]` logits or a token id."""
        check_policy_count(check_count("rows", batch), policies)
        policies = [check_policy(policy, self.config.vocab_size) for policy in policies]
        logits = self.decode_batch(batch)
        check_answer_count(self, logits, len(batch))
        return [choose(check_logits(self, row), policy) for row, policy in zip(logits, policies, strict=True)]

    def forward_verify(self, cache_id: str, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends `tokens` and returns `[n, vocab]`: row i is the distribution after token i.

        The default decodes token by token from the cache's end, which needs a `kv_len`; an id that this does not know
        begins with a prefill of its first token.
        """
        check_tokens(cache_id, tokens, self.config.vocab_size)
        start = self.kv_len(cache_id)
        if start is None and type(self).kv_len is DecoderOnlyLLM.kv_len:
            raise UnsupportedError(f"{type(self).__name__} does not know where {cache_id!r} ends, so it cannot verify")
        rows = [kept(self.prefill(cache_id, tokens[:1]))] if start is None else []
        rows += [kept(self.decode(cache_id, tokens[i], (start or 0) + i)) for i in range(len(rows), len(tokens))]
        return np.stack([check_logits(self, row) for row in rows])

    def forward_verify_batch(self, rows: Sequence[VerifyRow]) -> list[NDArray[np.float32]]:
        """As `forward_verify` for several sequences, in order; the default runs them one by one."""
        checked = check_rows("rows", rows, "cache_id tokens")
        check_distinct(check_cache_id(cache_id) for cache_id, _ in checked)
        for cache_id, tokens in checked:
            check_tokens(cache_id, tokens, self.config.vocab_size)
        return [kept(self.forward_verify(cache_id, tokens)) for cache_id, tokens in checked]

    def score_batch(self, rows: Sequence[ScoreRow]) -> list[TokenScores]:
        """Appends each row's tokens and scores its targets: target i is the token after token i.

        The default takes the logits of `forward_verify_batch` to the host.
        """
        checked = check_rows("rows", rows, "cache_id tokens targets")
        wanted = [check_tokens(cache_id, targets, self.config.vocab_size) for cache_id, _, targets in checked]
        for (cache_id, tokens, _), targets in zip(checked, wanted, strict=True):
            if (count := check_count("tokens", tokens)) != len(targets):
                raise RequestValidationError(f"{cache_id!r}: {count} tokens, but {len(targets)} targets")
        logits = self.forward_verify_batch([(cache_id, tokens) for cache_id, tokens, _ in checked])
        check_answer_count(self, logits, len(checked))
        return [
            score_targets(check_logit_rows(self, row, len(targets)), targets)
            for row, targets in zip(logits, wanted, strict=True)
        ]

    def capture(
        self, cache_id: str, tokens: Sequence[int], *, hidden: Sequence[int] = (), attention_weights: Sequence[int] = ()
    ) -> Captured:
        """Appends `tokens` as `forward_verify` does and returns activations beside the logits.

        Args:
            cache_id: the sequence, created if unknown.
            tokens: token ids, at least one.
            hidden: hidden states to return, by the number of layers before: 0 are the embeddings.
            attention_weights: layers, from 0, whose softmax weights to return.
        """
        raise UnsupportedError(f"{type(self).__name__} does not show its layers")

    def unified_forward(self, items: Sequence[UnifiedRow]) -> list[Logits | None]:
        """Runs decode rows, final chunks and intermediate chunks in one forward; None where a chunk is not final."""
        raise UnsupportedError(f"{type(self).__name__} has no unified forward")

    def unified_forward_with_logits_policy(
        self, items: Sequence[UnifiedRow], policies: Sequence[LogitsReturnPolicy]
    ) -> list[Logits | int | None]:
        """As `unified_forward`, each final row answering as its policy asks."""
        check_policy_count(check_count("rows", items), policies)
        policies = [check_policy(policy, self.config.vocab_size) for policy in policies]
        if not self.unified_forward_can_return_full_logits():
            raise UnsupportedError(f"{type(self).__name__} has no unified forward with logits to choose from")
        rows = self.unified_forward(items)
        check_answer_count(self, rows, len(items))
        return [
            None if row is None else choose(check_logits(self, row), policy)
            for row, policy in zip(rows, policies, strict=True)
        ]

    def decode_n(self, runs: Sequence[DecodeRun], *, until_one_ends: bool = False) -> list[DecodedRun]:
        """Decodes up to `max_tokens` tokens of each live sequence in one call, in order.

        The result equals decoding token by token. A run ends with a stop id, which it includes, or at its limit;
        with `until_one_ends`, all end with the first that does.
        """
        raise UnsupportedError(f"{type(self).__name__} decodes token by token")

    def unified_forward_can_return_full_logits(self) -> bool:
        """True if final rows of `unified_forward` return `[vocab]` logits; False: only greedy policies are served.

        Callers that need logits ask this first and use `prefill` and `decode_batch` instead.
        """
        return True

    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        """Rolls the sequence back to `new_len` positions; past its end, or an unknown id, is no error."""
        raise UnsupportedError(f"{type(self).__name__} cannot roll its KV back")

    def fork(self, cache_id: str, new_cache_id: str) -> None:
        """Makes `new_cache_id` a copy of a live sequence that shares its blocks until either writes."""
        raise UnsupportedError(f"{type(self).__name__} cannot fork a sequence")

    def reset(self) -> None:
        """Drops every sequence; keeps weights, loaded adapters and compiled steps."""
        return None

    def warmup(self, *, progress: bool = True) -> None:
        """Compiles or loads all programs that calls will need; the default does nothing."""
        return None

    def prepare(self, cache_id: str, max_tokens: int) -> None:
        """Gets ready for calls of up to `max_tokens` tokens on `cache_id`; changes no KV and no counter."""
        return None

    def prepare_kv_capacity(self, cache_id: str, capacity_hint: int) -> None:
        """Announces the whole length, in positions, that the request may reach; an error where it never fits."""
        return None

    def kv_capacity(self) -> int:
        """Longest sequence one id can reach, in positions."""
        return self.config.max_seq_len

    def kv_len(self, cache_id: str) -> int | None:
        """Positions held for `cache_id`; None for an unknown id, or where the model does not know."""
        return None

    def kv_block_table(self, cache_id: str) -> BlockTable | None:
        """Where a sequence's positions lie; None for an unknown id, or where the model has no blocks."""
        return None

    def kv_cache(self, cache_id: str, layer: int) -> tuple[Any, Any]:
        """Copies one layer's keys and values of a sequence: two arrays `[positions, kv_heads, head_dim]`."""
        raise UnsupportedError(f"{type(self).__name__} does not show its KV")

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

    def model_info(self) -> ModelInfo | None:
        """Identity and size; None where the model does not know."""
        return None

    def capabilities(self) -> ExecutorCapabilities | None:
        """What was built; None where the model does not know."""
        return None

    def memory_usage(self) -> ExecutorMemoryUsage | None:
        """Memory the model holds; None where it does not know."""
        return None

"""`DecoderOnlyLLM`s whose answers can be computed by hand."""

import threading
from collections.abc import Sequence

import numpy as np

from ferrum_jax.contract import ActiveLoraAdapter, DecoderOnlyLLM, LlmRuntimeConfig
from ferrum_jax.contract.errors import RequestValidationError, ResourceExhaustedError
from ferrum_jax.contract.llm import Logits


class CountingLLM(DecoderOnlyLLM):
    """The best next token after `last` at `position` is (last + position) mod vocabulary.

    It provides the four required methods alone. Logits fall off linearly from the best token.
    """

    def __init__(self, vocab_size: int = 23, capacity: int = 64, max_seqs: int = 1000):
        self._sizes = LlmRuntimeConfig(
            hidden_size=1, num_layers=1, num_kv_heads=1, head_dim=2, vocab_size=vocab_size, max_seq_len=capacity
        )
        self._max_seqs = max_seqs
        self.lengths: dict[str, int] = {}

    @property
    def config(self) -> LlmRuntimeConfig:
        return self._sizes

    def next_token(self, last: int, position: int) -> int:
        return (last + position) % self._sizes.vocab_size

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        if cache_id not in self.lengths and len(self.lengths) >= self._max_seqs:
            raise ResourceExhaustedError("no slot", needed=1, free=0)
        self.lengths[cache_id] = self.lengths.get(cache_id, 0) + len(tokens)
        return self._logits(tokens[-1], self.lengths[cache_id] - 1)

    def decode(self, cache_id: str, token: int, pos: int) -> Logits:
        if pos != self.lengths.get(cache_id, 0):
            raise RequestValidationError(f"pos {pos}, length {self.lengths.get(cache_id, 0)}")
        return self.prefill(cache_id, [token])

    def release(self, cache_id: str) -> None:
        self.lengths.pop(cache_id, None)

    def _logits(self, last: int, position: int) -> Logits:
        distance = np.abs(np.arange(self._sizes.vocab_size) - self.next_token(last, position))
        return -distance.astype(np.float32)


def answer(model: CountingLLM, prompt: Sequence[int], count: int) -> list[int]:
    """What greedy generation from `prompt` must give."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model.next_token(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]


class SummingLLM(DecoderOnlyLLM):
    """The best next token after some tokens is their sum mod vocabulary: an answer tells the whole sequence.

    It has every method that an executor may want, records what was called, and can be told to fail or to wait.
    """

    def __init__(self, vocab_size: int = 23, capacity: int = 64, max_seqs: int = 1000):
        self._sizes = LlmRuntimeConfig(
            hidden_size=1, num_layers=2, num_kv_heads=1, head_dim=3, vocab_size=vocab_size, max_seq_len=capacity
        )
        self._max_seqs = max_seqs
        self.tokens: dict[str, list[int]] = {}
        self.adapters: dict[str, ActiveLoraAdapter] = {}
        self.calls: list[str] = []
        self.failures: dict[str, Exception] = {}  # by method: raised once, before anything changes
        self.late_failures: dict[str, Exception] = {}  # the same, after everything has changed
        self.gate = threading.Event()  # forwards wait for it
        self.gate.set()
        self.entered = threading.Event()  # a forward has begun

    @property
    def config(self) -> LlmRuntimeConfig:
        return self._sizes

    def best(self, tokens: Sequence[int]) -> int:
        return sum(tokens) % self._sizes.vocab_size

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        return self._forward("prefill", [(cache_id, tokens)])[0][-1]

    def decode(self, cache_id: str, token: int, pos: int) -> Logits:
        return self._forward("decode", [(cache_id, [token])], [pos])[0][-1]

    def decode_batch(self, batch: Sequence[tuple[str, int, int]]) -> list[Logits]:
        rows = [(cache_id, [token]) for cache_id, token, _ in batch]
        return [row[-1] for row in self._forward("decode_batch", rows, [pos for _, _, pos in batch])]

    def forward_verify(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        return self._forward("forward_verify", [(cache_id, tokens)])[0]

    def unified_forward(self, items: Sequence[tuple[str, Sequence[int], int, bool]]) -> list[Logits | None]:
        rows = self._forward("unified_forward", [(i[0], i[1]) for i in items], [i[2] for i in items])
        return [row[-1] if item[3] else None for row, item in zip(rows, items, strict=True)]

    def release(self, cache_id: str) -> None:
        self.calls.append("release")
        self.tokens.pop(cache_id, None)
        self.adapters.pop(cache_id, None)

    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        self.calls.append("truncate_kv")
        del self.tokens.get(cache_id, [])[new_len:]

    def fork(self, cache_id: str, new_cache_id: str) -> None:
        self._check_free_slots([new_cache_id])
        self.tokens[new_cache_id] = list(self.tokens[cache_id])

    def kv_len(self, cache_id: str) -> int | None:
        return len(self.tokens[cache_id]) if cache_id in self.tokens else None

    def kv_cache(self, cache_id: str, layer: int) -> tuple[Logits, Logits]:
        keys = np.array(self.tokens[cache_id], np.float32)[:, None, None] * np.ones((1, 3), np.float32)
        return keys + layer, -keys - layer

    def set_lora_adapter_for_cache(self, cache_id: str, adapter: ActiveLoraAdapter | None) -> None:
        if adapter is None:
            self.adapters.pop(cache_id, None)
        elif self.tokens.get(cache_id):
            raise RequestValidationError(f"{cache_id!r} is not empty")
        else:
            self.adapters[cache_id] = adapter

    def reset(self) -> None:
        self.tokens.clear()

    def _forward(
        self, name: str, rows: Sequence[tuple[str, Sequence[int]]], positions: Sequence[int] | None = None
    ) -> list[Logits]:
        self.calls.append(name)
        self.entered.set()
        assert self.gate.wait(timeout=60)
        if name in self.failures:
            raise self.failures.pop(name)
        self._check_free_slots([cache_id for cache_id, _ in rows])
        for (cache_id, _), pos in zip(rows, positions or [], strict=bool(positions)):
            assert pos == len(self.tokens.get(cache_id, [])), "the executor gave a wrong position"
        answers = []
        for cache_id, tokens in rows:
            held = self.tokens.setdefault(cache_id, [])
            sums = [self.best([*held, *tokens[: end + 1]]) for end in range(len(tokens))]
            held.extend(tokens)
            distance = np.abs(np.arange(self._sizes.vocab_size) - np.array(sums)[:, None])
            answers.append(-distance.astype(np.float32))
        if name in self.late_failures:
            raise self.late_failures.pop(name)
        return answers

    def _check_free_slots(self, cache_ids: Sequence[str]) -> None:
        new = sum(cache_id not in self.tokens for cache_id in cache_ids)
        free = self._max_seqs - len(self.tokens)
        if new > free:
            raise ResourceExhaustedError(f"need {new} slots, {free} are free", needed=new, free=free)

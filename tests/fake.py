"""A `DecoderOnlyLLM` whose answers can be computed by hand."""

from collections.abc import Sequence

import numpy as np

from ferrum_jax.contract import DecoderOnlyLLM, LlmRuntimeConfig
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

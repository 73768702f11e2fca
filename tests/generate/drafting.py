"""Models that can verify and roll back, drafts that can be told what to say, and requests for them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ferrum_jax import SamplingParams
from ferrum_jax.contract.errors import ResourceExhaustedError
from ferrum_jax.contract.llm import Logits, UnifiedRow
from ferrum_jax.generate.drafts import Draft, DraftSource, DraftWant
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.scheduler import Scheduler
from ferrum_jax.generate.stops import StopWatcher
from tests.fake import CountingLLM


class RollingLLM(CountingLLM):
    """Counts as ever, holds `pool` positions in all, and can be rolled back; keeps what was fed."""

    def __init__(self, pool: int = 10_000, **sizes: int):
        super().__init__(**sizes)
        self.pool = pool
        self.fed: dict[str, list[int]] = {}

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        assert self.lengths.get(cache_id, 0) + len(tokens) <= self.kv_capacity()
        free = self.pool - sum(self.lengths.values())
        if len(tokens) > free:
            raise ResourceExhaustedError("no room", needed=len(tokens), free=free)
        logits = super().prefill(cache_id, tokens)
        self.fed.setdefault(cache_id, []).extend(tokens)
        return logits

    def kv_len(self, cache_id: str) -> int | None:
        return self.lengths.get(cache_id, 0)

    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        if new_len < self.lengths.get(cache_id, 0):
            self.lengths[cache_id] = new_len
            del self.fed[cache_id][new_len:]

    def release(self, cache_id: str) -> None:
        super().release(cache_id)
        self.fed.pop(cache_id, None)


class UnifiedRollingLLM(RollingLLM):
    """The same with a unified forward, all or nothing."""

    def unified_forward(self, items: Sequence[UnifiedRow]) -> list[Logits | None]:
        free = self.pool - sum(self.lengths.values())
        needed = sum(len(tokens) for _, tokens, _, _ in items)
        newcomers = sum(cache_id not in self.lengths for cache_id, _, _, _ in items)
        if needed > free or newcomers > self._max_seqs - len(self.lengths):
            raise ResourceExhaustedError("no room", needed=needed, free=free)
        for cache_id, _, offset, _ in items:
            assert offset == self.lengths.get(cache_id, 0)
        return [
            self.prefill(cache_id, tokens) if final else self._read(cache_id, tokens)
            for cache_id, tokens, _, final in items
        ]

    def _read(self, cache_id: str, tokens: Sequence[int]) -> None:
        self.prefill(cache_id, tokens)


class MarkovLLM(UnifiedRollingLLM):
    """The logits after a token are a row of a random table."""

    def __init__(self, vocab_size: int, seed: int, capacity: int = 64):
        super().__init__(vocab_size=vocab_size, capacity=capacity)
        self.table = np.random.default_rng(seed).normal(size=(vocab_size, vocab_size)).astype(np.float32) * 1.5

    def _logits(self, last: int, position: int) -> Logits:
        return self.table[last]


class Scripted(DraftSource):
    """Proposes what a function says."""

    def __init__(self, say: Callable[[DraftWant], Draft], num_tokens: int = 4):
        self.say, self.num_tokens = say, num_tokens

    def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
        return [self.say(want) for want in wants]


def request(
    engine: Scheduler,
    prompt: Sequence[int],
    count: int,
    *,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    priority: int = 0,
    **params: Any,
) -> Request:
    return Request(
        cache_id=engine.new_cache_id(),
        prompt=list(prompt),
        params=SamplingParams(**params),
        seed=seed,
        stop_ids=frozenset(stop_ids),
        limit=count,
        detokenizer=None,
        watcher=StopWatcher(()),
        priority=priority,
    )


def finish(engine: Scheduler, requests: Sequence[Request], most: int = 5000) -> int:
    """Steps until all are done and gives the number of steps; `most` of them prove that there is no livelock."""
    for one in requests:
        engine.submit(one)
    for step in range(most):
        if all(one.is_done for one in requests):
            return step
        engine.step()
    raise AssertionError(f"not done after {most} steps")

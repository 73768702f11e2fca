"""Sequences of which every answer is known beforehand, and somebody who asks for them."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract import (
    ActiveLoraAdapter,
    FullLogits,
    GreedyArgmax,
    GreedyRepetitionPenalty,
    LogitsReturnPolicy,
    TokenSelectionMask,
)
from ferrum_jax.contract.llm import choose
from tests.executor.answers import TOLERANCE, V, choose_score
from tests.executor.conftest import ADAPTER_NAMES, CAPACITY, Oracle

FAMILIES, BRANCHES = 3, 4
STREAMS = [  # the branches of a family part at positions 7, 14, 21 and 28
    [(7 * at + 11 * family + (at >= 7 * (branch + 1)) * (branch + 1)) % V for at in range(CAPACITY)]
    for family in range(FAMILIES)
    for branch in range(BRANCHES)
]


@dataclass(frozen=True)
class Known:
    """What a sequence must hold: the beginning of a stream."""

    stream: int
    length: int = 0
    adapter: str | None = None

    def next(self, count: int) -> list[int]:
        return STREAMS[self.stream][self.length : self.length + count]

    def grown(self, count: int) -> "Known":
        return replace(self, length=self.length + count)

    @property
    def room(self) -> int:
        return CAPACITY - self.length


class Truth:
    """The logits of every beginning of every stream, by the forward without a cache, with and without adapters."""

    def __init__(self, oracles: Mapping[str | None, Oracle]):
        self._oracles = oracles
        self._logits = {name: [oracle(stream) for stream in STREAMS] for name, oracle in oracles.items()}

    def of(self, known: Known, count: int = 1) -> NDArray[np.float32]:
        """The logits of the last tokens of a sequence, `[count, V]`."""
        return self._logits[known.adapter][known.stream][known.length - count : known.length]

    def expect(self, answer: Any, known: Known, policy: LogitsReturnPolicy = FullLogits()) -> None:
        """Fails unless an answer is that of a sequence's last token."""
        (expected,) = self.of(known)
        if isinstance(policy, FullLogits):
            np.testing.assert_allclose(answer, expected, atol=TOLERANCE, rtol=0)
        elif answer != (best := choose(expected, policy)):  # only where two are as good as equal
            scores = [choose_score(expected, policy, one) for one in (answer, best)]
            assert abs(scores[0] - scores[1]) <= 4 * TOLERANCE

    def expect_greedy(self, ids: Sequence[int], known: Known) -> None:
        """Fails unless each of some tokens, which follow a sequence, is the best after those before it."""
        logits = self._oracles[known.adapter]([*STREAMS[known.stream][: known.length], *ids[:-1]])[-len(ids) :]
        np.testing.assert_allclose(logits[range(len(ids)), ids], logits.max(axis=1), atol=2 * TOLERANCE, rtol=0)

    def expect_all(self, answers: Any, known: Known, count: int) -> None:
        """Fails unless answers are those of a sequence's last tokens."""
        np.testing.assert_allclose(answers, self.of(known, count), atol=TOLERANCE, rtol=0)


class Client:
    """Somebody who does one random thing after another and counts what came of it."""

    def __init__(self, truth: Truth, folders: Mapping[str, str], name: str, seed: int):
        self.truth, self.folders, self.name = truth, folders, name
        self.draw = random.Random(f"{seed} {name}")
        self.counts: Counter[str] = Counter()

    def release_all(self) -> None:
        """Frees what it holds."""

    def policy(self) -> LogitsReturnPolicy:
        kind = self.draw.randrange(4)
        if kind < 2:
            return GreedyArgmax() if kind else FullLogits()
        allowed = [self.draw.randrange(2) for _ in range(V - 1)] + [1]
        ids = self.draw.sample(range(V), 3)
        return GreedyArgmax(
            token_mask=TokenSelectionMask(fingerprint=str(allowed), valid_token_mask=allowed) if kind == 2 else None,
            repetition_penalty=GreedyRepetitionPenalty(penalty=self.draw.choice([0.5, 1.7]), token_ids=ids),
        )

    def begin(self) -> Known:
        adapter = self.draw.choice([None, None, *ADAPTER_NAMES])
        return Known(self.draw.randrange(len(STREAMS)), adapter=adapter)

    def adapter(self, known: Known) -> ActiveLoraAdapter | None:
        name = known.adapter
        return None if name is None else ActiveLoraAdapter(name=name, path=self.folders[name])

    def cut(self, known: Known) -> Known:
        """What is left after a roll back; it goes on as any stream that begins like it."""
        left = self.draw.randint(0, known.length)
        begun = STREAMS[known.stream][:left]
        alike = [at for at, stream in enumerate(STREAMS) if stream[:left] == begun]
        return replace(known, stream=self.draw.choice(alike), length=left)

    def count(self, known: Known, most: int = 12) -> int:
        return self.draw.randint(1, min(most, known.room))

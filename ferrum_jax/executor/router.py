"""Places each sequence on a replica of a model, and divides batches among the replicas."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import ResourceExhaustedError
from ferrum_jax.executor.batch import ScheduledBatch
from ferrum_jax.executor.lifecycle import Lifecycle
from ferrum_jax.executor.pipeline import PendingStep
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.kvcache.sequences import PRIVATE

NOTHING = np.zeros(0, np.int32)


@dataclass(eq=False)
class PendingReplicas:
    """A batch that was begun on several replicas. `result` waits for all of them."""

    life: Lifecycle
    steps: list[tuple[PendingStep, list[int]]]  # each with its rows of the batch
    size: int

    @property
    def reused(self) -> list[int]:
        """How many tokens of each row a known prefix held."""
        found = dict(pair for step, rows in self.steps for pair in zip(rows, step.reused, strict=True))
        return [found[row] for row in range(self.size)]

    def result(self) -> list[Any]:
        """Waits, and returns one answer per row, in order; raises as `PendingStep.result`."""
        with self.life.lock, self.life:
            answers: list[Any] = [None] * self.size
            for step, rows in self.steps:
                for row, answer in zip(rows, step.result(), strict=True):
                    answers[row] = answer
            return answers


class ReplicaRouter:
    """Knows which replica holds each sequence; in a `ReplicatedRunner` it takes the place of a `Pipeline`."""

    def __init__(self, replicas: Sequence[ModelRunner], life: Lifecycle):
        """Begins without sequences."""
        self.replicas = list(replicas)
        self.life = life
        self.table = self  # `ModelRunner` asks `_pipeline.table` for lengths
        self.homes: dict[str, int] = {}
        self.short: frozenset[int | None] = frozenset()  # replicas that take new ids only if no other has room
        self.unplaced: set[str] = set()  # ids with bindings on every replica, until they are placed on one

    def length(self, cache_id: str) -> int:
        """Positions written for an id; 0 if it is unknown."""
        home = self.homes.get(cache_id)
        return 0 if home is None else self.replicas[home]._pipeline.table.length(cache_id)

    def execute(self, batch: ScheduledBatch) -> PendingReplicas:
        """Begins a batch on the replicas of its rows; raises as `Pipeline.execute`. A refusal changes no replica."""
        return self.plan_batch(batch)()

    def plan_batch(self, batch: ScheduledBatch) -> Callable[[], PendingReplicas]:
        """Places and plans a batch; returns a function that begins it on all its replicas. Raises as `execute`."""
        self.check_params_live()
        homes = self.place([(row.cache_id, NOTHING if row.tokens is None else row.tokens) for row in batch])
        parts: list[tuple[int, list[int], Callable[[], PendingStep]]] = []
        for index in dict.fromkeys(homes.values()):
            rows = [at for at, row in enumerate(batch) if homes[row.cache_id] == index]
            own = [batch[at] for at in rows]
            try:
                with self.on(index) as replica:
                    parts.append((index, rows, replica._pipeline.plan_batch(own)))
            except ResourceExhaustedError as problem:
                problem.cache_ids = frozenset(row.cache_id for row in own)
                raise
        self.settle_homes(homes)

        def begin() -> PendingReplicas:
            steps = []
            with self.changing(index for index, _, _ in parts):
                for index, rows, begin_part in parts:
                    with self.on(index):
                        steps.append((begin_part(), rows))
            return PendingReplicas(self.life, steps, len(batch))

        return begin

    def check_params_live(self) -> None:
        """Raises RequestValidationError if a parameter of any replica was donated: all serve or none does."""
        for replica in self.replicas:
            replica._device.check_params_live()

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[ModelRunner]:
        """Yields a replica, locked and checked to be ready; a ResourceExhaustedError within gets its index."""
        replica = self.replicas[index]
        try:
            with replica._life.lock, replica._life:
                yield replica
        except ResourceExhaustedError as problem:
            problem.replica = index
            raise

    @contextlib.contextmanager
    def changing(self, indices: Iterable[int]) -> Iterator[None]:
        """Loses the KV of these replicas if the block within fails or is interrupted: some may be ahead of others."""
        try:
            yield
        except BaseException:
            for index in indices:
                self.replicas[index]._device.lose()
            raise

    def place(self, wanted: Sequence[tuple[str, NDArray[np.int32]]], targets: Sequence[int] = ()) -> dict[str, int]:
        """Chooses a replica for each (id, new tokens), one with room if there is any; changes nothing.

        `targets` are the positions that need room; by default, those of the new tokens.
        """
        found: dict[str, int] = {}
        slots = [len(replica._pipeline.table.free_slots) for replica in self.replicas]
        blocks = [replica._pipeline.table.pool.num_free for replica in self.replicas]
        for at, (cache_id, tokens) in enumerate(wanted):
            if (home := self.homes.get(cache_id)) is not None:
                found[cache_id] = home
                continue
            size = self.replicas[0].plan.cache.block_size
            positions = targets[at] if targets else len(tokens)
            needed = -(-positions // size)
            ranks = []
            for index in range(len(self.replicas)):
                known, resting = self._known(index, cache_id, tokens)
                # Known blocks that no sequence holds count as free, until the prompt reuses them.
                taken = needed - known + resting
                is_open = index not in self.short
                fits = slots[index] > 0 and blocks[index] >= taken
                ranks.append((fits and is_open, fits, is_open, known, blocks[index], slots[index], -index, taken))
            *_, negated, taken = max(ranks)
            found[cache_id] = best = -negated
            slots[best] -= 1
            blocks[best] -= taken
        return found

    def roomiest(self) -> int:
        """Returns the replica with most slots beyond those of its sequences and of the ids that are placed there."""
        free = [len(replica._pipeline.table.free_slots) for replica in self.replicas]
        for cache_id, home in self.homes.items():
            free[home] -= cache_id not in self.replicas[home]._pipeline.table.live
        blocks = [replica._pipeline.table.pool.num_free for replica in self.replicas]
        return max(range(len(free)), key=lambda at: (free[at] > 0 and at not in self.short, free[at], blocks[at], -at))

    def _known(self, index: int, cache_id: str, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """Counts the blocks of a prompt that a replica knows already, and those of them that no sequence holds."""
        replica = self.replicas[index]
        table = replica._pipeline.table
        if table.prefixes is None or len(tokens) < 2:
            return 0, 0
        owner = replica._pipeline.owner_of(cache_id)
        if owner is PRIVATE:
            return 0, 0
        hits = table.prefixes.match(table.prefixes.root(owner), tokens[:-1].tobytes(), table.block_size)
        return len(hits), sum(not table.pool.num_holders(one.block) for one in hits)

    def settle_homes(self, homes: dict[str, int]) -> None:
        """Records the replica of each id; an id that was bound on every replica stays bound on this one alone."""
        for cache_id, home in homes.items():
            self.homes[cache_id] = home
            if cache_id in self.unplaced:
                self.unplaced.discard(cache_id)
                for index, replica in enumerate(self.replicas):
                    if index != home:
                        replica.release(cache_id)

    def settle_live(self, homes: dict[str, int]) -> None:
        """As `settle_homes`, of the ids that are live on their replica."""
        self.settle_homes({key: at for key, at in homes.items() if key in self.replicas[at]._pipeline.table.live})

    def owners(self, cache_id: str) -> list[ModelRunner]:
        """Returns the replicas that hold or bind an id."""
        if cache_id in self.unplaced:
            return self.replicas
        home = self.homes.get(cache_id)
        return [] if home is None else [self.replicas[home]]

    def forget(self, cache_id: str) -> None:
        """Forgets the replica of an id."""
        self.homes.pop(cache_id, None)
        self.unplaced.discard(cache_id)

    def clear(self) -> None:
        """Forgets every id."""
        self.homes.clear()
        self.unplaced.clear()
        self.short = frozenset()

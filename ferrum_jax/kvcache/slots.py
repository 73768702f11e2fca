"""Which live sequence sits in which slot, how long it is, and which blocks it holds."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ferrum_jax.contract.errors import RequestValidationError, ResourceExhaustedError
from ferrum_jax.kvcache.blocks import BlockPool


@dataclass
class LiveSequence:
    """One live sequence."""

    slot: int
    length: int = 0  # positions written
    blocks: list[int] = field(default_factory=list)


class SlotTable:
    """Cache ids to slots, and the block table `[max_seqs, M]` whose used rows travel with each batch."""

    def __init__(self, *, max_seqs: int, kv_capacity: int, block_size: int, num_blocks: int):
        self.max_seqs = max_seqs
        self.kv_capacity = kv_capacity
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.table = np.zeros((max_seqs, -(-kv_capacity // block_size)), np.int32)
        self._live: dict[str, LiveSequence] = {}
        self._free_slots = list(range(max_seqs - 1, -1, -1))

    def get(self, cache_id: str) -> LiveSequence | None:
        """Gives the live sequence, or None."""
        return self._live.get(cache_id)

    def length(self, cache_id: str) -> int:
        """Positions written for an id; 0 if it is unknown."""
        found = self._live.get(cache_id)
        return 0 if found is None else found.length

    @property
    def cache_ids(self) -> list[str]:
        """The live ids, oldest first."""
        return list(self._live)

    def refuse_growth(self, targets: Sequence[tuple[str, int]]) -> None:
        """Raises if the ids (all different) cannot all reach their target lengths; changes nothing.

        Raises:
            RequestValidationError: a target is past `kv_capacity`.
            ResourceExhaustedError: slots or blocks are short.
        """
        for cache_id, target in targets:
            if target > self.kv_capacity:
                raise RequestValidationError(
                    f"{cache_id!r} needs {target} positions, its KV capacity is {self.kv_capacity}"
                )
        newcomers = sum(cache_id not in self._live for cache_id, _ in targets)
        if newcomers > len(self._free_slots):
            raise ResourceExhaustedError(
                f"need {newcomers} slots for new sequences, {len(self._free_slots)} of {self.max_seqs} are free",
                needed=newcomers,
                free=len(self._free_slots),
            )
        missing = sum(self._missing_blocks(cache_id, target) for cache_id, target in targets)
        self.pool.refuse_more_than_free(missing, len(targets))

    def grow(self, targets: Sequence[tuple[str, int]]) -> None:
        """Creates unknown ids and allocates blocks up to each target length: all, or none and an error."""
        self.refuse_growth(targets)
        for cache_id, target in targets:
            missing = self._missing_blocks(cache_id, target)
            live = self._live.get(cache_id)
            if live is None:
                live = self._live[cache_id] = LiveSequence(slot=self._free_slots.pop())
            if missing:
                self._attach(live, self.pool.allocate(missing))

    def undo_growth(self, known: Collection[str], cache_ids: Iterable[str]) -> None:
        """Takes a growth back: ids not `known` before it are forgotten, the others lose blocks past their length."""
        for cache_id in cache_ids:
            if cache_id in known:
                self._detach(self._live[cache_id], self._live[cache_id].length)
            else:
                self.release(cache_id)

    def truncate(self, cache_id: str, new_len: int) -> None:
        """Rolls a sequence back and frees the blocks wholly past its new end."""
        live = self._live.get(cache_id)
        if live is None or new_len >= live.length:
            return
        live.length = new_len
        self._detach(live, new_len)

    def release(self, cache_id: str) -> None:
        """Frees a sequence's slot and blocks; an unknown id is no error."""
        live = self._live.pop(cache_id, None)
        if live is not None:
            self.pool.release(live.blocks)
            self._free_slots.append(live.slot)

    def _missing_blocks(self, cache_id: str, target: int) -> int:
        live = self._live.get(cache_id)
        return max(0, -(-target // self.block_size) - (0 if live is None else len(live.blocks)))

    def _detach(self, live: LiveSequence, length: int) -> None:
        keep = -(-length // self.block_size)
        self.pool.release(live.blocks[keep:])
        del live.blocks[keep:]

    def _attach(self, live: LiveSequence, blocks: list[int]) -> None:
        start = len(live.blocks)
        live.blocks += blocks
        self.table[live.slot, start : len(live.blocks)] = blocks

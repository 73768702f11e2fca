"""Which live sequence sits in which slot, how long it is, and which blocks it holds."""

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ferrum_jax.contract.errors import InternalError, RequestValidationError, ResourceExhaustedError
from ferrum_jax.kvcache.blocks import BlockPool
from ferrum_jax.kvcache.prefix import PrefixEntry, PrefixIndex


@dataclass(eq=False, slots=True)
class LiveSequence:
    """One live sequence."""

    slot: int
    room: int = 0  # positions that can be written, one after the other, with no more bookkeeping than their count
    lost: int = 0  # positions before this one are no longer in its ring
    tokens: array = field(default_factory=lambda: array("i"))  # those whose keys and values are written
    blocks: list[int] = field(default_factory=list)
    entries: list[PrefixEntry] = field(default_factory=list)  # of its full blocks, where prefixes are reused
    adapter: Hashable = None

    @property
    def length(self) -> int:
        """Positions written."""
        return len(self.tokens)


class SlotTable:
    """Cache ids to slots, and the block table `[max_seqs, M]` whose used rows travel with each batch.

    With `prefixes`, every full block is entered there and stays, after its sequence is gone, until the pool needs it.
    With rings, the last columns of the table are each slot's ring, and a sequence that is longer than it loses there
    what it wrote first; one whose next token would see some of that `is_cut`.
    """

    def __init__(
        self,
        *,
        max_seqs: int,
        kv_capacity: int,
        block_size: int,
        num_blocks: int,
        prefixes: PrefixIndex | None = None,
        ring_blocks: int = 0,
        window: int = 1,
    ):
        """Makes all slots free.

        Args:
            max_seqs: slots.
            kv_capacity: positions a sequence can reach.
            block_size: positions.
            num_blocks: of the pool.
            prefixes: where full blocks are entered, if they are.
            ring_blocks: of the ring that each slot has, if it has one.
            window: positions that a token sees in the ring, itself included.
        """
        self.max_seqs = max_seqs
        self.kv_capacity = kv_capacity
        self.block_size = block_size
        self.prefixes = prefixes
        self.pool = BlockPool(num_blocks, self.forget)
        self.longest = min(kv_capacity, num_blocks * block_size)  # positions of a sequence that is alone
        self.ring_size = ring_blocks * block_size  # positions
        self.window = window
        rings = np.arange(max_seqs * ring_blocks, dtype=np.int32).reshape(max_seqs, ring_blocks)
        self.table = np.hstack([np.zeros((max_seqs, -(-kv_capacity // block_size)), np.int32), rings])
        self._live: dict[str, LiveSequence] = {}
        self._free_slots = list(range(max_seqs - 1, -1, -1))

    def get(self, cache_id: str) -> LiveSequence | None:
        """Gives the live sequence, or None."""
        return self._live.get(cache_id)

    def find(self, cache_ids: Iterable[str]) -> list[LiveSequence] | None:
        """Gives the live sequences; None unless all ids are known."""
        try:
            return [self._live[cache_id] for cache_id in cache_ids]
        except KeyError:
            return None

    def length(self, cache_id: str) -> int:
        """Positions written for an id; 0 if it is unknown."""
        found = self._live.get(cache_id)
        return 0 if found is None else len(found.tokens)

    @property
    def cache_ids(self) -> list[str]:
        """The live ids, oldest first."""
        return list(self._live)

    def num_blocks(self, positions: int) -> int:
        """Blocks that hold so many positions."""
        return -(-positions // self.block_size)

    def refuse_past_capacity(self, cache_id: str, target: int) -> None:
        """Raises RequestValidation if a sequence cannot be so long, were it the only one."""
        room = self.pool.num_blocks * self.block_size
        if target <= self.longest:
            return
        if target > self.kv_capacity:
            raise RequestValidationError(
                f"{cache_id!r} needs {target} positions, its KV capacity is {self.kv_capacity}"
            )
        raise RequestValidationError(f"{cache_id!r} needs {target} positions, the whole pool holds {room}")

    def refuse_newcomers(self, cache_ids: Sequence[str]) -> None:
        """Raises ResourceExhausted if the ids (all different) that are unknown outnumber the free slots."""
        newcomers = sum(cache_id not in self._live for cache_id in cache_ids)
        if newcomers > len(self._free_slots):
            raise ResourceExhaustedError(
                f"need {newcomers} slots for new sequences, {len(self._free_slots)} of {self.max_seqs} are free",
                needed=newcomers,
                free=len(self._free_slots),
            )

    def open(self, cache_id: str) -> LiveSequence:
        """Gives the live sequence, created empty if the id is unknown; there must be a free slot."""
        if cache_id not in self._live:
            self._live[cache_id] = LiveSequence(slot=self._free_slots.pop())
        return self._live[cache_id]

    def seat(self, live: LiveSequence, blocks: list[int]) -> None:
        """Sets the blocks of a sequence, whoever holds them."""
        live.blocks, live.room = blocks, 0
        self.table[live.slot, : len(blocks)] = blocks

    def fork(self, cache_id: str, new_cache_id: str) -> None:
        """Makes a new sequence that shares the blocks of a live one.

        Raises:
            RequestValidationError: the one is unknown, or the other is not.
            ResourceExhaustedError: no slot is free.
        """
        live = self._live.get(cache_id)
        if live is None:
            raise RequestValidationError(f"{cache_id!r} is unknown, only a live sequence can be forked")
        if new_cache_id in self._live:
            raise RequestValidationError(f"{new_cache_id!r} is a live sequence, a fork needs an id that is unknown")
        self.refuse_newcomers([new_cache_id])
        made = self.open(new_cache_id)
        made.tokens, made.entries, made.adapter = live.tokens[:], live.entries[:], live.adapter
        shared = live.blocks[: self.num_blocks(live.length)]  # what is reserved beyond stays the other's
        for block in shared:
            self.pool.hold(block)
        self.seat(made, shared)
        self.lose_ring(made)
        self.settle(live)

    def truncate(self, cache_id: str, new_len: int) -> None:
        """Rolls a sequence back and frees the blocks wholly past its new end, reserved ones too.

        An unknown id, or a length not before the sequence's end, is no error and changes nothing.
        """
        live = self._live.get(cache_id)
        if live is None or new_len >= live.length:
            return
        keep = self.num_blocks(new_len)
        del live.tokens[new_len:]
        del live.entries[new_len // self.block_size :]
        self.pool.release(live.blocks[keep:])
        del live.blocks[keep:]
        if not live.tokens:
            live.lost = 0
        self.settle(live)

    def release(self, cache_id: str) -> None:
        """Frees a sequence's slot and blocks; an unknown id is no error."""
        live = self._live.pop(cache_id, None)
        if live is not None:
            self.pool.release(live.blocks)
            self._free_slots.append(live.slot)

    def is_cut(self, live: LiveSequence) -> bool:
        """True of a sequence whose next token would see what its ring has lost."""
        return max(0, len(live.tokens) - (self.window - 1)) < live.lost

    def lose_ring(self, live: LiveSequence) -> None:
        """Counts all of a sequence's ring as lost."""
        if self.ring_size and live.tokens:
            live.lost = len(live.tokens)

    def refill_ring(self, live: LiveSequence) -> None:
        """Counts the ring as written anew, from the sequence's beginning to its end."""
        live.lost = max(0, len(live.tokens) - self.ring_size)
        self.settle(live)

    def settle(self, live: LiveSequence) -> None:
        """Finds what a new length means: what the ring has lost, and how far the sequence can go on.

        It can in blocks that nobody else holds and no prefix is entered for, unless it is cut.
        """
        if self.ring_size:
            live.lost = max(live.lost, len(live.tokens) - self.ring_size)
        at, inside = divmod(len(live.tokens), self.block_size)
        is_own = not inside or (self.pool.num_holders(live.blocks[at]) == 1 and not self.pool.is_kept(live.blocks[at]))
        ready = is_own and not self.is_cut(live)
        live.room = min(len(live.blocks) * self.block_size, self.longest) if ready else 0

    def append(self, lives: Sequence[LiveSequence], tokens: Sequence[int]) -> None:
        """Counts one token of each sequence as written, for which it had room, and enters the blocks they fill."""
        ring, block = self.ring_size, self.block_size
        for live, token in zip(lives, tokens, strict=True):
            written = live.tokens
            written.append(token)
            if ring:
                live.lost = max(live.lost, len(written) - ring)
            if not len(written) % block:
                self.enter(live)

    def enter(self, live: LiveSequence) -> None:
        """Enters the blocks that a sequence has filled; one whose tokens are there already is replaced by that."""
        if self.prefixes is None:
            return
        for at in range(len(live.entries), live.length // self.block_size):
            tokens = live.tokens[at * self.block_size : (at + 1) * self.block_size].tobytes()
            above = live.entries[-1] if live.entries else None
            mine = live.blocks[at]
            entry = self.prefixes.add(live.adapter, above, tokens, mine)
            assert entry.block is not None
            if entry.block == mine:
                self.pool.keep(mine)
            else:
                self.pool.hold(entry.block)
                self.pool.release([mine])
                live.blocks[at] = self.table[live.slot, at] = entry.block
            live.entries.append(entry)

    def forget(self, block: int) -> None:
        """Drops a block's entry, and those below it, from the prefixes."""
        if self.prefixes is not None:
            for dropped in self.prefixes.forget(block):
                if dropped != block and self.pool.num_holders(dropped):
                    raise InternalError(f"block {dropped} is in use, and so is the prefix before it, block {block}")
                self.pool.discard(dropped)

    def forget_adapter(self, adapter: Hashable) -> None:
        """Drops every prefix under an adapter."""
        if self.prefixes is not None:
            for dropped in self.prefixes.forget_adapter(adapter):
                self.pool.discard(dropped)

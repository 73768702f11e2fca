"""Cache ids to slots, and which blocks of the pool hold each sequence's positions: plain bookkeeping on the host."""

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ferrum_jax.contract.errors import InternalError, RequestValidationError, ResourceExhaustedError
from ferrum_jax.kvcache.blocks import BlockPool
from ferrum_jax.kvcache.prefix import PrefixEntry, PrefixIndex

UNKNOWN = -1  # in the place of a token id that was chosen on the device and has not been read yet


PRIVATE: Hashable = "private"  # in the place of an adapter: the sequence neither reuses nor provides prefixes


@dataclass(eq=False, slots=True)
class CachedSequence:
    """One live sequence."""

    slot: int
    writable: int = 0  # positions already allocated to this sequence; writing up to there needs no new block
    evicted_before: int = 0  # positions before this one are no longer in its sliding-window cache
    tokens: array = field(default_factory=lambda: array("i"))  # those whose keys and values are written
    blocks: list[int] = field(default_factory=list)
    entries: list[PrefixEntry] = field(default_factory=list)  # of its full blocks, where prefixes are reused
    adapter: Hashable = None
    is_live: bool = True
    is_private: bool = False  # its blocks are no prefixes of others: known prefixes were forgotten after it began
    is_outdated: bool = False  # its keys and values are of earlier weights; it is private then
    sampled_at: int = -1  # position of the token chosen last for it on the device; -1: none
    sampled: int = UNKNOWN  # that token, once it is read

    @property
    def length(self) -> int:
        """Positions written."""
        return len(self.tokens)


class SequenceTable:
    """The live sequences, and the block table `[max_seqs, M]` whose used rows are uploaded with each batch.

    With `prefixes`, every full block is entered there and stays, after its sequence is gone, until the pool needs it.
    With sliding-window caches, the last columns of the table are each slot's own blocks, reused modulo their number. A
    sequence whose next token would see an evicted position `needs_recompute`.
    """

    def __init__(
        self,
        *,
        max_seqs: int,
        kv_capacity: int,
        block_size: int,
        num_blocks: int,
        prefixes: PrefixIndex | None = None,
        window_blocks: int = 0,
        window: int = 1,
    ):
        """Makes all slots free."""
        self.max_seqs = max_seqs
        self.kv_capacity = kv_capacity
        self.block_size = block_size
        self.prefixes = prefixes
        self.pool = BlockPool(num_blocks, self.forget)
        self.longest = min(kv_capacity, num_blocks * block_size)  # positions of a sequence that has the whole pool
        self.window_size = window_blocks * block_size  # positions
        self.window = window  # positions that a token sees there, itself included
        own = np.arange(max_seqs * window_blocks, dtype=np.int32).reshape(max_seqs, window_blocks)
        self.table = np.hstack([np.zeros((max_seqs, -(-kv_capacity // block_size)), np.int32), own])
        self.live: dict[str, CachedSequence] = {}  # by cache id, oldest first
        self.free_slots = list(range(max_seqs - 1, -1, -1))

    def length(self, cache_id: str) -> int:
        """Positions written for an id; 0 if it is unknown."""
        found = self.live.get(cache_id)
        return 0 if found is None else len(found.tokens)

    def abandon(self) -> None:
        """Marks every sequence as no longer live, for pending steps that refer to one."""
        for live in self.live.values():
            live.is_live = False

    def num_blocks(self, positions: int) -> int:
        """Blocks that hold so many positions."""
        return -(-positions // self.block_size)

    def check_capacity(self, cache_id: str, target: int) -> None:
        """Raises if a sequence could not reach `target` positions even as the only one.

        Raises:
            RequestValidationError: `target` is past the capacity of a sequence.
            ResourceExhaustedError: the whole pool has too few blocks.
        """
        if target <= self.longest:
            return
        if target > self.kv_capacity:
            raise RequestValidationError(
                f"{cache_id!r} needs {target} positions, its KV capacity is {self.kv_capacity}"
            )
        live, pool = self.live.get(cache_id), self.pool.num_blocks * self.block_size
        raise ResourceExhaustedError(
            f"{cache_id!r} needs {target} positions, the whole pool holds {pool}",
            needed=self.num_blocks(target) - (0 if live is None else len(live.blocks)),
            free=self.pool.num_free,
        )

    def check_new_slots(self, cache_ids: Sequence[str]) -> None:
        """Raises ResourceExhaustedError if the ids (all different) that are unknown outnumber the free slots."""
        needed = sum(cache_id not in self.live for cache_id in cache_ids)
        if needed > len(self.free_slots):
            raise ResourceExhaustedError(
                f"need {needed} slots for new sequences, {len(self.free_slots)} of {self.max_seqs} are free",
                needed=needed,
                free=len(self.free_slots),
            )

    def open(self, cache_id: str) -> CachedSequence:
        """Returns the live sequence, created empty if the id is unknown; there must be a free slot."""
        if cache_id not in self.live:
            self.live[cache_id] = CachedSequence(slot=self.free_slots.pop())
        return self.live[cache_id]

    def set_blocks(self, live: CachedSequence, blocks: list[int]) -> None:
        """Sets the blocks of a sequence and its row of the block table; holds and frees none."""
        live.blocks, live.writable = blocks, 0
        self.table[live.slot, : len(blocks)] = blocks

    def fork(self, cache_id: str, new_cache_id: str) -> None:
        """Makes a new sequence that shares the blocks of a live one.

        Raises:
            RequestValidationError: `cache_id` is unknown, or `new_cache_id` is live.
            ResourceExhaustedError: no slot is free.
        """
        live = self.live.get(cache_id)
        if live is None:
            raise RequestValidationError(f"{cache_id!r} is unknown, only a live sequence can be forked")
        if new_cache_id in self.live:
            raise RequestValidationError(f"{new_cache_id!r} is a live sequence, a fork needs an id that is unknown")
        self.check_new_slots([new_cache_id])
        made = self.open(new_cache_id)
        made.tokens, made.entries, made.adapter = live.tokens[:], live.entries[:], live.adapter
        made.is_private, made.is_outdated = live.is_private, live.is_outdated
        shared = live.blocks[: self.num_blocks(live.length)]  # reserved blocks beyond them stay the original's
        for block in shared:
            self.pool.hold(block)
        self.set_blocks(made, shared)
        if self.window_size and made.tokens:
            made.evicted_before = len(made.tokens)  # its own sliding-window cache is empty
        self.update_writable(live)

    def truncate(self, cache_id: str, new_len: int) -> None:
        """Rolls a sequence back and frees the blocks wholly past its new end, reserved ones too.

        An unknown id, or a length not before the sequence's end, is no error and changes nothing.
        """
        live = self.live.get(cache_id)
        if live is None or new_len >= live.length:
            return
        keep = self.num_blocks(new_len)
        del live.tokens[new_len:]
        del live.entries[new_len // self.block_size :]
        if live.sampled_at > new_len:  # it was chosen after tokens that are gone
            live.sampled_at = -1
        self.pool.release(live.blocks[keep:])
        del live.blocks[keep:]
        if not live.tokens:
            live.evicted_before, live.is_private, live.is_outdated = 0, False, False
        self.update_writable(live)

    def release(self, cache_id: str) -> None:
        """Frees a sequence's slot and blocks; an unknown id is no error."""
        live = self.live.pop(cache_id, None)
        if live is not None:
            live.is_live = False
            self.pool.release(live.blocks)
            self.free_slots.append(live.slot)

    def needs_recompute(self, live: CachedSequence) -> bool:
        """True of a sequence whose next token would see positions that its sliding-window cache has evicted."""
        return max(0, len(live.tokens) - (self.window - 1)) < live.evicted_before

    def recomputed(self, live: CachedSequence) -> None:
        """Counts the sliding-window cache as recomputed, from the sequence's beginning to its end."""
        live.evicted_before = max(0, len(live.tokens) - self.window_size)
        self.update_writable(live)

    def update_writable(self, live: CachedSequence) -> None:
        """Updates `evicted_before` and `writable` to a sequence's new length or blocks.

        It may write in blocks that no other sequence holds and no prefix is entered for, unless it needs a recompute.
        """
        if self.window_size:
            live.evicted_before = max(live.evicted_before, len(live.tokens) - self.window_size)
        at, inside = divmod(len(live.tokens), self.block_size)
        is_own = not inside or (self.pool.num_holders(live.blocks[at]) == 1 and not self.pool.is_kept(live.blocks[at]))
        may_write = is_own and not self.needs_recompute(live)
        live.writable = min(len(live.blocks) * self.block_size, self.longest) if may_write else 0

    def append(self, lives: Sequence[CachedSequence], tokens: Sequence[Sequence[int]]) -> None:
        """Counts tokens of each sequence as written, in blocks that it has, and enters the blocks they fill."""
        block, window = self.block_size, self.window_size
        for live, new in zip(lives, tokens, strict=True):
            written = live.tokens
            full = len(written) // block
            written.extend(new)
            if window:
                live.evicted_before = max(live.evicted_before, len(written) - window)
            if len(written) // block != full:
                self.enter(live)

    def expect(self, live: CachedSequence, position: int) -> None:
        """Records that the device chooses a token for `position`; `resolve` enters the token once it is read."""
        live.sampled_at, live.sampled = position, UNKNOWN

    def resolve(self, live: CachedSequence, position: int, token: int) -> None:
        """Enters a token that the device chose, also in `tokens` if it was written there as UNKNOWN."""
        if live.sampled_at == position:
            live.sampled = token
        if live.is_live and position < len(live.tokens) and live.tokens[position] == UNKNOWN:
            live.tokens[position] = token
            if len(live.entries) < len(live.tokens) // self.block_size:
                self.enter(live)

    def enter(self, live: CachedSequence) -> None:
        """Enters the blocks that a sequence has filled; a known block of the same tokens takes the place of its own."""
        if self.prefixes is None or live.is_private or live.adapter is PRIVATE:
            return
        for at in range(len(live.entries), live.length // self.block_size):
            inside = live.tokens[at * self.block_size : (at + 1) * self.block_size]
            if UNKNOWN in inside:
                return
            above = live.entries[-1] if live.entries else None
            mine = live.blocks[at]
            entry = self.prefixes.add(live.adapter, above, inside.tobytes(), mine)
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

    def forget_prefixes(self) -> None:
        """Forgets every prefix; sequences keep their blocks, which become nobody's prefix."""
        if self.prefixes is not None:
            for dropped in self.prefixes.forget_all():
                self.pool.discard(dropped)
        self._stop_sharing(self.live.values())

    def invalidate_prefixes(self) -> None:
        """Forgets every prefix because the weights change; live sequences with tokens are outdated."""
        self.forget_prefixes()
        for live in self.live.values():
            live.is_outdated = live.is_private

    def invalidate_adapter(self, adapter: Hashable, instead: Hashable, cache_ids: Iterable[str]) -> None:
        """As `invalidate_prefixes`, for one adapter; these sequences have the adapter `instead` from now on."""
        self.forget_adapter(adapter)
        bound = [live for live in map(self.live.get, cache_ids) if live is not None]
        self._stop_sharing(bound)
        for live in bound:
            live.is_outdated = live.is_private
            if live.adapter is adapter:  # not if interventions have made it PRIVATE
                live.adapter = instead

    def _stop_sharing(self, lives: Iterable[CachedSequence]) -> None:
        """Makes sequences with tokens private: from now on, their blocks are not entered as prefixes."""
        for live in lives:
            live.is_private = bool(live.tokens)
            live.entries.clear()

    def forget_adapter(self, adapter: Hashable) -> None:
        """Drops every prefix under an adapter."""
        if self.prefixes is not None:
            for dropped in self.prefixes.forget_adapter(adapter):
                self.pool.discard(dropped)

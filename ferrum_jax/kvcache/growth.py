"""Sequences made ready for new tokens: all at once or not at all, and taken back if the step fails."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.kvcache.prefix import PrefixEntry
from ferrum_jax.kvcache.slots import LiveSequence, SlotTable


@dataclass(frozen=True)
class Want:
    """What a call wants of one sequence: room for new tokens, and how many of them may come from the prefixes."""

    cache_id: str
    tokens: NDArray[np.int32]  # [n]
    reusable: int = 0
    adapter: Hashable = None  # what its keys and values are computed with, beside the model


@dataclass
class GrowingRow:
    """What one sequence needs."""

    want: Want
    target: int  # positions
    hits: list[PrefixEntry] = field(default_factory=list)
    new_blocks: int = 0
    copies: bool = False  # its last block is shared and must be copied before it is written
    overwrites: bool = False  # its last block is its own, and what is entered of it is about to change


@dataclass(frozen=True, eq=False)
class _Undo:
    """A sequence as it was."""

    cache_id: str
    is_new: bool
    blocks: list[int]
    gained: list[int]  # blocks to give up if the step fails
    lost: list[int]  # blocks to give up when it has succeeded


class Growth:
    """A plan for several sequences, made by refusing whatever cannot be; then `apply`, and `commit` or `undo`."""

    def __init__(self, slots: SlotTable, wants: Sequence[Want], targets: Sequence[int] | None = None):
        """Plans; changes nothing.

        Args:
            slots: the sequences.
            wants: one per sequence, all of different ids.
            targets: positions each must have room for; those written and the new tokens if None.

        Raises:
            RequestValidationError: a target is past the capacity.
            ResourceExhaustedError: slots or blocks are short.
        """
        self._slots = slots
        ends = [slots.length(want.cache_id) + len(want.tokens) for want in wants]
        self._rows = [GrowingRow(want, end) for want, end in zip(wants, targets or ends, strict=True)]
        self._undo: list[_Undo] = []
        for row in self._rows:
            slots.refuse_past_capacity(row.want.cache_id, row.target)
        slots.refuse_newcomers([want.cache_id for want in wants])
        for row in self._rows:
            row.hits = self._match(row.want)
        self._count_blocks()
        resting = {entry.block for row in self._rows for entry in row.hits if not self._holders(entry)}
        slots.pool.refuse_more_than_free(self.num_new_blocks, len(wants), len(resting))

    @property
    def num_new_blocks(self) -> int:
        """Blocks that are handed out, copies included."""
        return sum(row.new_blocks + row.copies for row in self._rows)

    @property
    def num_copies(self) -> int:
        """Blocks that must be copied before the step."""
        return sum(row.copies for row in self._rows)

    @property
    def copied_ids(self) -> list[str]:
        """The sequences whose last block is copied."""
        return [row.want.cache_id for row in self._rows if row.copies]

    def reused(self, index: int) -> int:
        """How many of a row's new tokens need not be computed."""
        row = self._rows[index]
        if not row.hits:
            return 0
        start = self._slots.length(row.want.cache_id)
        return (start // self._slots.block_size + len(row.hits)) * self._slots.block_size - start

    def apply(self) -> list[tuple[int, int]]:
        """Takes slots and blocks; gives the (source, destination) of blocks to be copied now."""
        slots, pool, copies = self._slots, self._slots.pool, []
        for row in self._rows:  # all hits are held before any block is handed out anew
            is_new = slots.get(row.want.cache_id) is None
            live = slots.open(row.want.cache_id)
            self._undo.append(_Undo(row.want.cache_id, is_new, live.blocks, [], []))
            for entry in row.hits:
                pool.hold(_block(entry))
                self._undo[-1].gained.append(_block(entry))
        for row, undo in zip(self._rows, self._undo, strict=True):
            live = slots.open(row.want.cache_id)
            live.adapter = row.want.adapter
            blocks = live.blocks[:]
            at = live.length // slots.block_size
            hits = [_block(entry) for entry in row.hits]
            undo.lost.extend(blocks[at : at + len(hits)])
            blocks[at : at + len(hits)] = hits
            fresh = pool.allocate(row.new_blocks + row.copies)
            undo.gained.extend(fresh)
            if row.copies:
                copies.append((blocks[at], fresh[-1]))
                undo.lost.append(blocks[at])
                blocks[at] = fresh.pop()
            elif row.overwrites:
                slots.forget(blocks[at])
            slots.seat(live, blocks + fresh)
        return copies

    def live(self, index: int) -> LiveSequence:
        """Gives the sequence of a row; it lives from `apply` on."""
        found = self._slots.get(self._rows[index].want.cache_id)
        assert found is not None
        return found

    def commit(self, written: Sequence[NDArray[np.int32]] | None = None) -> None:
        """Counts the new tokens as written and enters the blocks they fill.

        `written`, where given, are the tokens that each sequence has come to hold instead of those it was to; blocks
        that were taken for more are given back.
        """
        for index, (row, undo) in enumerate(zip(self._rows, self._undo, strict=True)):
            live = self.live(index)
            live.tokens.frombytes((row.want.tokens if written is None else written[index]).tobytes())
            if written is not None:
                needed = max(self._slots.num_blocks(live.length), len(undo.blocks))
                undo.lost.extend(live.blocks[needed:])
                self._slots.seat(live, live.blocks[:needed])
            live.entries += row.hits
            self._slots.pool.release(undo.lost)
            self._slots.enter(live)

    def undo(self) -> None:
        """Takes everything back; ids that were unknown are so again."""
        for undo in reversed(self._undo):
            live = self._slots.get(undo.cache_id)
            assert live is not None
            self._slots.seat(live, undo.blocks)
            self._slots.pool.release(undo.gained)
            if undo.is_new:
                self._slots.release(undo.cache_id)

    def _match(self, want: Want) -> list[PrefixEntry]:
        """Finds the full blocks, from where the sequence ends, that are in the prefixes."""
        prefixes, size = self._slots.prefixes, self._slots.block_size
        if prefixes is None or not want.reusable:
            return []
        live = self._slots.get(want.cache_id) or LiveSequence(slot=-1)
        at = live.length // size
        entry = live.entries[-1] if at else prefixes.root(want.adapter)
        tail = live.tokens[at * size :].tobytes() + want.tokens.tobytes()
        last = live.length + want.reusable
        hits: list[PrefixEntry] = []
        while (at + len(hits) + 1) * size <= last:
            start = len(hits) * size * 4
            found = entry.children.get(tail[start : start + size * 4])
            if found is None:
                break
            hits.append(found)
            entry = found
        return hits

    def _count_blocks(self) -> None:
        """Decides how many blocks each row lacks, and whether it must copy the one it goes on in."""
        sharers = Counter(entry.block for row in self._rows for entry in row.hits)
        for row in self._rows:
            live = self._slots.get(row.want.cache_id) or LiveSequence(slot=-1)
            at, inside = divmod(live.length, self._slots.block_size)
            row.new_blocks = max(0, self._slots.num_blocks(row.target) - max(len(live.blocks), at + len(row.hits)))
            if inside and not row.hits and row.target > live.length:
                block = live.blocks[at]
                if self._slots.pool.num_holders(block) + sharers[block] > 1:
                    row.copies = True
                    sharers[block] -= 1
                else:
                    row.overwrites = self._slots.pool.is_kept(block)

    def _holders(self, entry: PrefixEntry) -> int:
        return self._slots.pool.num_holders(_block(entry))


def _block(entry: PrefixEntry) -> int:
    assert entry.block is not None
    return entry.block

"""Sequences made ready for new tokens: all at once or not at all, and taken back if the step fails."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.kvcache.prefix import PrefixEntry, PrefixIndex
from ferrum_jax.kvcache.slots import LiveSequence, SlotTable


class Want(NamedTuple):
    """What a call wants of one sequence: room for new tokens, and how many of them may come from the prefixes."""

    cache_id: str
    tokens: NDArray[np.int32]  # [n]
    reusable: int = 0
    adapter: Hashable = None  # what its keys and values are computed with, beside the model


@dataclass(slots=True, eq=False)
class GrowingRow:
    """What one sequence needs."""

    want: Want
    live: LiveSequence | None  # None: it begins with `apply`
    target: int  # positions
    hits: Sequence[PrefixEntry] = ()
    new_blocks: int = 0
    copies: bool = False  # its last block is shared and must be copied before it is written
    overwrites: bool = False  # its last block is its own, and what is entered of it is about to change
    undo: "_Undo | None" = None  # from `apply` on, where that changed anything

    @property
    def length(self) -> int:
        """Positions written."""
        return 0 if self.live is None else len(self.live.tokens)


class _Undo(NamedTuple):
    """A sequence as it was."""

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
        lives = [slots.get(want.cache_id) for want in wants]
        if targets is None:
            lengths = [0 if live is None else len(live.tokens) for live in lives]
            targets = [length + len(want.tokens) for length, want in zip(lengths, wants, strict=True)]
        for want, target in zip(wants, targets, strict=True):
            if target > slots.longest:
                slots.refuse_past_capacity(want.cache_id, target)
        self._rows = [GrowingRow(*row) for row in zip(wants, lives, targets, strict=True)]
        slots.refuse_newcomers([row.want.cache_id for row in self._rows if row.live is None])
        if slots.prefixes is not None:
            for row in self._rows:
                if row.want.reusable:
                    row.hits = self._match(slots.prefixes, row)
        self._count_blocks()
        resting = {entry.block for row in self._rows for entry in row.hits if not self._holders(entry)}
        slots.pool.refuse_more_than_free(self.num_new_blocks, len(wants), len(resting))

    @property
    def num_new_blocks(self) -> int:
        """Blocks that are handed out, copies included."""
        return sum([row.new_blocks + row.copies for row in self._rows])

    @property
    def num_copies(self) -> int:
        """Blocks that must be copied before the step."""
        return sum([row.copies for row in self._rows])

    @property
    def copied_ids(self) -> list[str]:
        """The sequences whose last block is copied."""
        return [row.want.cache_id for row in self._rows if row.copies]

    def reused(self) -> list[int]:
        """How many of each row's new tokens need not be computed."""
        size = self._slots.block_size
        return [(row.length // size + len(row.hits)) * size - row.length if row.hits else 0 for row in self._rows]

    def apply(self) -> list[tuple[int, int]]:
        """Takes slots and blocks; gives the (source, destination) of blocks to be copied now."""
        slots, pool = self._slots, self._slots.pool
        changed = [row for row in self._rows if not _stays(row)]
        for row in changed:  # all hits are held before any block is handed out anew
            is_new = row.live is None
            row.live = slots.open(row.want.cache_id)
            row.undo = _Undo(is_new, row.live.blocks, [], [])
            for entry in row.hits:
                pool.hold(_block(entry))
                row.undo.gained.append(_block(entry))
        return [pair for row in changed for pair in self._take(row)]

    def _take(self, row: GrowingRow) -> list[tuple[int, int]]:
        """Gives a row its blocks; and the copy that it needs, if any."""
        live, undo, copies = row.live, row.undo, []
        assert live is not None
        assert undo is not None
        live.adapter = row.want.adapter
        blocks = live.blocks[:]
        at = len(live.tokens) // self._slots.block_size
        hits = [_block(entry) for entry in row.hits]
        undo.lost.extend(blocks[at : at + len(hits)])
        blocks[at : at + len(hits)] = hits
        fresh = self._slots.pool.allocate(row.new_blocks + row.copies)
        undo.gained.extend(fresh)
        if row.copies:
            copies.append((blocks[at], fresh[-1]))
            undo.lost.append(blocks[at])
            blocks[at] = fresh.pop()
        elif row.overwrites:
            self._slots.forget(blocks[at])
        self._slots.seat(live, blocks + fresh)
        return copies

    def live(self, index: int) -> LiveSequence:
        """Gives the sequence of a row; it lives from `apply` on."""
        found = self._rows[index].live
        assert found is not None
        return found

    def commit(self, written: Sequence[NDArray[np.int32]] | None = None) -> None:
        """Counts the new tokens as written and enters the blocks they fill.

        `written`, where given, are the tokens that each sequence has come to hold instead of those it was to; blocks
        that were taken for more are given back.
        """
        slots = self._slots
        for index, row in enumerate(self._rows):
            live, undo = row.live, row.undo
            assert live is not None
            live.tokens.frombytes((row.want.tokens if written is None else written[index]).tobytes())
            if undo is not None:
                if written is not None:
                    needed = max(slots.num_blocks(live.length), len(undo.blocks))
                    undo.lost.extend(live.blocks[needed:])
                    slots.seat(live, live.blocks[:needed])
                live.entries += row.hits
                slots.pool.release(undo.lost)
            if slots.prefixes is not None:
                slots.enter(live)
            slots.find_room(live)

    def undo(self) -> None:
        """Takes everything back; ids that were unknown are so again."""
        for row in reversed(self._rows):
            if row.undo is not None and row.live is not None:
                self._slots.seat(row.live, row.undo.blocks)
                self._slots.pool.release(row.undo.gained)
                if row.undo.is_new:
                    self._slots.release(row.want.cache_id)

    def _match(self, prefixes: PrefixIndex, row: GrowingRow) -> list[PrefixEntry]:
        """Finds the full blocks, from where the sequence ends, that are in the prefixes."""
        size, want = self._slots.block_size, row.want
        live = row.live or LiveSequence(slot=-1)
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
        sharers = dict(Counter([entry.block for row in self._rows for entry in row.hits]))
        pool, size = self._slots.pool, self._slots.block_size
        for row in self._rows:
            blocks, length = () if row.live is None else row.live.blocks, row.length
            at, inside = divmod(length, size)
            held = max(len(blocks), at + len(row.hits)) if row.hits else len(blocks)
            row.new_blocks = max(0, -(-row.target // size) - held)
            if inside and not row.hits and row.target > length:
                block = blocks[at]
                others = sharers.get(block, 0)
                if pool.num_holders(block) + others > 1:
                    row.copies = True
                    sharers[block] = others - 1
                else:
                    row.overwrites = pool.is_kept(block)

    def _holders(self, entry: PrefixEntry) -> int:
        return self._slots.pool.num_holders(_block(entry))


def _stays(row: GrowingRow) -> bool:
    """True of a sequence that has all the room it needs and may write there."""
    if row.live is None or row.new_blocks or row.hits or row.copies or row.overwrites:
        return False
    return row.live.adapter is row.want.adapter


def _block(entry: PrefixEntry) -> int:
    assert entry.block is not None
    return entry.block

"""The slots and blocks that one call takes: planned while the call may still be refused, then taken together."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.kvcache.prefix import PrefixEntry, PrefixIndex
from ferrum_jax.kvcache.sequences import PRIVATE, CachedSequence, SequenceTable


@dataclass(slots=True, eq=False)
class AllocationRequest:
    """The needs of one sequence that lacks a slot or blocks, may reuse prefixes, or changes its adapter."""

    index: int  # among the rows
    cache_id: str
    tokens: NDArray[np.int32]  # [n]: the new ones
    reusable: int  # how many of them may come from known prefixes
    adapter: Hashable  # the key of its prefixes: an adapter, None or PRIVATE
    target: int  # positions it must have room for
    live: CachedSequence | None  # None: it is created by `apply`
    hits: Sequence[PrefixEntry] = ()
    new_blocks: int = 0
    copies: bool = False  # its last block is shared and must be copied before it is written
    overwrites: bool = False  # its last block is its own, but entered as a prefix, which the write invalidates
    num_blocks_before: int = 0
    lost: list[int] = field(default_factory=list)  # blocks to free at `commit`

    @property
    def length(self) -> int:
        """Positions written."""
        return 0 if self.live is None else len(self.live.tokens)


class KvTransaction:
    """Slots and blocks of one call, all or nothing: raises when made if they are short; then `apply` and `commit`.

    A sequence that already has room in blocks of its own takes no part but to be counted.
    """

    def __init__(
        self,
        table: SequenceTable,
        cache_ids: Sequence[str],
        tokens: Sequence[NDArray[np.int32]],
        reusable: Sequence[int] | None = None,
        adapters: Sequence[Hashable] | None = None,
        targets: Sequence[int] | None = None,
    ):
        """Plans; changes nothing.

        Args:
            table: the sequences.
            cache_ids: of the rows, all different.
            tokens: new ones of each row, UNKNOWN where the device knows them.
            reusable: how many of each row's tokens may come from known prefixes; none by default.
            adapters: the key of each row's prefixes: an adapter, None or PRIVATE; None by default.
            targets: positions each row must have room for; those written and the new tokens by default.

        Raises:
            RequestValidationError: a target is past the capacity.
            ResourceExhaustedError: slots or blocks are short.
        """
        self._table = table
        self._tokens = tokens
        before = [*map(table.live.get, cache_ids)]
        self.lives = cast(list[CachedSequence], before)  # of each row; from `apply` on, there is one for each
        self._changed: list[AllocationRequest] = []
        lengths = [0 if live is None else len(live.tokens) for live in before]
        targets = targets or [length + len(new) for length, new in zip(lengths, tokens, strict=True)]
        reusable = [0] * len(lengths) if reusable is None or table.prefixes is None else reusable
        rows = zip(cache_ids, tokens, reusable, adapters or [None] * len(lengths), targets, before, strict=True)
        for index, row in enumerate(rows):
            _, _, reused, adapter, target, live = row
            if live is None or target > live.writable or reused > 0 or live.adapter is not adapter:
                self._changed.append(AllocationRequest(index, *row))
        if self._changed:
            self._plan(self._changed)

    def _plan(self, rows: Sequence[AllocationRequest]) -> None:
        table = self._table
        for row in rows:
            table.check_capacity(row.cache_id, row.target)
        table.check_new_slots([row.cache_id for row in rows if row.live is None])
        if table.prefixes is not None:
            for row in rows:
                if row.reusable:
                    row.hits = self._match(table.prefixes, row)
        self._count_blocks(rows)
        if self.num_new_blocks + self._num_resting > table.pool.num_free:
            for row in rows:  # a partly filled block that a hit replaces is freed only at `commit`
                if row.length % table.block_size:
                    row.hits = ()
            self._count_blocks(rows)
        table.pool.check_enough_free(self.num_new_blocks, len(rows), self._num_resting)

    @property
    def _num_resting(self) -> int:
        """Known blocks that nobody holds and that this call reuses."""
        hits = {entry.block for row in self._changed for entry in row.hits}
        return sum(not self._table.pool.num_holders(block) for block in hits)

    @property
    def num_new_blocks(self) -> int:
        """Blocks that are handed out, copies included."""
        return sum([row.new_blocks + row.copies for row in self._changed])

    @property
    def copied_ids(self) -> list[str]:
        """The sequences whose last block is copied."""
        return [row.cache_id for row in self._changed if row.copies]

    def reused(self) -> list[int]:
        """How many of each row's new tokens need not be computed."""
        size, found = self._table.block_size, [0] * len(self._tokens)
        for row in self._changed:
            if row.hits:
                found[row.index] = (row.length // size + len(row.hits)) * size - row.length
        return found

    def apply(self) -> list[tuple[int, int]]:
        """Takes slots and blocks; returns the (source, destination) of blocks to be copied now."""
        table, pool = self._table, self._table.pool
        for row in self._changed:  # all hits are held before any block is handed out again
            row.live = self.lives[row.index] = table.open(row.cache_id)
            row.num_blocks_before = len(row.live.blocks)
            for entry in row.hits:
                pool.hold(entry.block)
        return [pair for row in self._changed for pair in self._take(row)]

    def commit(self, written: Sequence[Sequence[int]] | None = None) -> None:
        """Counts the new tokens as written and enters the blocks they fill.

        `written`, if given, are the tokens that each sequence really got; blocks that were taken for more are freed.
        """
        table = self._table
        for row in self._changed:
            live = self.lives[row.index]
            live.entries += row.hits
            table.pool.release(row.lost)
        counted = written if written is not None else [new.tolist() for new in self._tokens]
        table.append(self.lives, counted)
        for row in self._changed:
            live = self.lives[row.index]
            if written is not None:
                needed = max(table.num_blocks(live.length), row.num_blocks_before)
                table.pool.release(live.blocks[needed:])
                table.set_blocks(live, live.blocks[:needed])
            table.enter(live)
            table.update_writable(live)

    def _take(self, row: AllocationRequest) -> list[tuple[int, int]]:
        """Assigns a row its blocks; returns the copy that it needs, if any."""
        live, copies = row.live, []
        assert live is not None
        live.adapter = row.adapter
        blocks = live.blocks[:]
        at = len(live.tokens) // self._table.block_size
        hits = [entry.block for entry in row.hits]
        row.lost = blocks[at : at + len(hits)]
        blocks[at : at + len(hits)] = hits
        fresh = self._table.pool.allocate(row.new_blocks + row.copies)
        if row.copies:
            copies.append((blocks[at], fresh[-1]))
            row.lost.append(blocks[at])
            blocks[at] = fresh.pop()
        elif row.overwrites:
            self._table.forget(blocks[at])
        self._table.set_blocks(live, blocks + fresh)
        return copies

    def _match(self, prefixes: PrefixIndex, row: AllocationRequest) -> list[PrefixEntry]:
        """Finds the full blocks, from where the sequence ends, that are in the prefixes."""
        size = self._table.block_size
        live = row.live or CachedSequence(slot=-1)
        if live.is_private or row.adapter is PRIVATE:
            return []
        at = live.length // size
        if len(live.entries) < at:  # a block of its own is not entered yet: a token of it has not been read
            return []
        entry = live.entries[-1] if at else prefixes.root(row.adapter)
        tail = live.tokens[at * size :].tobytes() + row.tokens.tobytes()
        return prefixes.match(entry, tail[: 4 * (live.length + row.reusable - at * size)], size)

    def _count_blocks(self, rows: Sequence[AllocationRequest]) -> None:
        """Decides how many blocks each row lacks, and whether it must copy the one it goes on in."""
        sharers = dict(Counter([entry.block for row in rows for entry in row.hits]))
        pool, size = self._table.pool, self._table.block_size
        for row in rows:
            row.copies = row.overwrites = False
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

"""Who holds which block of the pool: plain bookkeeping on the host."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from ferrum_jax.contract.errors import InternalError, ResourceExhaustedError


class BlockPool:
    """A fixed number of blocks, each held any number of times.

    A block nobody holds is free. A free block that is `kept` (its content may be wanted again) can be held again until
    it is handed out; free blocks that are not kept are handed out first, then the kept one freed longest ago.
    """

    def __init__(self, num_blocks: int, recycled: Callable[[int], None] = lambda _: None):
        """Makes all blocks free; `recycled` is called with a kept block before it is handed out again."""
        self.num_blocks = num_blocks
        self.evictions = 0
        self._recycled = recycled
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._resting: OrderedDict[int, None] = OrderedDict()  # free and kept, freed longest ago first
        self._holders = [0] * num_blocks
        self._kept = [False] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._blank) + len(self._resting)

    def num_holders(self, block: int) -> int:
        """How many times a block is held."""
        return self._holders[block]

    def is_kept(self, block: int) -> bool:
        """True of a block whose content may be wanted again."""
        return self._kept[block]

    def check_enough_free(self, needed: int, num_sequences: int, resting: int = 0) -> None:
        """Raises ResourceExhaustedError if fewer than `needed` blocks can be handed out; changes nothing.

        `resting` counts free blocks that are about to be held again and cannot be handed out.
        """
        free = self.num_free - resting
        if needed > free:
            raise ResourceExhaustedError(
                f"need {needed} KV blocks for {num_sequences} sequences, {free} of {self.num_blocks} are free",
                needed=needed,
                free=free,
            )

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks, held once each, or raises ResourceExhaustedError and hands out none."""
        self.check_enough_free(count, 1)
        taken = [self._take() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def hold(self, block: int) -> None:
        """Holds a block once more; one that is free must be kept."""
        if not self._holders[block]:
            if block not in self._resting:
                raise InternalError(f"block {block} is free and not kept, it cannot be held")
            del self._resting[block]
        self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Frees each block once. Of the kept ones, the last is handed out first."""
        for block in reversed(list(blocks)):
            if not self._holders[block]:
                raise InternalError(f"block {block} was freed twice")
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._kept[block]:
                self._resting[block] = None
            else:
                self._blank.append(block)

    def keep(self, block: int) -> None:
        """Marks the content of a held block as worth keeping."""
        if not self._holders[block]:
            raise InternalError(f"block {block} is free, its content cannot be kept")
        self._kept[block] = True

    def discard(self, block: int) -> None:
        """Marks the content of a block as not worth keeping."""
        self._kept[block] = False
        if block in self._resting:
            del self._resting[block]
            self._blank.append(block)

    def _take(self) -> int:
        if not self._blank:
            oldest = next(iter(self._resting))
            self.evictions += 1
            self._recycled(oldest)
            self.discard(oldest)
        return self._blank.pop()

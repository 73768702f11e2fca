"""Who owns which block of the pool: plain bookkeeping on the host."""

from collections.abc import Iterable

from ferrum_jax.contract.errors import InternalError, ResourceExhaustedError


class BlockPool:
    """A fixed number of blocks, each free or owned once. Blocks freed last are handed out first."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned = [False] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    def refuse_more_than_free(self, needed: int, num_sequences: int) -> None:
        """Raises ResourceExhausted if `needed` blocks are not to be had; changes nothing."""
        if needed > len(self._free):
            raise ResourceExhaustedError(
                f"need {needed} KV blocks for {num_sequences} sequences, "
                f"{len(self._free)} of {self.num_blocks} are free",
                needed=needed,
                free=len(self._free),
            )

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks, or raises ResourceExhausted and hands out none."""
        self.refuse_more_than_free(count, 1)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owned[block] = True
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Takes blocks back."""
        for block in blocks:
            if not self._owned[block]:
                raise InternalError(f"block {block} was freed twice")
            self._owned[block] = False
            self._free.append(block)

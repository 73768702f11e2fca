"""Which blocks hold the keys and values of which tokens, so that a common prefix is computed once.

A tree: an entry is one full block of tokens after its parent's tokens, under one adapter. Its key is the tokens
themselves, so a hit has compared all of them. Zheng et al. 2024, "SGLang", section 3 (a radix tree); Kwon et al. 2023,
"PagedAttention", section 4.4 (shared blocks).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(eq=False)
class PrefixEntry:
    """One full block of tokens in the tree; the root of an adapter has no block, -1."""

    block: int = -1
    parent: "PrefixEntry | None" = None
    tokens: bytes = b""  # int32
    children: "dict[bytes, PrefixEntry]" = field(default_factory=dict)


class PrefixIndex:
    """The entries of every adapter, and of the model without one."""

    def __init__(self):
        self._roots: dict[Hashable, PrefixEntry] = {}
        self._by_block: dict[int, PrefixEntry] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def root(self, adapter: Hashable) -> PrefixEntry:
        """Returns the root entry of an adapter; None stands for the model without one."""
        return self._roots.get(adapter) or PrefixEntry()

    def add(self, adapter: Hashable, parent: PrefixEntry | None, tokens: bytes, block: int) -> PrefixEntry:
        """Enters a block after `parent` (None: at the root), or returns the entry that these tokens have already."""
        above = self._roots.setdefault(adapter, PrefixEntry()) if parent is None else parent
        found = above.children.get(tokens)
        if found is None:
            found = above.children[tokens] = PrefixEntry(block, above, tokens)
            self._by_block[block] = found
        return found

    def match(self, entry: PrefixEntry, tokens: bytes, block_size: int) -> list[PrefixEntry]:
        """Returns the entries of the known full blocks of `tokens`, int32, that follow an entry."""
        size, found = 4 * block_size, []
        for start in range(0, len(tokens) - size + 1, size):
            below = entry.children.get(tokens[start : start + size])
            if below is None:
                break
            found.append(below)
            entry = below
        return found

    def forget(self, block: int) -> list[int]:
        """Drops a block's entry, if it has one, and all below it; returns their blocks.

        After an interrupt of a call that forgets several, the entry may be gone, or missing in its parent.
        """
        entry = self._by_block.get(block)
        if entry is None:
            return []
        assert entry.parent is not None
        entry.parent.children.pop(entry.tokens, None)
        return self._drop(entry)

    def forget_all(self) -> list[int]:
        """Drops every entry; returns their blocks."""
        return [block for adapter in list(self._roots) for block in self.forget_adapter(adapter)]

    def forget_adapter(self, adapter: Hashable) -> list[int]:
        """Drops every entry under an adapter; returns their blocks."""
        root = self._roots.pop(adapter, None)
        return [] if root is None else self._drop(root)

    def _drop(self, top: PrefixEntry) -> list[int]:
        """Empties an entry and all below it; returns their blocks."""
        blocks, stack = [], [top]
        while stack:
            entry = stack.pop()
            stack += entry.children.values()
            entry.children.clear()
            if entry.block >= 0:
                blocks.append(entry.block)
                self._by_block.pop(entry.block, None)
        return blocks

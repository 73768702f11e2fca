"""A handle on a live sequence's KV, as executors hand them out."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ferrum_jax.contract.values import Device


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Where a sequence's positions lie: position p is in `physical_blocks[p // block_size]`.

    A model without blocks has no physical blocks, and a block size of 0.
    """

    physical_blocks: tuple[int, ...]
    sequence_length: int  # positions
    block_size: int  # positions


class KvCacheHandle(abc.ABC):
    """An immutable view of one live sequence at one length."""

    @property
    @abc.abstractmethod
    def cache_id(self) -> str:
        """Id of the sequence in the model."""

    @property
    @abc.abstractmethod
    def block_table(self) -> BlockTable:
        """The sequence's blocks and its length as of this handle."""

    @property
    @abc.abstractmethod
    def num_layers(self) -> int:
        """Layers that hold keys and values."""

    @property
    @abc.abstractmethod
    def num_heads(self) -> int:
        """Key/value heads per layer."""

    @property
    @abc.abstractmethod
    def head_dim(self) -> int:
        """Width of one head."""

    @property
    @abc.abstractmethod
    def device(self) -> Device:
        """Where the keys and values are."""

    @abc.abstractmethod
    def key_cache(self, layer: int) -> Any:
        """Copies the keys of one layer out of the blocks: `[num_tokens, num_heads, head_dim]`."""

    @abc.abstractmethod
    def value_cache(self, layer: int) -> Any:
        """Copies the values of one layer out of the blocks: `[num_tokens, num_heads, head_dim]`."""

    @abc.abstractmethod
    def clone_handle(self) -> "KvCacheHandle":
        """Forks the sequence: a new id that shares its blocks until either writes."""

    @abc.abstractmethod
    def with_sequence_length(self, length: int) -> Self:
        """Returns a handle on the same sequence at another length; this one stays as it is."""

    @abc.abstractmethod
    def stats(self) -> Mapping[str, Any]:
        """Bytes, blocks and positions this sequence holds."""

    @abc.abstractmethod
    def is_valid(self) -> bool:
        """True while the sequence lives and still has the length of this handle."""

    @property
    def num_tokens(self) -> int:
        """Positions as of this handle."""
        return self.block_table.sequence_length

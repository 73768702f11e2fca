"""The handle on a sequence that `LlmExecutor` returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferrum_jax.contract.answers import check_kind
from ferrum_jax.contract.checks import check_int
from ferrum_jax.contract.errors import FerrumError, RequestValidationError, safe_repr
from ferrum_jax.contract.handles import BlockTable, KvCacheHandle
from ferrum_jax.contract.values import Device
from ferrum_jax.executor.llm_executor.sequences import TrackedSequence, TrackedSequences


@dataclass(frozen=True)
class LlmKvCacheHandle(KvCacheHandle):
    """One sequence of one executor at one length. It keeps nothing alive: `release_cache` frees the sequence.

    `cache_id`, `num_tokens` and the sizes are its own; everything else asks the model, and waits while a call runs.
    If this executor reuses a released id, old handles stay stale. If someone releases the id and prefills it again by
    calling the model directly, and the length is the same, the handle cannot tell.
    """

    _table: TrackedSequences
    _sequence: TrackedSequence
    _num_tokens: int  # positions

    @property
    def cache_id(self) -> str:
        """Id of the sequence in the model."""
        return self._sequence.cache_id

    @property
    def num_tokens(self) -> int:
        """Positions as of this handle."""
        return self._num_tokens

    @property
    def num_layers(self) -> int:
        """Layers that hold keys and values."""
        return self._table.model.config.num_layers

    @property
    def num_heads(self) -> int:
        """Key/value heads per layer."""
        return self._table.model.config.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self._table.model.config.head_dim

    @property
    def device(self) -> Device:
        """Where the keys and values are."""
        return self._table.device

    @property
    def block_table(self) -> BlockTable:
        """The blocks of this handle's positions; RequestValidationError once the sequence has lost any of them."""
        with self._table.held() as model:
            self._table.refresh(self._sequence)
            if self._sequence.length < self._num_tokens:
                raise _stale(self)
            table = check_kind(model, "kv_block_table", model.kv_block_table(self.cache_id), BlockTable)
        block_size = 0 if table is None else table.block_size
        blocks = () if table is None or not block_size else table.physical_blocks[: -(-self._num_tokens // block_size)]
        return BlockTable(physical_blocks=tuple(blocks), sequence_length=self._num_tokens, block_size=block_size)

    def key_cache(self, layer: int) -> Any:
        """Copies the keys of one layer out of the blocks: `[num_tokens, num_heads, head_dim]`."""
        return self._layer(layer)[0]

    def value_cache(self, layer: int) -> Any:
        """Copies the values of one layer out of the blocks: `[num_tokens, num_heads, head_dim]`."""
        return self._layer(layer)[1]

    def _layer(self, layer: int) -> tuple[Any, Any]:
        with self._table.held() as model:
            current_sequence(self, self._table)
            if check_int("layer", layer, 0) >= self.num_layers:
                raise RequestValidationError(f"layer is {layer}, the model has {self.num_layers}")
            return model.kv_cache(self.cache_id, layer)

    def clone_handle(self) -> "LlmKvCacheHandle":
        """Forks the sequence: a new id that shares its blocks until either writes. Unsupported by some models."""
        with self._table.held():
            return handle_of(self._table, self._table.fork(current_sequence(self, self._table)))

    def with_sequence_length(self, length: int) -> "LlmKvCacheHandle":
        """Returns a handle on the same sequence at another length, checked when it is used."""
        return LlmKvCacheHandle(self._table, self._sequence, check_int("length", length, 0))

    def stats(self) -> Mapping[str, Any]:
        """Positions, blocks and bytes of the sequence at this handle's length; without blocks, bytes of positions."""
        table = self.block_table
        positions = len(table.physical_blocks) * table.block_size if table.physical_blocks else self._num_tokens
        return {
            "cache_id": self.cache_id,
            "num_tokens": self._num_tokens,
            "num_blocks": len(table.physical_blocks),
            "block_size": table.block_size,
            "bytes": positions * self._table.kv_bytes,
        }

    def is_valid(self) -> bool:
        """True while the sequence lives, has the length of this handle, and the executor takes calls."""
        try:
            with self._table.held():
                self._table.refresh(self._sequence)
                return self._sequence.length == self._num_tokens
        except FerrumError:
            return False

    def __repr__(self) -> str:
        return f"LlmKvCacheHandle({self.cache_id!r}, num_tokens={self._num_tokens})"


def handle_of(table: TrackedSequences, sequence: TrackedSequence) -> LlmKvCacheHandle:
    """Returns a handle on a sequence at its length now."""
    return LlmKvCacheHandle(table, sequence, sequence.length)


def live_sequence(handle: Any, table: TrackedSequences) -> TrackedSequence:
    """Returns the sequence of a handle of any length; RequestValidationError for a foreign or released one."""
    if not isinstance(handle, LlmKvCacheHandle):
        kind = type(handle).__name__
        raise RequestValidationError(f"handle {safe_repr(handle)} is a {kind}, expected one of this executor")
    if handle._table is not table:
        raise RequestValidationError(f"{handle!r} belongs to another executor")
    table.refresh(handle._sequence)
    return handle._sequence


def current_sequence(handle: Any, table: TrackedSequences) -> TrackedSequence:
    """As `live_sequence`; a handle of another length than the sequence is a RequestValidationError, too."""
    sequence = live_sequence(handle, table)
    if handle.num_tokens != sequence.length:
        raise _stale(handle)
    return sequence


def _stale(handle: LlmKvCacheHandle) -> RequestValidationError:
    lengths = f"it has {handle.num_tokens} positions and the cache {handle._sequence.length}"
    return RequestValidationError(f"{handle.cache_id!r}: the handle is stale, {lengths}")

"""The handle on a sequence that `LlmExecutor` gives out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferrum_jax.contract.checks import checked_int
from ferrum_jax.contract.errors import FerrumError, RequestValidationError, shown
from ferrum_jax.contract.handles import BlockTable, KvCacheHandle
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.values import Device
from ferrum_jax.executor.llm_executor.ledger import Ledger, TrackedSequence


@dataclass(frozen=True)
class Place:
    """What all handles of one executor share."""

    ledger: Ledger
    device: Device
    kv_bytes: int  # per position, over all layers


@dataclass(frozen=True)
class LlmKvCacheHandle(KvCacheHandle):
    """One sequence of one executor at one length. It holds nothing alive: `release_cache` frees the sequence.

    `cache_id`, `num_tokens` and the sizes are its own; everything else asks the model, and waits while a step runs.
    """

    _place: Place
    _cache_id: str
    _num_tokens: int  # positions

    @property
    def cache_id(self) -> str:
        """Id of the sequence in the model."""
        return self._cache_id

    @property
    def num_tokens(self) -> int:
        """Positions as of this handle."""
        return self._num_tokens

    @property
    def num_layers(self) -> int:
        """Layers that hold keys and values."""
        return self._place.ledger.model.config.num_layers

    @property
    def num_heads(self) -> int:
        """Key/value heads per layer."""
        return self._place.ledger.model.config.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self._place.ledger.model.config.head_dim

    @property
    def device(self) -> Device:
        """Where the keys and values are."""
        return self._place.device

    @property
    def block_table(self) -> BlockTable:
        """Where this handle's positions lie now, also after the sequence has grown.

        Raises:
            RequestValidationError: the sequence was released, or cut below this handle's length.
        """
        with self._place.ledger.held() as model:
            live = self._place.ledger.find_or_refuse(self._cache_id)
            if live.length < self._num_tokens:
                raise _stale(self, live)
            return self._cut_table(model)

    def key_cache(self, layer: int) -> Any:
        """Copies the keys of one layer out of the blocks: `[num_tokens, num_heads, head_dim]`."""
        return self._layer(layer)[0]

    def value_cache(self, layer: int) -> Any:
        """Copies the values of one layer out of the blocks: `[num_tokens, num_heads, head_dim]`."""
        return self._layer(layer)[1]

    def clone_handle(self) -> "LlmKvCacheHandle":
        """Forks the sequence: a new id that shares its blocks until either writes.

        Raises:
            RequestValidationError: this handle is stale.
            ResourceExhaustedError: no slot is free.
            UnsupportedError: the model cannot fork.
        """
        with self._place.ledger.held():
            fork = self._place.ledger.fork(current(self, self._place.ledger))
        return LlmKvCacheHandle(self._place, fork.cache_id, fork.length)

    def with_sequence_length(self, length: int) -> "LlmKvCacheHandle":
        """Gives a handle on the same sequence at another length, checked when it is used."""
        return LlmKvCacheHandle(self._place, self._cache_id, checked_int("length", length, 0))

    def stats(self) -> Mapping[str, Any]:
        """Positions, blocks and bytes of the sequence at this handle's length; without blocks, bytes of positions."""
        table = self.block_table
        positions = len(table.physical_blocks) * table.block_size if table.physical_blocks else self._num_tokens
        return {
            "cache_id": self._cache_id,
            "num_tokens": self._num_tokens,
            "num_blocks": len(table.physical_blocks),
            "block_size": table.block_size,
            "bytes": positions * self._place.kv_bytes,
        }

    def is_valid(self) -> bool:
        """True while the sequence lives, has the length of this handle, and the executor takes calls."""
        try:
            with self._place.ledger.held():
                live = self._place.ledger.find(self._cache_id)
        except FerrumError:
            return False
        return live is not None and live.length == self._num_tokens

    def _layer(self, layer: int) -> tuple[Any, Any]:
        with self._place.ledger.held() as model:
            current(self, self._place.ledger)
            if checked_int("layer", layer, 0) >= self.num_layers:
                raise RequestValidationError(f"layer is {layer}, the model has {self.num_layers}")
            return model.kv_cache(self._cache_id, layer)

    def _cut_table(self, model: DecoderOnlyLLM) -> BlockTable:
        table = model.kv_block_table(self._cache_id)
        if table is None:
            return BlockTable(physical_blocks=(), sequence_length=self._num_tokens, block_size=0)
        needed = -(-self._num_tokens // table.block_size)
        return BlockTable(
            physical_blocks=tuple(table.physical_blocks[:needed]),
            sequence_length=self._num_tokens,
            block_size=table.block_size,
        )

    def __repr__(self) -> str:
        return f"LlmKvCacheHandle({self._cache_id!r}, num_tokens={self._num_tokens})"


def alive(handle: Any, ledger: Ledger) -> TrackedSequence:
    """Gives the live sequence of a handle, whatever the handle's length, or raises."""
    if not isinstance(handle, LlmKvCacheHandle):
        raise RequestValidationError(
            f"handle {shown(handle)} is a {type(handle).__name__}, expected one of this executor"
        )
    if handle._place.ledger is not ledger:
        raise RequestValidationError(f"{handle!r} belongs to another executor")
    return ledger.find_or_refuse(handle.cache_id)


def current(handle: Any, ledger: Ledger) -> TrackedSequence:
    """Gives the live sequence of a handle, or raises unless the handle's length is its length."""
    live = alive(handle, ledger)
    if handle.num_tokens != live.length:
        raise _stale(handle, live)
    return live


def _stale(handle: KvCacheHandle, live: TrackedSequence) -> RequestValidationError:
    return RequestValidationError(
        f"{handle.cache_id!r}: the handle is stale, it has {handle.num_tokens} positions and the cache {live.length}"
    )

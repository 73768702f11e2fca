"""Requests for, and reports on, slots and blocks of the KV; and the adapter bound to a slot."""

import os
from dataclasses import dataclass

from ferrum_jax.contract.checks import check_int
from ferrum_jax.contract.errors import RequestValidationError, safe_repr


@dataclass(frozen=True, kw_only=True)
class KvSlotRequest:
    """Asks that `target_len` positions of `cache_id` be writable before the next forward.

    `admission_target_len` is the length the sequence may finally reach: checked for fit, never allocated.
    """

    cache_id: str
    target_len: int  # positions
    admission_target_len: int | None = None  # positions

    def __post_init__(self):
        label, most = safe_repr(self.cache_id), self.admission_target_len
        object.__setattr__(self, "target_len", check_int(f"{label}: target_len", self.target_len, 0))
        if most is not None:
            object.__setattr__(self, "admission_target_len", check_int(f"{label}: admission_target_len", most, 0))


@dataclass(frozen=True, kw_only=True)
class KvSlotAllocation:
    """Blocks of one cache id before and after a reservation."""

    cache_id: str
    blocks_before: int
    blocks_after: int
    new_blocks: int


@dataclass(frozen=True, kw_only=True)
class KvSlotReservation:
    """Outcome of `reserve_kv_slots`: the pool before and after, and one allocation per cache id."""

    block_size: int  # positions
    total_blocks: int
    free_blocks_before: int
    free_blocks_after: int
    allocations: tuple[KvSlotAllocation, ...]


@dataclass(frozen=True, kw_only=True)
class KvSlotCapacitySnapshot:
    """The pool as it is now."""

    block_size: int  # positions
    total_blocks: int
    free_blocks: int


@dataclass(frozen=True, kw_only=True)
class ActiveLoraAdapter:
    """A LoRA adapter by name, and the folder it is read from."""

    name: str
    path: str

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise RequestValidationError(f"adapter name {safe_repr(self.name)}: expected a string")
        if not isinstance(self.path, (str, os.PathLike)):
            raise RequestValidationError(f"path of adapter {self.name!r} is {safe_repr(self.path)}, expected a path")

"""Requests for, and reports on, slots and blocks of the KV; and the adapter bound to a slot."""

from dataclasses import dataclass

from ferrum_jax.contract.errors import RequestValidationError


@dataclass(frozen=True, kw_only=True)
class KvSlotRequest:
    """Asks that `target_len` positions of `cache_id` be writable before the next forward.

    `admission_target_len` is the length the sequence may reach in the end: checked for fit, never allocated.
    """

    cache_id: str
    target_len: int  # positions
    admission_target_len: int | None = None  # positions

    def __post_init__(self):
        for name in ("target_len", "admission_target_len"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise RequestValidationError(f"{self.cache_id!r}: {name} is {value}, the least is 0")


@dataclass(frozen=True, kw_only=True)
class KvSlotAllocation:
    """What a reservation did for one cache id, in blocks."""

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

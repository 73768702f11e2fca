"""Counts of what was really done, in the contract's names."""

from dataclasses import asdict, dataclass, field
from typing import Any

_BUCKETS = ((1, "m1"), (2, "m2"), (4, "m3_4"), (8, "m5_8"), (16, "m9_16"), (32, "m17_32"))


@dataclass
class DecodeBatchCounters:
    """Counts `decode_batch` calls by size."""

    calls: int = 0
    total_items: int = 0
    max_items: int = 0
    last_items: int = 0
    force_full_logits_calls: int = 0
    singleton_fast_path_calls: int = 0
    unsupported_fallback_calls: int = 0
    lora_fallback_calls: int = 0
    bucket_calls: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys([n for _, n in _BUCKETS] + ["m_gt_32"], 0)
    )

    def count(self, items: int, *, forced: bool = False, unpadded: bool = False) -> None:
        """Counts one batch of at least one row; `unpadded`: its step has exactly as many decode rows."""
        self.calls += 1
        self.total_items += items
        self.max_items = max(self.max_items, items)
        self.last_items = items
        self.force_full_logits_calls += forced
        self.singleton_fast_path_calls += items == 1 and unpadded
        self.bucket_calls[next((name for most, name in _BUCKETS if items <= most), "m_gt_32")] += 1

    def snapshot(self) -> dict[str, Any]:
        """Returns a copy of the counts."""
        average = self.total_items / self.calls if self.calls else 0.0
        return {"schema_version": 1, "avg_items_per_call": average, **asdict(self)}


@dataclass
class PrefixCounters:
    """Counts what prefixes saved. A lookup is a row of several new tokens; it hits if any of them is reused."""

    hits: int = 0
    misses: int = 0
    saved_tokens: int = 0
    evictions: int = 0  # before the last reset; the pool counts those since

    def count(self, reused: int) -> None:
        """Counts one lookup that has run."""
        self.saved_tokens += reused
        self.hits += reused > 0
        self.misses += reused == 0

"""Short ways to ask an executor, also for what it refuses."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from ferrum_jax.contract import DecodeInput, PrefillInput, UnifiedBatch, UnifiedBatchItem

T = TypeVar("T")


def run(call: Coroutine[Any, Any, T]) -> T:
    """Runs one call in a loop of its own; one that hangs fails."""

    async def timed() -> T:
        return await asyncio.wait_for(call, timeout=60)

    return asyncio.run(timed())


def prompt(tokens: Sequence[int], handle: Any = None, **rest: Any) -> PrefillInput:
    return PrefillInput(input_ids=np.array([tokens], np.int32), kv_cache=handle, **rest)


def token(token: int, handle: Any, **rest: Any) -> DecodeInput:
    return DecodeInput(input_ids=np.array([[token]], np.int32), kv_cache=handle, **rest)


def item(seq_id: Any, tokens: Sequence[int], offset: Any, final: Any = True, **rest: Any) -> UnifiedBatchItem:
    return UnifiedBatchItem(seq_id=seq_id, q_tokens=tokens, pos_offset=offset, is_final_chunk=final, **rest)


def batch(*items: UnifiedBatchItem) -> UnifiedBatch:
    return UnifiedBatch(items)

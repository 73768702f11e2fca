"""From a model's answers to what callers get."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.llm import Logits
from ferrum_jax.contract.tensors import DecodeOutput, PrefillOutput
from ferrum_jax.executor.handle import LlmKvCacheHandle, Place
from ferrum_jax.executor.ledger import TrackedSequence


def handle_of(place: Place, live: TrackedSequence) -> LlmKvCacheHandle:
    """Gives a handle on a sequence at its length now."""
    return LlmKvCacheHandle(place, live.cache_id, live.length)


def prefill_outputs(
    place: Place, opened: Sequence[TrackedSequence], logits: Sequence[NDArray[np.float32]]
) -> list[PrefillOutput]:
    """Gives `[1, n, V]` for every `[n, V]`."""
    return [
        PrefillOutput(logits=rows[None], kv_cache=handle_of(place, live))
        for live, rows in zip(opened, logits, strict=True)
    ]


def decode_output(handle: LlmKvCacheHandle, answer: Logits | int) -> DecodeOutput:
    """Gives `[1, V]` logits, or a `[1, 1]` token id."""
    logits = np.array([[answer]], np.int32) if isinstance(answer, int) else answer[None]
    return DecodeOutput(logits=logits, kv_cache=handle)

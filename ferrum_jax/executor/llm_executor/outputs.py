"""From a model's answers to what callers get."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.llm import Logits
from ferrum_jax.contract.tensors import DecodeOutput, PrefillOutput
from ferrum_jax.contract.watching import Watched
from ferrum_jax.executor.llm_executor.handle import LlmKvCacheHandle, Place
from ferrum_jax.executor.llm_executor.ledger import TrackedSequence
from ferrum_jax.executor.llm_executor.metadata import Options


def handle_of(place: Place, live: TrackedSequence) -> LlmKvCacheHandle:
    """Gives a handle on a sequence at its length now."""
    return LlmKvCacheHandle(place, live.cache_id, live.length)


def prefill_outputs(
    place: Place,
    opened: Sequence[TrackedSequence],
    found: Sequence[NDArray[np.float32] | Watched],
    asked: Sequence[Options],
) -> list[PrefillOutput]:
    """Gives `[1, n, V]` for every `[n, V]`, and what was watched in the order in which it was asked for."""
    outputs = []
    for live, one, options in zip(opened, found, asked, strict=True):
        handle = handle_of(place, live)
        if not isinstance(one, Watched):
            outputs.append(PrefillOutput(logits=one[None], kv_cache=handle))
            continue
        hidden = [one.hidden[layer][None] for layer in options.hidden_layers]
        weights = [one.attention_weights[layer][None] for layer in options.attention_layers]
        outputs.append(
            PrefillOutput(
                logits=one.logits[None],
                kv_cache=handle,
                hidden_states=hidden or None,
                attention_weights=weights or None,
            )
        )
    return outputs


def decode_output(handle: LlmKvCacheHandle, answer: Logits | int) -> DecodeOutput:
    """Gives `[1, V]` logits, or a `[1, 1]` token id."""
    logits = np.array([[answer]], np.int32) if isinstance(answer, int) else answer[None]
    return DecodeOutput(logits=logits, kv_cache=handle)

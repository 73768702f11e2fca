"""What an executor does with a model that refuses a batch, and what it counts then."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import GreedyArgmax
from ferrum_jax.contract.errors import UnsupportedError
from tests.executor.asking import batch, item, prompt, run, token
from tests.fake import SummingLLM

ADAPTER = {"ferrum_lora_adapter": "x", "ferrum_lora_path": "y"}


def fallbacks(executor: LlmExecutor) -> tuple[int, int]:
    counts = executor.cache_metrics_snapshot()["decode_batch"]
    return counts["unsupported_fallback_calls"], counts["lora_fallback_calls"]


class NoMixedAdapters(SummingLLM):
    """Refuses batches in which any sequence has an adapter."""

    def unified_forward(self, items: Sequence[Any]) -> list[Any]:
        self._check_no_adapters([cache_id for cache_id, *_ in items])
        return super().unified_forward(items)

    def decode_batch(self, batch: Sequence[Any]) -> list[Any]:
        self._check_no_adapters([cache_id for cache_id, *_ in batch])
        return super().decode_batch(batch)

    def _check_no_adapters(self, cache_ids: list[str]) -> None:
        if any(cache_id in self.adapters for cache_id in cache_ids):
            raise UnsupportedError("no adapters in a batch")


def test_a_batch_that_adapters_make_impossible_runs_row_by_row_and_is_counted():
    model = NoMixedAdapters()
    executor = LlmExecutor(model)
    outs = run(executor.batch_prefill([prompt([1, 2]), prompt([3], metadata=ADAPTER)]))
    assert [int(np.argmax(out.logits)) for out in outs] == [3, 3]
    assert model.calls == ["prefill", "prefill"]
    assert fallbacks(executor) == (0, 1)
    one, two = (out.kv_cache for out in outs)
    decoded = run(executor.batch_decode([token(4, one), token(5, two, logits_policy=GreedyArgmax())]))
    assert int(np.argmax(decoded[0].logits)) == 7
    assert decoded[1].logits.tolist() == [[8]]
    assert model.calls[2:] == ["decode", "decode"]
    assert fallbacks(executor) == (0, 2)
    assert [out.kv_cache.is_valid() for out in decoded] == [True, True]
    rows = batch(item("", [1], 3, kv_cache=decoded[0].kv_cache), item("", [2], 2, kv_cache=decoded[1].kv_cache))
    assert [int(np.argmax(answer)) for answer in run(executor.unified_decode(rows))] == [8, 10]
    assert fallbacks(executor) == (0, 4)  # the unified forward, and the decode batch in its place


def test_a_single_row_that_is_unsupported_is_an_error():
    model = NoMixedAdapters()
    executor = LlmExecutor(model)
    handle = run(executor.prefill(prompt([3], metadata=ADAPTER))).kv_cache
    with pytest.raises(UnsupportedError, match="no adapters in a batch"):
        run(executor.decode(token(1, handle)))
    assert handle.is_valid()
    assert fallbacks(executor) == (0, 0)


def test_a_decode_batch_that_is_unsupported_for_another_reason_is_an_error():
    model = SummingLLM()
    executor = LlmExecutor(model)
    one, two = (out.kv_cache for out in run(executor.batch_prefill([prompt([1]), prompt([2])])))
    model.failures["decode_batch"] = UnsupportedError("not this time")
    with pytest.raises(UnsupportedError, match="not this time"):
        run(executor.batch_decode([token(1, one), token(1, two)]))
    assert fallbacks(executor) == (0, 0)
    model.failures["unified_forward"] = UnsupportedError("not this time")
    run(executor.batch_prefill([prompt([1]), prompt([2])]))
    assert fallbacks(executor) == (1, 0)


def test_the_models_own_fallbacks_are_added():
    class Counting(SummingLLM):
        def cache_metrics_snapshot(self) -> dict[str, Any]:
            return {"decode_batch": {"schema_version": 1, "unsupported_fallback_calls": 5, "lora_fallback_calls": 7}}

    model = Counting()
    executor = LlmExecutor(model)
    model.failures["unified_forward"] = UnsupportedError("not this time")
    run(executor.batch_prefill([prompt([1])]))
    assert fallbacks(executor) == (6, 7)


class GreedyOnly(SummingLLM):
    """Its unified forward returns token ids alone."""

    def unified_forward_can_return_full_logits(self) -> bool:
        return False

    def unified_forward(self, items: Sequence[Any]) -> list[Any]:
        raise AssertionError("asked for logits that it cannot return")

    def unified_forward_with_logits_policy(self, items: Sequence[Any], policies: Sequence[Any]) -> list[Any]:
        rows = SummingLLM.unified_forward(self, items)
        return [None if row is None else int(np.argmax(row)) for row in rows]


@pytest.mark.parametrize(
    ("call", "calls", "counted"),
    [
        (lambda e: e.batch_prefill([prompt([1, 2])]), ["prefill"], 1),
        (lambda e: e.unified_decode(batch(item("a", [1, 2], 0), item("b", [3], 0, logits_policy=GreedyArgmax()))),
         ["prefill", "prefill"], 1),
        (lambda e: e.unified_decode(batch(item("a", [1, 2], 0, logits_policy=GreedyArgmax()),
                                          item("b", [3], 0, final=False))), ["unified_forward"], 0),
    ],
)  # fmt: skip
def test_a_unified_forward_without_logits_serves_greedy_rows_alone(
    call: Callable[[LlmExecutor], Any], calls: list[str], counted: int
):
    model = GreedyOnly()
    executor = LlmExecutor(model)
    answers = run(call(executor))
    first = getattr(answers[0], "logits", answers[0])
    assert (first if isinstance(first, int) else int(np.argmax(first))) == 3
    assert model.calls == calls
    assert fallbacks(executor) == (counted, 0)

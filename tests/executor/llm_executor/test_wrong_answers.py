"""A model that returns what the contract does not allow: a ModelError, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import GreedyArgmax
from ferrum_jax.contract.errors import ModelError
from tests.executor.asking import batch, item, prompt, run, token
from tests.fake import CountingLLM, SummingLLM

FULL = {"ferrum_require_full_logits": True}
CALLS: list[tuple[str, Callable[[LlmExecutor, Any], Any]]] = [
    ("prefill", lambda e, h: e.prefill(prompt([4], h))),
    ("forward_verify", lambda e, h: e.prefill(prompt([4, 5], h, metadata=FULL))),
    ("unified_forward", lambda e, h: e.batch_prefill([prompt([4]), prompt([5], h)])),
    ("unified_forward", lambda e, h: e.unified_decode(batch(item("a", [4], 0), item("", [5], 3, kv_cache=h)))),
    ("unified_forward", lambda e, h: e.unified_decode(
        batch(item("a", [4], 0, logits_policy=GreedyArgmax()), item("", [5], 3, kv_cache=h)))),
    ("decode_batch", lambda e, h: e.decode(token(4, h))),
    ("decode_batch", lambda e, h: e.decode(token(4, h, logits_policy=GreedyArgmax()))),
    ("forward_verify", lambda e, h: e.forward_verify([token(4, h), token(5, h)])),
    ("forward_verify", lambda e, h: e.speculative_decode(token(4, h), [5], 1.0)),
    ("forward_verify", lambda e, h: e.forward(np.array([[1, 2]]))),
]  # fmt: skip


def spoilt(answer: Any, value: float) -> Any:
    if isinstance(answer, list):
        return [spoilt(row, value) for row in answer]
    answer[..., 1] = value
    return answer


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("method", "call"), CALLS)
def test_logits_that_are_not_finite_are_an_error_and_are_undone(method: str, call: Any, value: float):
    model = SummingLLM()
    executor = LlmExecutor(model)
    handle = run(executor.prefill(prompt([1, 2, 3]))).kv_cache
    honest = getattr(model, method)
    setattr(model, method, lambda *arguments: spoilt(honest(*arguments), value))
    with pytest.raises(ModelError, match="SummingLLM returned logits that are not finite"):
        run(call(executor, handle))
    assert model.tokens == {"llm-cache-0": [1, 2, 3]}
    assert handle.is_valid()


@pytest.mark.parametrize(
    ("method", "answer", "match"),
    [
        ("prefill", None, "dtype object"),
        ("prefill", np.zeros(5, np.float32), r"shape \[5\], expected \[23\]"),
        ("unified_forward", [], "0 answers for 2 rows"),
        ("unified_forward", [None, None], "None for row 0, where is_final is True"),
        ("unified_forward", [3, 4], r"shape \[\]"),
        ("unified_forward_with_logits_policy", [np.zeros(23), 99], "token 99"),
        ("decode_batch", None, "a NoneType for 1 rows"),
        ("decode_batch", [np.zeros((1, 23))], r"shape \[1, 23\]"),
        ("decode_batch_with_logits_policy", [1.5], "token 1.5"),
        ("forward_verify", np.zeros((3, 23)), r"shape \[3, 23\], expected \[2, 23\]"),
        ("forward_verify_batch", [np.zeros((2, 23))], "1 answers for 2 rows"),
        ("capture", None, "capture returned None"),
    ],
)
def test_an_answer_of_the_wrong_form_is_an_error_and_is_undone(method: str, answer: Any, match: str):
    model = type("Wrong", (SummingLLM,), {})()
    executor = LlmExecutor(model)
    handle = run(executor.prefill(prompt([1, 2, 3]))).kv_cache
    setattr(type(model), method, lambda *_arguments, **_named: answer)
    greedy = {"logits_policy": GreedyArgmax()}
    calls = {
        "prefill": lambda: executor.prefill(prompt([4], handle)),
        "unified_forward": lambda: executor.batch_prefill([prompt([4]), prompt([5], handle)]),
        "unified_forward_with_logits_policy": lambda: executor.unified_decode(
            batch(item("a", [4], 0), item("", [5], 3, kv_cache=handle, **greedy))
        ),
        "decode_batch": lambda: executor.decode(token(4, handle)),
        "decode_batch_with_logits_policy": lambda: executor.decode(token(4, handle, **greedy)),
        "forward_verify": lambda: executor.forward_verify([token(4, handle), token(5, handle)]),
        "forward_verify_batch": lambda: executor.forward(np.array([[1, 2], [3, 4]])),
        "capture": lambda: executor.decode(token(4, handle, metadata={"ferrum_hidden_layers": [0]})),
    }
    with pytest.raises(ModelError, match=match):
        run(calls[method]())
    assert model.tokens == {"llm-cache-0": [1, 2, 3]}
    assert handle.is_valid()


@pytest.mark.parametrize(
    ("method", "value", "ask"),
    [
        ("kv_capacity", "64", lambda model: LlmExecutor(model)),
        ("model_info", "x", lambda model: LlmExecutor(model)),
        ("capabilities", 3, lambda model: LlmExecutor(model)),
        ("kv_len", -1, lambda model: run(LlmExecutor(model).prefill(prompt([1]))).kv_cache.block_table),
        ("reserve_kv_slots", 3, lambda model: LlmExecutor(model).reserve_kv_slots([])),
        ("kv_slot_capacity_snapshot", 3, lambda model: LlmExecutor(model).optimal_batch_size()),
        ("cache_metrics_snapshot", 3, lambda model: LlmExecutor(model).cache_metrics_snapshot()),
        ("lora_metrics_snapshot", 3, lambda model: LlmExecutor(model).lora_metrics_snapshot()),
    ],
)
def test_a_report_of_the_wrong_form_is_an_error(method: str, value: Any, ask: Callable[[CountingLLM], Any]):
    model = type("Wrong", (CountingLLM,), {method: lambda *_: value})()
    if method == "kv_len":  # of an id that is taken
        model.kv_len = lambda cache_id: value if cache_id in model.lengths else None
    with pytest.raises(ModelError, match=rf"Wrong\.{method} returned"):
        ask(model)


def test_memory_of_the_wrong_form_is_unknown():
    model = type("Wrong", (CountingLLM,), {"memory_usage": lambda _: "much"})()
    assert LlmExecutor(model).status().memory_usage.allocated_bytes == 0

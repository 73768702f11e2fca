"""An executor over a runner: what a refused call leaves as it was, adapters among it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import ExecutorState, GreedyArgmax, KvSlotRequest, ModelInfo, UnifiedBatch
from ferrum_jax.contract.errors import (
    CancelledError,
    DeviceError,
    ModelError,
    NotFoundError,
    RequestValidationError,
    ResourceExhaustedError,
)
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.asking import batch, item, prompt, run, token
from tests.executor.conftest import ENGINE, adapter_tensors, make_runner

TEXT = list(range(1, 21))


@pytest.fixture
def runner(runner: ModelRunner) -> ModelRunner:
    for name in list(runner._adapters.loaded):
        runner.unload_lora(name)
    return runner


def under(name: str, folders: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"ferrum_lora_adapter": name, "ferrum_lora_path": folders[name], **more}


@pytest.mark.parametrize("why", ["slots", "capacity"])
def test_a_refused_call_unloads_no_other_adapter(why: str, runner: ModelRunner, adapter_folders: dict[str, str]):
    executor = LlmExecutor(runner)
    for name in ("one", "three"):  # as many as fit
        first = run(executor.prefill(prompt(TEXT, metadata=under(name, adapter_folders))))
        executor.release_cache(first.kv_cache.cache_id)
    before = list(runner._adapters.loaded), runner.cache_metrics_snapshot()["entries"]
    assert before[0] == ["one", "three"]
    assert before[1]
    if why == "slots":
        for at in range(4):
            runner.prepare(f"x{at}", 1)
        with pytest.raises(ResourceExhaustedError):
            run(executor.prefill(prompt(TEXT, metadata=under("two", adapter_folders))))
    else:
        asked = under("two", adapter_folders, ferrum_kv_capacity_hint=1000)
        with pytest.raises(RequestValidationError):
            run(executor.prefill(prompt(TEXT, metadata=asked)))
    assert (list(runner._adapters.loaded), runner.cache_metrics_snapshot()["entries"]) == before


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_sequence_never_answers_as_an_adapter_of_a_refused_call(
    is_gone: bool, runner: ModelRunner, adapter_folders: dict[str, str], tmp_path: Path
):
    folders = adapter_folders | {"one": str(shutil.copytree(adapter_folders["one"], tmp_path / "one"))}
    executor = LlmExecutor(runner)
    first = run(executor.prefill(prompt(TEXT[:8], metadata=under("one", folders))))
    other = run(executor.prefill(prompt(TEXT[:8])))
    for out in (first, other):
        run(executor.truncate_kv(out.kv_cache, 0))
    empty = executor.handle(first.kv_cache.cache_id)
    if is_gone:
        shutil.rmtree(folders["one"])
    cohort = [
        prompt(TEXT[:8], empty, metadata=under("two", folders)),
        prompt(TEXT[:8], executor.handle(other.kv_cache.cache_id), metadata=under("three", folders)),
        prompt(TEXT[:8], metadata=under("x", {"x": str(tmp_path / "nowhere")})),
    ]
    with pytest.raises((NotFoundError, ResourceExhaustedError)):
        run(executor.batch_prefill(cohort))
    if is_gone:
        with pytest.raises(RequestValidationError, match="stale"):
            run(executor.prefill(prompt(TEXT[:8], empty)))
        assert runner.lora_metrics_snapshot()["active_cache_bindings"] == 0
    else:
        again = run(executor.prefill(prompt(TEXT[:8], empty)))
        np.testing.assert_array_equal(again.logits, first.logits)


def test_a_greedy_token_of_logits_that_are_not_finite_is_an_error_and_is_undone(runner: ModelRunner, params: ParamTree):
    executor = LlmExecutor(runner)
    first = run(executor.prefill(prompt(TEXT[:8]))).kv_cache
    length = runner.kv_len(first.cache_id)
    runner.set_params(jax.tree.map(lambda leaf: leaf * np.nan, params), keep_sequences=True)
    try:
        calls: list[Callable[[], Any]] = [
            lambda: executor.decode(token(4, first, logits_policy=GreedyArgmax())),
            lambda: executor.batch_decode([token(4, first, logits_policy=GreedyArgmax())]),
            lambda: executor.unified_decode(
                batch(item("", [4], 8, kv_cache=first, logits_policy=GreedyArgmax()), item("b", [1, 2], 0))
            ),
        ]
        for call in calls:
            with pytest.raises(ModelError, match="not finite"):
                run(call())
            assert first.is_valid()
            assert runner.kv_len(first.cache_id) == length
            assert runner.kv_len("b") is None
    finally:
        runner.set_params(params, keep_sequences=True)


@pytest.mark.parametrize("spelling", ["{}", "{}/", ""])
def test_a_failed_call_keeps_a_sequence_whose_adapter_it_named_by_another_path(
    spelling: str, runner: ModelRunner, adapter_folders: dict[str, str]
):
    executor = LlmExecutor(runner)
    first = run(executor.prefill(prompt(TEXT[:8], metadata=under("one", adapter_folders)))).kv_cache
    for at in range(3):
        runner.prefill(f"x{at}", [1 + at] * 40)
    again = {"ferrum_lora_adapter": "one", "ferrum_lora_path": spelling.format(adapter_folders["one"])}
    with pytest.raises(ResourceExhaustedError):
        run(executor.prefill(prompt([3] * 36, first, metadata=again)))
    assert first.is_valid()
    assert runner.kv_len(first.cache_id) == 8
    for at in range(3):
        runner.release(f"x{at}")
    run(executor.decode(token(4, first, metadata=under("one", adapter_folders))))


def test_an_adapter_set_from_arrays_is_asked_for_by_its_name(runner: ModelRunner, adapter_folders: dict[str, str]):
    executor = LlmExecutor(runner)
    wanted = run(executor.prefill(prompt(TEXT, metadata=under("one", adapter_folders)))).logits
    runner.set_lora("tuned", adapter_tensors("one"), scale=2.0)
    asked = {"ferrum_lora_adapter": "tuned", "ferrum_lora_path": ""}
    found = run(executor.prefill(prompt(TEXT, metadata=asked)))
    np.testing.assert_allclose(found.logits, wanted, rtol=0, atol=1e-4)
    run(executor.decode(token(4, found.kv_cache, metadata=asked)))
    with pytest.raises(NotFoundError, match="'nobody' is not loaded"):
        run(executor.prefill(prompt(TEXT, metadata=asked | {"ferrum_lora_adapter": "nobody"})))


def test_what_a_refused_call_bound_is_unbound_whatever_became_of_what_was_reserved(
    runner: ModelRunner, adapter_folders: dict[str, str]
):
    executor = LlmExecutor(runner)
    executor.reserve_kv_slots([KvSlotRequest(cache_id="mine", target_len=40)])
    runner.reset()
    for at, count in enumerate((40, 40, 40)):
        runner.prefill(f"x{at}", [1 + at] * count)
    free = runner.kv_slot_capacity_snapshot().free_blocks
    with pytest.raises(ResourceExhaustedError):
        run(executor.unified_decode(batch(item("mine", [7] * 32, 0, metadata=under("one", adapter_folders)))))
    assert runner.lora_metrics_snapshot()["active_cache_bindings"] == 0
    assert runner.kv_slot_capacity_snapshot().free_blocks == free
    assert runner.kv_len("mine") is None


def test_an_adapter_that_direct_calls_have_unbound_is_bound_again_or_refused(
    runner: ModelRunner, adapter_folders: dict[str, str]
):
    executor, asked = LlmExecutor(runner), under("one", adapter_folders)
    first = run(executor.prefill(prompt(TEXT[:8], metadata=asked)))
    run(executor.truncate_kv(first.kv_cache, 0))
    runner.set_lora_adapter_for_cache(first.kv_cache.cache_id, None)
    empty = first.kv_cache.with_sequence_length(0)
    again = run(executor.prefill(prompt(TEXT[:8], empty, metadata=asked)))
    np.testing.assert_array_equal(again.logits, first.logits)
    run(executor.unified_decode(batch(item("w", TEXT[:4], 0, metadata=asked))))
    runner.release("w")
    runner.prefill("w", TEXT[:2])  # without an adapter
    with pytest.raises(RequestValidationError, match="'w' holds 2 positions of no adapter"):
        run(executor.unified_decode(batch(item("w", TEXT[2:4], 2, metadata=asked))))


def test_every_call_says_that_the_device_has_failed_or_the_model_is_closed(
    params: ParamTree, monkeypatch: pytest.MonkeyPatch
):
    runner = make_runner(params, ENGINE)
    executor = LlmExecutor(runner)
    calls = (
        executor.kv_capacity,
        executor.supports_native_unified_decode,
        lambda: executor.supports_batch_size(1),
        lambda: executor.truncate_kv_for_cache_id("unknown", 0),
        lambda: run(executor.batch_decode([])),
        lambda: run(executor.batch_prefill([])),
        lambda: run(executor.unified_decode(UnifiedBatch([]))),
    )

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(runner._programs, "get", lambda _: fail)
        with pytest.raises(DeviceError, match="injected"):
            run(executor.prefill(prompt(TEXT)))
    for call in calls:
        with pytest.raises(DeviceError, match="only reset"):
            call()
    runner.reset()
    assert [call() for call in calls[:4]] == [44, True, True, None]
    assert [call() for call in calls[4:]] == [[], [], []]
    runner.close()
    for call in calls:
        with pytest.raises(CancelledError, match="closed"):
            call()


def test_a_reset_is_the_way_back_from_a_failed_device(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    executor = LlmExecutor(runner)
    handle = run(executor.prefill(prompt(TEXT[:8]))).kv_cache

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(runner._programs, "get", lambda _: fail)
        with pytest.raises(DeviceError, match="injected"):
            run(executor.prefill(prompt(TEXT)))
    assert executor.status().state is ExecutorState.Error
    run(executor.reset())
    assert executor.status().state is ExecutorState.Ready
    with pytest.raises(RequestValidationError, match="was released"):
        run(executor.prefill(prompt([1], handle)))
    assert run(executor.prefill(prompt(TEXT[:8]))).kv_cache.cache_id == "llm-cache-2"  # 1 was the failed call's


def test_information_that_is_none_is_refused(runner: ModelRunner):
    info: Any = "x"
    with pytest.raises(RequestValidationError, match="info is a str, expected a ModelInfo"):
        LlmExecutor(runner, info)
    assert isinstance(LlmExecutor(runner).info(), ModelInfo)

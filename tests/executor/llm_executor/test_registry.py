"""Executors by name."""

import threading
from typing import Any

import pytest

from ferrum_jax import LlmExecutor, LlmExecutorRegistry
from ferrum_jax.contract.errors import AlreadyExistsError, FerrumError, RequestValidationError
from tests.executor.asking import prompt, run
from tests.fake import CountingLLM


def test_executors_are_found_by_name():
    registry = LlmExecutorRegistry()
    first, second = LlmExecutor(CountingLLM()), LlmExecutor(CountingLLM())
    registry.register("b", first)
    registry.register("a", second)
    assert registry.list_names() == ["b", "a"]
    assert registry.get("a") is second
    run(first.prefill(prompt([1])))
    metrics = registry.get_metrics("b")
    assert metrics is not None
    assert metrics.prefill_operations == 1
    assert registry.remove("b") is first
    assert registry.list_names() == ["a"]
    assert run(first.prefill(prompt([1]))).kv_cache.is_valid()  # it runs on


def test_a_name_is_taken_once_and_an_unknown_one_is_none():
    registry = LlmExecutorRegistry()
    registry.register("a", LlmExecutor(CountingLLM()))
    with pytest.raises(AlreadyExistsError, match="'a' is registered already"):
        registry.register("a", LlmExecutor(CountingLLM()))
    wrong: Any = []
    for name in ("b", wrong):
        for call in (registry.get, registry.remove, registry.get_metrics):
            assert call(name) is None
    assert registry.list_names() == ["a"]


@pytest.mark.parametrize(("name", "executor"), [("", LlmExecutor(CountingLLM())), (3, None), ("a", CountingLLM())])
def test_only_executors_are_registered_and_only_under_names(name: Any, executor: Any):
    with pytest.raises(RequestValidationError):
        LlmExecutorRegistry().register(name, executor)


def test_threads_get_a_name_once():
    registry, taken = LlmExecutorRegistry(), []
    executor = LlmExecutor(CountingLLM())

    def work() -> None:
        for number in range(50):
            try:
                registry.register(str(number), executor)
            except FerrumError:
                taken.append(number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.list_names()) == 50
    assert len(taken) == 150

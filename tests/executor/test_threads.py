"""Calls from several threads are serialised, and a failure of the device is contained."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.compile.step import StepOutputs
from ferrum_jax.contract.errors import DeviceError, FerrumError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.answers import StepPart, read_part
from ferrum_jax.executor.chaining import chain
from ferrum_jax.executor.device import PINNED_BYTES, _to_host
from tests.executor.conftest import Oracle


def test_threads_do_not_disturb_each_other(runner: ModelRunner, oracle: Oracle):
    failures: list[Exception] = []

    def work(key: str, first: int) -> None:
        try:
            for round_ in range(6):
                tokens = [(first + round_ + i) % 37 for i in range(5)]
                logits = runner.prefill(key, tokens)
                for step in range(8):
                    np.testing.assert_allclose(logits, oracle(tokens)[-1], atol=1e-4)
                    tokens.append((first * step) % 37)
                    logits = runner.decode(key, tokens[-1], len(tokens) - 1)
                runner.release(key)
        except (AssertionError, FerrumError) as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(key, i)) for i, key in enumerate("abcd")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert runner.kv_slot_capacity_snapshot().free_blocks == 18


def test_the_capacity_is_told_while_another_call_runs(runner: ModelRunner):
    with runner._life.lock, ThreadPoolExecutor(1) as pool:
        assert pool.submit(runner.kv_capacity).result(timeout=30) == runner.plan.kv_capacity


class Poisoned:
    """Logits of a step that the device could not finish."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise jax.errors.JaxRuntimeError("INTERNAL: injected")


def fail_at_dispatch(params: object, kv: object, *_: object) -> object:
    for leaf in jax.tree.leaves(kv):
        leaf.delete()  # what donation does
    raise jax.errors.JaxRuntimeError("INTERNAL: injected")


def fail_when_fetched(params: object, kv: object, *_: object) -> object:
    logits = cast(jax.Array, Poisoned())
    return StepOutputs(logits=logits, rows=logits, captured={}), kv


def test_without_pinned_memory_arrays_are_fetched_by_themselves(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> object:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    large = jnp.arange(PINNED_BYTES)
    monkeypatch.setattr(jax, "device_put", fail)
    np.testing.assert_array_equal(_to_host(large, is_pinned=True), np.arange(PINNED_BYTES))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jax.device_put(large)


@pytest.mark.parametrize("fail", [fail_at_dispatch, fail_when_fetched])
def test_a_failed_step_is_an_error_state_until_reset(
    fail: Callable[..., object], runner: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    runner.prefill("a", [1, 2, 3])
    healthy = runner._programs._steps
    monkeypatch.setattr(runner._programs, "_steps", dict.fromkeys(healthy, fail))
    try:
        with pytest.raises(DeviceError, match="injected"):
            runner.decode("a", 4, 3)
        assert runner.state is ExecutorState.Error
        for call in (lambda: runner.decode("a", 4, 3), lambda: runner.release("a"), lambda: runner.kv_len("a")):
            with pytest.raises(DeviceError, match="reset"):
                call()
    finally:
        monkeypatch.undo()
        runner.reset()
    assert runner.state is ExecutorState.Ready
    assert runner.kv_len("a") is None
    np.testing.assert_allclose(runner.prefill("a", [1, 2, 3]), oracle([1, 2, 3])[-1], atol=1e-4)
    runner.release("a")


@pytest.mark.parametrize("call", [lambda one: one.decode("a", 4, 3), lambda one: one.prefill("a", [4, 5])])
def test_an_interrupt_while_an_answer_is_fetched_is_an_error_state(
    runner: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, call: Callable[[ModelRunner], Any]
):
    """The tokens are written by then, but nobody was told of them."""
    runner.prefill("a", [1, 2, 3])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner._device, "fetch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call(runner)
    monkeypatch.undo()
    assert runner.state is ExecutorState.Error
    runner.reset()
    np.testing.assert_allclose(runner.prefill("a", [1, 2, 3]), oracle([1, 2, 3])[-1], atol=1e-4)
    runner.release("a")


def test_a_call_of_many_steps_has_two_in_flight_and_never_more(
    runner: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    begun, seen = [0], []

    def count(*given: Any) -> StepPart:
        begun[0] += 1
        seen.append(begun[0])
        return chain(*given)

    def read(*given: Any) -> None:
        begun[0] -= 1
        read_part(*given)

    monkeypatch.setattr("ferrum_jax.executor.pipeline.chain", count)
    monkeypatch.setattr("ferrum_jax.executor.pipeline.read_part", read)
    tokens = [at % 30 + 1 for at in range(40)]
    np.testing.assert_allclose(runner.forward_verify("long", tokens), oracle(tokens), atol=1e-4)
    assert len(seen) == 5  # of 8 tokens each
    assert (max(seen), begun) == (2, [0])
    runner.release("long")

"""Live status and metrics."""

import asyncio
import threading
import time
from collections import deque

import numpy as np
import pytest

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import ExecutorMemoryUsage, ExecutorState
from ferrum_jax.contract.errors import DeviceError, RequestValidationError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.llm_executor.metrics import WINDOW, Meter, Tally
from tests.executor.asking import batch, item, prompt, run, token
from tests.fake import SummingLLM

MEMORY = ExecutorMemoryUsage(allocated_bytes=200, used_bytes=50, peak_bytes=60, utilization_percent=25.0)


def test_status_is_live():
    model = SummingLLM()
    executor = LlmExecutor(model)
    fresh = executor.status()
    assert (fresh.state, fresh.is_ready, fresh.current_batch_size) == (ExecutorState.Ready, True, 0)
    assert (fresh.prefill_operations, fresh.avg_prefill_time_ms, fresh.last_operation) == (0, 0.0, None)

    async def scenario() -> None:
        model.gate.clear()
        task = asyncio.create_task(executor.batch_prefill([prompt([1]), prompt([2]), prompt([3])]))
        while not model.entered.is_set():
            await asyncio.sleep(0.001)
        busy = executor.status()
        assert (busy.state, busy.is_ready, busy.current_batch_size) == (ExecutorState.Busy, True, 3)
        assert busy.prefill_operations == 0
        model.gate.set()
        handle = (await task)[0].kv_cache
        await executor.decode(token(4, handle))

    before = time.monotonic()
    run(scenario())
    after = executor.status()
    assert (after.state, after.current_batch_size) == (ExecutorState.Ready, 0)
    assert (after.prefill_operations, after.decode_operations) == (1, 1)
    assert after.avg_prefill_time_ms > 0
    assert after.avg_decode_time_ms > 0
    assert after.last_operation is not None
    assert before <= after.last_operation <= time.monotonic()


def test_a_warm_up_shows_as_initializing_and_as_the_last_operation():
    entered, gate = threading.Event(), threading.Event()

    def warm() -> None:
        entered.set()
        assert gate.wait(60)

    executor = LlmExecutor(SummingLLM(), warm=warm)

    async def scenario() -> None:
        task = asyncio.create_task(executor.warmup())
        while not entered.is_set():
            await asyncio.sleep(0.001)
        status = executor.status()
        assert (status.state, status.is_ready, status.last_operation) == (ExecutorState.Initializing, False, None)
        gate.set()
        await task

    run(scenario())
    after = executor.status()
    assert (after.state, after.is_ready) == (ExecutorState.Ready, True)
    assert after.last_operation is not None
    assert (after.prefill_operations, after.decode_operations) == (0, 0)


def test_a_failed_call_is_not_counted_and_ends_busy():
    model = SummingLLM()
    executor = LlmExecutor(model)
    model.failures["prefill"] = RequestValidationError("injected")
    with pytest.raises(RequestValidationError):
        run(executor.prefill(prompt([1])))
    status = executor.status()
    assert (status.state, status.prefill_operations, status.last_operation) == (ExecutorState.Ready, 0, None)


def test_the_models_state_shows(runner: ModelRunner):
    class Failed(SummingLLM):
        is_failed = False

        @property
        def state(self) -> ExecutorState:  # pyright: ignore[reportIncompatibleVariableOverride]
            return ExecutorState.Error if self.is_failed else ExecutorState.Ready

        def memory_usage(self) -> ExecutorMemoryUsage:
            if self.is_failed:
                raise DeviceError("injected")
            return MEMORY

    model = Failed()
    executor = LlmExecutor(model)
    assert executor.status().memory_usage == MEMORY
    assert executor.metrics().memory_efficiency == 0.25
    model.is_failed = True
    assert (executor.status().state, executor.status().is_ready) == (ExecutorState.Error, False)
    assert executor.status().memory_usage.allocated_bytes == 0
    assert LlmExecutor(runner).status().memory_usage == runner.memory_usage()


def test_metrics_count_calls_by_kind():
    executor = LlmExecutor(SummingLLM())
    handle = run(executor.prefill(prompt([1, 2, 3]))).kv_cache
    run(executor.forward(np.array([[1, 2]])))
    run(executor.unified_decode(batch(item("", [4], 3, kv_cache=handle), item("a", [1, 2], 0))))
    run(executor.unified_decode(batch(item("a", [3], 2))))
    handle = handle.with_sequence_length(4)
    run(executor.forward_verify([token(5, handle)]))
    run(executor.truncate_kv(handle, 1))
    run(executor.warmup())
    metrics = executor.metrics()
    assert (metrics.total_operations, metrics.prefill_operations, metrics.decode_operations) == (5, 3, 2)
    assert 0 < metrics.avg_decode_latency <= metrics.p95_decode_latency
    assert 0 < metrics.avg_prefill_latency <= metrics.p95_prefill_latency
    seconds = (3 * metrics.avg_prefill_latency + 2 * metrics.avg_decode_latency) / 1000
    assert metrics.throughput_tps == pytest.approx(10 / seconds)
    assert metrics.batch_utilization == 1.0
    assert metrics.memory_efficiency == 0.0


def test_batch_utilization_is_the_mean_share_of_the_largest_batch():
    meter = Meter(max_batch_size=4)
    for rows in (1, 3, 8):
        with meter.measured("decode", rows, rows):
            pass
    assert meter.metrics(MEMORY).batch_utilization == pytest.approx((1 / 4 + 3 / 4 + 1) / 3)


def test_the_percentile_is_of_the_latest_calls(monkeypatch: pytest.MonkeyPatch):
    for latencies, expected in (([], 0.0), ([7.0], 7.0), (range(100, 0, -1), 95.0), (range(1, 21), 19.0)):
        assert Tally(latest=deque(map(float, latencies))).p95_ms == expected
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter(max_batch_size=1)
    for milliseconds in [1000] * 500 + [1] * WINDOW:
        with meter.measured("decode", 1, 1):
            now[0] += milliseconds / 1000
    metrics = meter.metrics(MEMORY)
    assert metrics.p95_decode_latency == pytest.approx(1.0)
    assert metrics.avg_decode_latency == pytest.approx((500 * 1000 + WINDOW) / (500 + WINDOW))
    assert metrics.p95_prefill_latency == 0.0

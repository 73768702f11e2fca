"""Cancelled calls, many tasks, several threads, and a shutdown while calls run."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from ferrum_jax import LlmExecutor, errors
from ferrum_jax.contract import (
    Device,
    ExecutorState,
    FerrumError,
    KvCacheHandle,
    KvSlotRequest,
    KvSlotReservation,
)
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.llm_executor.sequences import TrackedSequence, TrackedSequences, UndoLog
from tests.executor.asking import batch, item, prompt, run, token
from tests.executor.conftest import Oracle
from tests.fake import CountingLLM, SummingLLM

Call = Callable[[LlmExecutor, KvCacheHandle], Coroutine[Any, Any, Any]]
CALLS: list[Call] = [
    lambda e, h: e.prefill(prompt([4])),
    lambda e, h: e.prefill(prompt([4], h)),
    lambda e, h: e.batch_prefill([prompt([4]), prompt([5], h)]),
    lambda e, h: e.decode(token(4, h)),
    lambda e, h: e.batch_decode([token(4, h)]),
    lambda e, h: e.unified_decode(batch(item("a", [4], 0, final=False), item("", [5], 3, kv_cache=h))),
    lambda e, h: e.forward_verify([token(4, h), token(5, h)]),
    lambda e, h: e.speculative_decode(token(4, h), [5, 6], 0.0),
    lambda e, h: e.forward(np.array([[1, 2]])),
]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def _begin(model: SummingLLM, call: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """Starts a call, which then waits on the device for the model's gate."""
    model.gate.clear()
    model.entered.clear()
    task = asyncio.create_task(call)
    await _until(model.entered.is_set)
    return task


class Reserving(SummingLLM):
    """Keeps how many positions are writable; a truncation takes those behind it away."""

    def __init__(self):
        super().__init__()
        self.writable: dict[str, int] = {}

    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        for one in requests:
            self.writable[one.cache_id] = max(self.writable.get(one.cache_id, 0), one.target_len)
        sizes = {"block_size": 1, "total_blocks": 9, "free_blocks_before": 1, "free_blocks_after": 1}
        return KvSlotReservation(**sizes, allocations=())

    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        if new_len < len(self.tokens.get(cache_id, [])):
            self.writable[cache_id] = new_len
        super().truncate_kv(cache_id, new_len)


@pytest.mark.parametrize("draft", [None, [1, 1, 1]])
def test_a_cancelled_call_leaves_what_was_reserved(draft: list[int] | None):
    model = Reserving()
    executor = LlmExecutor(model)

    async def scenario() -> None:
        handle = (await executor.prefill(prompt([1, 2]))).kv_cache
        executor.reserve_kv_slots([KvSlotRequest(cache_id=handle.cache_id, target_len=40)])
        asked = token(3, handle)
        task = await _begin(
            model, executor.decode(asked) if draft is None else executor.speculative_decode(asked, draft, 1.0)
        )
        task.cancel()
        await asyncio.sleep(0.01)
        model.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert model.tokens == {handle.cache_id: [1, 2]}
        assert model.writable == {handle.cache_id: 40}

    asyncio.run(scenario())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("times", [1, 3])
def test_a_call_cancelled_on_the_device_is_waited_for_and_undone(call: Call, times: int):
    model = SummingLLM()
    executor = LlmExecutor(model)

    async def scenario() -> None:
        handle = (await executor.prefill(prompt([1, 2, 3]))).kv_cache
        task = await _begin(model, call(executor, handle))
        assert executor.status().state is ExecutorState.Busy
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()  # the device still works on it
        model.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert model.tokens == {"llm-cache-0": [1, 2, 3]}
        assert executor.metrics().total_operations == 1  # those that ended well
        assert handle.is_valid()
        out = await executor.decode(token(4, handle))
        assert int(np.argmax(out.logits)) == 10

    run(scenario())


@pytest.mark.parametrize("call", CALLS)
def test_a_call_cancelled_when_it_is_done_but_not_yet_taken_is_undone(call: Call):
    model = SummingLLM()
    executor = LlmExecutor(model)

    async def scenario() -> None:
        handle = (await executor.prefill(prompt([1, 2, 3]))).kv_cache
        done = executor.metrics().total_operations + 1
        task = asyncio.create_task(call(executor, handle))
        await asyncio.sleep(0)
        while executor.metrics().total_operations < done:
            time.sleep(0.001)  # the loop stands still, so that the task cannot hear of it
        time.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert model.tokens == {"llm-cache-0": [1, 2, 3]}
        assert handle.is_valid()

    run(scenario())


def test_a_call_cancelled_in_the_queue_never_runs():
    model = SummingLLM()
    executor = LlmExecutor(model)

    async def scenario() -> None:
        handle = (await executor.prefill(prompt([1, 2, 3]))).kv_cache
        first = await _begin(model, executor.decode(token(4, handle)))
        second = asyncio.create_task(executor.prefill(prompt([7])))
        third = asyncio.create_task(executor.truncate_kv(handle, 1))
        await asyncio.sleep(0.01)
        second.cancel()
        third.cancel()
        for task in (second, third):
            with pytest.raises(asyncio.CancelledError):
                await task  # at once, though the device is busy
        model.gate.set()
        assert (await first).kv_cache.num_tokens == 4
        assert model.tokens == {"llm-cache-0": [1, 2, 3, 4]}
        assert model.calls == ["prefill", "decode_batch"]

    run(scenario())


def test_a_model_that_cannot_roll_back_loses_the_cancelled_sequence_alone():
    entered, gate = threading.Event(), threading.Event()
    gate.set()

    class Slow(CountingLLM):
        def prefill(self, cache_id: str, tokens: Any) -> Any:
            entered.set()
            assert gate.wait(60)
            return super().prefill(cache_id, tokens)

    model = Slow()
    executor = LlmExecutor(model)

    async def scenario() -> None:
        kept = (await executor.prefill(prompt([1]))).kv_cache
        lost = (await executor.prefill(prompt([2]))).kv_cache
        gate.clear()
        entered.clear()
        task = asyncio.create_task(executor.decode(token(3, lost)))
        await _until(entered.is_set)
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert model.lengths == {kept.cache_id: 1}
        assert kept.is_valid()
        assert not lost.is_valid()

    run(scenario())


def test_a_loop_that_closes_over_a_running_call_leaves_no_trace():
    model = SummingLLM()
    executor = LlmExecutor(model)
    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(_begin(model, executor.prefill(prompt([1]))))
    loop.set_exception_handler(lambda *_: None)  # the task is destroyed while it waits
    coroutine = task.get_coro()
    assert isinstance(coroutine, Coroutine)
    coroutine.close()
    loop.close()
    model.gate.set()
    assert run(executor.prefill(prompt([2]))).kv_cache.num_tokens == 1
    assert list(model.tokens.values()) == [[2]]


def test_a_shutdown_lets_the_running_call_finish_and_refuses_those_that_wait():
    model = SummingLLM()
    executor = LlmExecutor(model)

    async def scenario() -> None:
        running = await _begin(model, executor.prefill(prompt([1, 2])))
        waiting = asyncio.create_task(executor.prefill(prompt([3])))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(executor.shutdown())
        again = asyncio.create_task(executor.shutdown())
        await asyncio.sleep(0.01)
        assert not closing.done()
        with pytest.raises(errors.CancelledError, match="shut down"):
            await executor.prefill(prompt([4]))
        model.gate.set()
        assert (await running).logits.shape == (1, 1, 23)
        with pytest.raises(errors.CancelledError, match="shut down"):
            await waiting
        await closing
        await again
        assert model.tokens == {}

    run(scenario())


def test_a_shutdown_beside_a_cancelled_call_ends_both():
    model = SummingLLM()
    executor = LlmExecutor(model)

    async def scenario() -> None:
        running = await _begin(model, executor.prefill(prompt([1, 2])))
        closing = asyncio.create_task(executor.shutdown())
        await asyncio.sleep(0.01)
        running.cancel()
        closing.cancel()
        model.gate.set()
        for task in (running, closing):
            with pytest.raises(asyncio.CancelledError):
                await task
        await executor.shutdown()
        assert model.tokens == {}

    run(scenario())


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_cancelled_call_on_a_sequence_of_the_models_own_is_undone_during_a_shutdown(has_ended: bool):
    model = SummingLLM()
    executor = LlmExecutor(model)
    model.prefill("own", [1, 2, 3])

    async def scenario() -> None:
        model.entered.clear()
        call = executor.unified_decode(batch(item("own", [4, 5], 3)))
        if has_ended:
            running = asyncio.create_task(call)
            await asyncio.sleep(0)
            model.entered.wait()
            closing = asyncio.create_task(executor.shutdown())
            while executor.metrics().total_operations < 1:
                time.sleep(0.001)  # the loop stands still, so that neither can hear of it
        else:
            running = await _begin(model, call)
            closing = asyncio.create_task(executor.shutdown())
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.sleep(0)
        model.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        await closing
        assert model.tokens == {"own": [1, 2, 3]}

    run(scenario())


async def _live_at_random(executor: LlmExecutor, number: random.Random, best: Callable[[list[int], Any], None]) -> None:
    tokens = [number.randrange(23) for _ in range(number.randint(1, 5))]
    out = await executor.prefill(prompt(tokens))
    handle = out.kv_cache
    try:
        best(tokens, out.logits[0, 0])
        for _ in range(number.randint(0, 8)):
            new = [number.randrange(23), number.randrange(23)]
            match number.randrange(4):
                case 0:
                    step = (await executor.batch_decode([token(new[0], handle)]))[0]
                    tokens.append(new[0])
                    handle, logits = step.kv_cache, step.logits[0]
                case 1:
                    logits = (await executor.unified_decode(batch(item("", new, len(tokens), kv_cache=handle))))[0]
                    tokens += new
                    handle = handle.with_sequence_length(len(tokens))
                case 2:
                    run_ = await executor.speculative_decode(token(new[0], handle), [new[1]], 0.5)
                    tokens += [new[0], *run_.accepted_tokens]
                    handle, logits = run_.kv_cache, run_.next_logits[0]
                case _:
                    fork = handle.clone_handle()
                    try:
                        best([*tokens, new[0]], (await executor.decode(token(new[0], fork))).logits[0])
                    finally:
                        executor.release_cache(fork.cache_id)
                    continue
            best(tokens, logits)
    finally:
        executor.release_cache(handle.cache_id)


async def _storm(executor: LlmExecutor, seed: int, best: Callable[[list[int], Any], None], *, at_once: int) -> int:
    number = random.Random(seed)
    room = asyncio.Semaphore(at_once)

    async def one(own: random.Random) -> None:
        async with room:
            await _live_at_random(executor, own, best)

    tasks = [asyncio.create_task(one(random.Random(number.random()))) for _ in range(50)]
    for task in number.sample(tasks, 30):
        await asyncio.sleep(number.random() * 0.005)
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for problem in ended:
        if problem is not None and not isinstance(problem, asyncio.CancelledError):
            raise problem
    return sum(problem is None for problem in ended)


@pytest.mark.parametrize("seed", range(5))
def test_fifty_tasks_cancelled_at_random_leak_nothing_and_mix_nothing_up(seed: int):
    model = SummingLLM()
    executor = LlmExecutor(model)

    def check(tokens: list[int], logits: Any) -> None:
        assert int(np.argmax(logits)) == model.best(tokens)

    assert run(_storm(executor, seed, check, at_once=50)) >= 20
    assert model.tokens == {}
    assert executor.status().state is ExecutorState.Ready


def test_a_storm_over_the_real_model_gives_the_right_logits(runner: ModelRunner, oracle: Oracle):
    executor = LlmExecutor(runner)

    def check(tokens: list[int], logits: Any) -> None:
        np.testing.assert_allclose(logits, oracle(tokens)[-1], atol=1e-4)

    run(_storm(executor, 1, check, at_once=2))  # forks take the other two slots
    assert runner.kv_slot_capacity_snapshot().free_blocks == 18


def test_threads_with_loops_of_their_own_share_an_executor():
    model = SummingLLM()
    executor = LlmExecutor(model)
    failures: list[BaseException] = []

    def check(tokens: list[int], logits: Any) -> None:
        assert int(np.argmax(logits)) == model.best(tokens)

    def work(seed: int) -> None:
        try:
            run(_storm(executor, seed, check, at_once=50))
        except (AssertionError, FerrumError, TimeoutError) as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert model.tokens == {}
    assert executor.cache_metrics_snapshot()["executor_model_lock"]["total_wait_time_us"] > 0


def test_nobody_sees_what_a_cancelled_call_is_about_to_undo():
    model = SummingLLM()
    executor = LlmExecutor(model)
    first = run(executor.prefill(prompt([1, 2]))).kv_cache
    seen: list[int] = []

    async def scenario() -> None:
        running = await _begin(model, executor.prefill(prompt([3, 4, 5], first)))
        looker = threading.Thread(target=lambda: seen.append(executor.handle(first.cache_id).num_tokens))
        looker.start()
        running.cancel()
        await asyncio.sleep(0.01)
        model.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        looker.join()

    run(scenario())
    assert seen == [2]
    assert first.is_valid()


def test_a_sequence_that_has_changed_since_is_not_undone():
    model = SummingLLM()
    table = TrackedSequences(model, Device("cpu"), 0)
    log = UndoLog(table)
    kept, gone, replaced = log.begin(), log.begin(), log.begin()

    def append_token(sequence: TrackedSequence, token: int) -> None:
        model.prefill(sequence.cache_id, [token])
        table.advance(sequence, 1)

    for sequence in (kept, gone, replaced):
        append_token(sequence, 5)
    log.seal()
    append_token(kept, 6)
    table.truncate(replaced, 0)
    append_token(replaced, 7)  # as long as before
    log.undo()
    assert model.tokens == {kept.cache_id: [5, 6], replaced.cache_id: [7]}

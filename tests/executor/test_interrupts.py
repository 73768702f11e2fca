"""An interrupt anywhere in a call leaves the state Error, or a state before or after the whole call."""

import gc
import linecache
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import pytest

from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract import DecodeRun, KvSlotRequest
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.batch import SampledToken, ScheduledRow
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CFG, Oracle, poison

TEXT = [(5 * at + 3) % 37 for at in range(44)]
NEW = [1, 2, 4, 8, 16, 32]
GREEDY = SampledToken(SlotSettings())


def begin_and_read(runner: ModelRunner) -> None:
    first = runner.execute([ScheduledRow("a", np.array(NEW, np.int32), 29, GREEDY)])
    second = runner.execute([ScheduledRow("a", None, 29 + len(NEW), GREEDY)])
    second.result()
    first.result()


CALLS: dict[str, Callable[[ModelRunner], Any]] = {
    "truncate": lambda runner: runner.truncate_kv("a", 9),
    "release": lambda runner: runner.release("a"),
    "fork": lambda runner: runner.fork("a", "c"),
    "decode": lambda runner: runner.decode_batch([("a", 1, 29), ("b", 1, 12)]),
    "prefill": lambda runner: runner.prefill("c", TEXT[:20]),
    "decode_n": lambda runner: runner.decode_n([DecodeRun(cache_id="a", token=1, pos=29, max_tokens=4)]),
    "reserve": lambda runner: runner.reserve_kv_slots([KvSlotRequest(cache_id="b", target_len=30)]),
    "execute": begin_and_read,
    "reset": lambda runner: runner.reset(),
    "reset_prefix_cache": lambda runner: runner.reset_prefix_cache(),
    "set_params": lambda runner: runner.set_params(runner.params, keep_sequences=True),
}


@pytest.fixture(scope="module", params=["shared_runner", "reusing_runner"])
def running(request: pytest.FixtureRequest, params: ParamTree) -> Iterator[ModelRunner]:
    """One with a sliding-window cache, and one that reuses prefixes: runners of their own, with others' programs."""
    warm: ModelRunner = request.getfixturevalue(request.param)
    with ModelRunner(params, CFG, warm.plan, device=warm.device) as runner:
        runner._programs._steps.update(warm._programs._steps)
        yield runner


def interrupted_at(line: int, call: Callable[[], Any]) -> int:
    """Interrupts a call at so many lines of the package; returns how many lines were run.

    Lines that take the lock are left out: a tracer comes between a body and the exit of its lock, a signal cannot.
    """
    count = 0

    def each(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line" and "life.lock" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return each

    def enter(frame: FrameType, _: str, __: Any) -> Any:
        return each if "/ferrum_jax/" in frame.f_code.co_filename else None

    tracer = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        assert count == line
    finally:
        sys.settrace(tracer)
    return count


def is_free(runner: ModelRunner) -> bool:
    """True where another thread can take the lock."""

    def take() -> bool:
        with_lock = runner._life.lock.acquire(timeout=30)
        if with_lock:
            runner._life.lock.release()
        return with_lock

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(take).result()


def begin(runner: ModelRunner) -> None:
    runner.reset()
    poison(runner)
    runner.prefill("a", TEXT[:30])
    runner.prefill("b", TEXT[:12])
    runner.truncate_kv("a", 29)


def lengths(runner: ModelRunner) -> list[int | None]:
    return [runner.kv_len(key) for key in "abc"]


def goes_on_right(runner: ModelRunner, oracle: Oracle) -> None:
    """Fails unless every live sequence goes on as the cache-free forward of its tokens does."""
    for key in "abc":
        length, live = runner.kv_len(key), runner._pipeline.table.live.get(key)
        if length is not None:
            assert live is not None
            runner._pipeline.settle()
            held = live.tokens.tolist()
            np.testing.assert_allclose(runner.decode(key, 7, length), oracle([*held, 7])[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("points", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_error_or_what_is_right(running: ModelRunner, oracle: Oracle, name: str, points: int):
    """`points` lines of the call are each tried."""
    begin(running)
    CALLS[name](running)  # what it compiles late is not interrupted below
    begin(running)
    before = lengths(running)
    total = interrupted_at(0, lambda: CALLS[name](running))
    after = lengths(running)
    middle = [29 + len(NEW), *before[1:]] if name == "execute" else before  # it is two calls
    for line in sorted({1 + round(at) for at in np.linspace(0, total - 1, points)}):
        begin(running)
        interrupted_at(line, lambda: CALLS[name](running))
        assert is_free(running), line
        if running.state is ExecutorState.Ready:
            assert lengths(running) in (before, middle, after), line
            goes_on_right(running, oracle)
            for key in "abc":
                running.release(key)
            snapshot = running.kv_slot_capacity_snapshot()
            assert snapshot.free_blocks == snapshot.total_blocks, (line, "a block is lost")
        running.reset()
        assert running.state is ExecutorState.Ready
        assert lengths(running) == [None] * 3
        running.prefill("a", TEXT[:20])
        goes_on_right(running, oracle)


@pytest.mark.parametrize("at", ["planner.plan_steps", "step.blank", "KvTransaction.commit"])
def test_an_interrupt_changes_nothing_before_the_first_change_and_is_an_error_after_it(
    at: str, running: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    begin(running)
    before = lengths(running), running.kv_slot_capacity_snapshot()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"ferrum_jax.executor.pipeline.{at}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        running.unified_forward([("b", [4] * 20, 12, True), ("c", [5], 0, True)])
    monkeypatch.undo()
    if at == "planner.plan_steps":
        assert (lengths(running), running.kv_slot_capacity_snapshot()) == before
    else:
        assert running.state is ExecutorState.Error
        running.reset()
        running.prefill("a", TEXT[:29])
    goes_on_right(running, oracle)


def test_a_change_that_was_interrupted_before_it_began_loses_nothing_later(running: ModelRunner):
    entered = running._device.changing()
    entered.__enter__()  # and an interrupt before the body: nothing leaves it
    running.reset()
    del entered
    gc.collect()
    running.prefill("a", TEXT[:3])
    running.release("a")

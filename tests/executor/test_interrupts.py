"""An interrupt at any line of a call leaves a state that says Error, or one that is right."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import ENGINE, Oracle, make_runner, poison

TOKENS = [(5 * at + 3) % 37 for at in range(44)]
CALLS: dict[str, Callable[[ModelRunner], Any]] = {
    "truncate": lambda runner: runner.truncate_kv("a", 9),
    "release": lambda runner: runner.release("a"),
    "fork": lambda runner: runner.fork("a", "c"),
    "decode": lambda runner: runner.decode_batch([("a", 1, 29), ("b", 2, 12)]),
}


@pytest.fixture(scope="module", params=["rings", "prefixes"])
def running(request: pytest.FixtureRequest, params: ParamTree) -> Iterator[ModelRunner]:
    engine = replace(ENGINE, chunk_rows=(1,), chunk_tokens=(8,), decode_rows=(4,))
    rings = request.param == "rings"
    with make_runner(params, replace(engine, window_kv=rings, prefix_cache=not rings)) as runner:
        runner.warmup(progress=False)
        yield runner


def interrupted_at(line: int, call: Callable[[], Any]) -> bool:
    """Interrupts a call when it has come to so many lines of the package; says whether it came so far."""
    count = 0

    def each(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        if count == line and event == "line":
            raise KeyboardInterrupt
        return each

    def enter(frame: FrameType, _: str, __: Any) -> Any:
        return each if "/ferrum_jax/" in frame.f_code.co_filename else None

    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line_leaves_error_or_what_is_right(running: ModelRunner, oracle: Oracle, name: str):
    line, errors = 1, 0
    while True:
        running.reset()
        poison(running)
        running.prefill("a", TOKENS[:30])
        running.prefill("b", TOKENS[:12])
        running.truncate_kv("a", 29)
        if not interrupted_at(line, lambda: CALLS[name](running)):
            break
        line += 1
        if running.state is ExecutorState.Error:
            errors += 1
            continue
        for key, texts in {"a": [TOKENS[:29]], "b": [TOKENS[:12]], "c": [TOKENS[:29]]}.items():
            length = running.kv_len(key)
            if length is None:
                continue
            known = [
                [*text[:length], 7] for text in [*texts, [*TOKENS[:29], 1], [*TOKENS[:12], 2]] if len(text) >= length
            ]
            answer = running.decode(key, 7, length)
            assert any(np.abs(answer - oracle(text)[-1]).max() < 1e-4 for text in known), (line, key, length)
        for key in "abc":
            running.release(key)
        snapshot = running.kv_slot_capacity_snapshot()
        assert snapshot.free_blocks == snapshot.total_blocks, (line, "a block is lost")
    assert line > 20
    assert errors, "some lines are between what must be done together"

"""Whatever fails, whoever waits gets an error of their own, and the next request is served."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import LLM, AsyncLLM, SamplingParams
from ferrum_jax.contract.errors import (
    BackendError,
    CancelledError,
    FerrumError,
    InternalError,
    ModelError,
    UnsupportedError,
)
from ferrum_jax.executor.interventions import Interventions
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate import engine
from ferrum_jax.generate.drafts import Draft, DraftSource, DraftWant, PromptLookup
from ferrum_jax.generate.model_draft import ModelDraft
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.scheduler import Scheduler
from ferrum_jax.generate.speculation import Speculation
from ferrum_jax.models.hooks import Edit, Point
from ferrum_jax.models.specs import ParamTree
from tests.fake import CountingLLM, answer
from tests.generate.conftest import MakeRunner, is_empty
from tests.generate.drafting import RollingLLM, finish, request

PARAMS = SamplingParams(max_tokens=3)


def within(call: Callable[[], Any]) -> Any:
    """Returns what a call returns or raises, and fails where it does neither for a minute."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as problem:  # noqa: BLE001  it is what is asked for
            found.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert found, "the caller waits for ever"
    return found[0]


class KeepingLookup(PromptLookup):
    """Cannot forget a sequence."""

    def release(self, cache_id: str) -> None:
        raise KeyError(cache_id)


class KeepingLLM(RollingLLM):
    """Cannot release a sequence."""

    def release(self, cache_id: str) -> None:
        raise KeyError(cache_id)


def test_a_draft_that_cannot_forget_a_sequence_costs_nobody_an_answer(caplog: pytest.LogCaptureFixture):
    model = RollingLLM()
    for draft in (KeepingLookup(), ModelDraft(KeepingLLM())):
        llm = LLM.from_model(model, speculation=Speculation(draft=draft))
        (out,) = within(lambda llm=llm: llm.generate([[1, 2]], PARAMS))
        assert out.token_ids == answer(model, [1, 2], 3)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("release of KeepingLookup failed: KeyError('generate-")


@pytest.mark.parametrize("method", ["_leave", "_fail"])
def test_where_requests_cannot_even_be_ended_their_callers_get_an_error_and_the_next_is_served(
    method: str, monkeypatch: pytest.MonkeyPatch
):
    model = CountingLLM()
    llm = LLM.from_model(model)
    end = getattr(Scheduler, method)

    def broken(*arguments: Any) -> None:
        end(*arguments)
        raise KeyError("cannot be ended")

    def refuse(*_: Any) -> None:
        raise KeyError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, method, broken)
        patch.setattr(model, "prefill", refuse)
        assert isinstance(within(lambda: llm.generate([[1], [2, 3]], PARAMS)), InternalError)
    assert within(lambda: llm.generate([[1]], PARAMS))[0].token_ids == answer(model, [1], 3)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, method, broken)
        assert within(llm.close) is None
    assert isinstance(within(lambda: llm.generate([[1]], PARAMS)), CancelledError)


def test_who_cannot_be_ended_does_not_run_on(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise KeyError("cannot be ended")

    engine = Scheduler(CountingLLM(), max_rows=2, chunk_tokens=4)
    requests = [request(engine, [at], 9) for at in range(3)]
    for one in requests:
        engine.submit(one)
    engine.step()
    monkeypatch.setattr(Scheduler, "_leave", refuse)
    with pytest.raises(KeyError):
        engine.fail(ModelError("broken"))
    assert not engine.has_work
    assert all(isinstance(one.error, ModelError) for one in requests)


@pytest.mark.parametrize("kind", [KeyError, asyncio.CancelledError, SystemExit])
def test_a_caller_whose_notify_fails_harms_no_other(caplog: pytest.LogCaptureFixture, kind: type[BaseException]):
    model = CountingLLM()
    llm = LLM.from_model(model)

    def notify(one: Request) -> None:
        raise kind("of the caller")

    mine, others = llm.request([5], PARAMS), llm.request([1], PARAMS)
    mine.notify = notify
    llm.engine.submit(mine, others)
    for one, prompt in ((mine, [5]), (others, [1])):
        while not one.is_done:
            within(llm.engine.settle)
        assert one.output().token_ids == answer(model, prompt, 3)
    assert f"notify of request {mine.request_id!r} failed" in caplog.text


class UnspeakableError(Exception):
    """Of a library: cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_an_error_that_cannot_be_shown_ends_its_requests_and_not_the_engine(monkeypatch: pytest.MonkeyPatch):
    model = CountingLLM()
    llm = LLM.from_model(model)
    with monkeypatch.context() as patch:

        def fail() -> None:
            raise UnspeakableError

        patch.setattr(llm.engine.scheduler, "step", fail)
        problem = within(lambda: llm.generate([[1]], PARAMS))
    assert isinstance(problem, InternalError)
    assert within(lambda: llm.generate([[1]], PARAMS))[0].token_ids == answer(model, [1], 3)


class ShapedError(ModelError):
    """Says its text itself."""

    def __init__(self, count: int):
        super().__init__(f"{count} are broken")
        self.count = count


class CodedError(ModelError):
    """Cannot be copied: its arguments are no message."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


def fail_together(problem: FerrumError) -> list[FerrumError]:
    """Returns the errors of three requests that one error of the model ends."""
    model = CountingLLM()
    model.prefill = lambda cache_id, tokens: (_ for _ in ()).throw(problem)
    engine = Scheduler(model, max_rows=3, chunk_tokens=40)
    requests = [request(engine, [at], 5) for at in range(3)]
    finish(engine, requests)
    return [one.error for one in requests if one.error is not None]


@pytest.mark.parametrize("make", [lambda: ModelError("broken"), lambda: ShapedError(3)])
def test_each_caller_gets_an_error_of_its_own(make: Callable[[], FerrumError]):
    problem = make()
    problem.add_note("a note")
    found = fail_together(problem)
    assert len(set(map(id, found))) == 3
    for at, one in enumerate(found):
        one.add_note(f"of {at}")
        assert (type(one), str(one), one.__cause__) == (type(problem), str(problem), problem)
        assert one.__notes__ == ["a note", f"of {at}"]
    assert all(getattr(one, "count", 3) == 3 for one in found)
    assert problem.__notes__ == ["a note"]


def test_an_error_that_cannot_be_copied_is_shared():
    problem = CodedError("broken", 7)
    assert fail_together(problem) == [problem] * 3


def test_an_error_of_the_contract_keeps_its_cause():
    problem = ModelError("broken")
    problem.__cause__ = OSError("the disk")
    llm = LLM.from_model(CountingLLM())
    assert isinstance(within(lambda: llm.generate([[1]], PARAMS))[0].token_ids, list)

    def step() -> None:
        raise problem

    llm.engine.scheduler.step = step
    found = within(lambda: llm.generate([[1]], PARAMS))
    assert found is problem
    assert isinstance(found.__cause__, OSError)


def test_an_output_that_is_made_while_a_request_fails_is_that_of_before_or_raises():
    engine = Scheduler(CountingLLM(), max_rows=1, chunk_tokens=4)
    late, reads = ModelError("late"), []

    class Failing(Request):
        """Fails once its error was read."""

        @property
        def error(self) -> FerrumError | None:  # type: ignore[override]
            reads.append(None)
            return late if len(reads) > 1 else None

    one = request(engine, [1], 3)
    del one.error
    one.__class__ = Failing
    output = one.output()
    assert (output.error, output.finish_reason) == (None, None)
    with pytest.raises(ModelError, match="late"):
        one.output()


def test_a_closed_async_llm_says_so_and_knows_no_request_to_abort():
    inner = LLM.from_model(CountingLLM())

    async def main() -> None:
        llm = AsyncLLM(inner)
        await llm.close()
        with pytest.raises(CancelledError, match="this LLM is closed"):
            await anext(llm.generate([1], PARAMS))
        with pytest.raises(CancelledError, match="this LLM is closed"):
            await anext(llm.as_completed([[1]], PARAMS))
        await llm.abort("nobody's")

    asyncio.run(main())
    assert inner.generate([[1]], PARAMS)[0].finished


def test_after_a_fork_whatever_has_lost_a_thread_says_so(runner: ModelRunner):
    """A child has another pid, and the thread that its parent's objects name does not run."""
    llm, idle, own = LLM.from_model(CountingLLM()), LLM.from_model(CountingLLM()), LLM.from_model(runner)
    (expected,) = llm.generate([[1, 2]], PARAMS)  # its thread lingers
    for one in (llm, idle, own):
        one.engine.pid -= 1
    with pytest.raises(UnsupportedError, match="this LLM was made before the process forked"):
        raise within(lambda: llm.generate([[1, 2]], PARAMS))
    assert within(lambda: idle.generate([[1, 2]], PARAMS))[0].token_ids == expected.token_ids
    with pytest.raises(UnsupportedError, match="this LLM was made before the process forked"):
        raise within(lambda: own.generate([[1, 2]], PARAMS))
    engine._close_all()
    assert not llm.engine._is_closed
    runner._life._pid -= 1
    try:
        with pytest.raises(UnsupportedError, match="this runner was made before the process forked"):
            runner.prefill("a", [1])
    finally:
        runner._life._pid += 1


FORKED = """
import asyncio, os, threading, time, warnings
from ferrum_jax import LLM, AsyncLLM, LlmExecutor, SamplingParams, from_params
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.generate import chat
from tests import tiny

warnings.simplefilter("ignore")  # JAX and Python warn of forks
params, cfg = tiny.tiny_params(tiny.CONFIGS["llama3"]), tiny.model_config("llama3")
runner = from_params(params, cfg, max_seqs=2, kv_capacity=160)
llm, executor = LLM.from_model(runner), LlmExecutor(runner)
answers = []
running = threading.Thread(target=lambda: answers.extend(llm.generate([[1, 2]], SamplingParams(max_tokens=150))))
running.start()
while not llm.engine.scheduler._running:
    time.sleep(0.001)
drop, runner._device.drop = runner._device.drop, lambda: print("dropped", flush=True)
taken, over = threading.Event(), threading.Event()


async def generate():
    async with AsyncLLM(llm) as own:
        await anext(own.generate([1]))


def hold():
    with runner._life.lock, llm.engine._lock, llm._intake.forms._lock, chat._RENDERER._lock, executor._table.lock:
        taken.set()
        over.wait()


holder = threading.Thread(target=hold)
holder.start()
taken.wait()
if (child := os.fork()) == 0:
    for call in (
        lambda: runner.prefill("a", [1]), runner.reset, lambda: runner.params, runner.allocate_kv,
        lambda: runner.set_params(lambda old: old), lambda: llm.generate([[1]]),
        lambda: executor.release_cache("a"), lambda: asyncio.run(generate()),
    ):
        try:
            call()
        except UnsupportedError as problem:
            print(problem, flush=True)
    print(chat.render_chat("{{ messages[0].content }}", [{"role": "user", "content": "child"}]), flush=True)
    print("free" if llm._intake.forms._lock.acquire(timeout=10) else "held", flush=True)
    llm.close()
    runner.close()
    os._exit(0)
os.waitpid(child, 0)
over.set()
holder.join()
running.join()
runner._device.drop = drop
print(len(answers[0].token_ids) > 0, flush=True)
llm.close()
"""


def test_a_fork_while_other_threads_hold_the_locks_leaves_a_child_that_does_not_wait_for_them():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        *5 * ["this runner was made before the process forked: make one in the child"],
        "this LLM was made before the process forked: make one in the child",
        "this executor was made before the process forked: make one in the child",
        "this LLM was made before the process forked: make one in the child",
        "child",
        "free",
        "True",
    ]


@pytest.mark.parametrize("changes", [{}, {"multi_step_tokens": 3}])
@pytest.mark.parametrize("speculation", [None, Speculation(num_tokens=2)])
def test_a_request_that_needs_a_step_that_is_not_compiled_fails_alone(
    new_runner: MakeRunner, changes: dict[str, Any], speculation: Speculation | None
):
    """As in strict mode after a warm-up."""
    plain = SamplingParams(max_tokens=12, ignore_eos=True)
    with new_runner(**changes) as runner:
        llm = LLM.from_model(runner, speculation=speculation)
        wanted = llm.generate([[1, 2], [3, 4]], plain)
        check, programs = runner._programs._check_declared, runner._programs

        def declared(key: Any) -> None:
            check(key)
            if getattr(key, "capture", ()) or type(key).__name__ in ("MultiStepKey", "VerifyKey"):
                raise BackendError(f"step {key} was not compiled by warmup")

        programs._check_declared = declared
        programs._steps = {key: step for key, step in programs._steps.items() if not getattr(key, "capture", ())}
        asker = llm.request([5, 6], plain, capture=[("resid_post", 0)])
        others = [llm.request(prompt, plain) for prompt in ([1, 2], [3, 4])]
        llm.engine.submit(others[0], asker, others[1])
        while not all(one.is_settled for one in (*others, asker)):
            time.sleep(0.01)
        assert isinstance(asker.error, BackendError)
        assert [one.output().token_ids for one in others] == [one.token_ids for one in wanted]
        llm.engine.settle()
        assert is_empty(runner)


@pytest.mark.parametrize("changes", [{}, {"multi_step_tokens": 4, "decode_rows": (8,)}])
@pytest.mark.parametrize("speculation", [None, Speculation(num_tokens=2)])
def test_a_token_of_logits_that_are_not_finite_is_an_error(
    new_runner: MakeRunner, params: ParamTree, changes: dict[str, Any], speculation: Speculation | None
):
    asked = [
        replace(PARAMS, temperature=0.7),
        PARAMS,
        replace(PARAMS, logprobs=True),
        replace(PARAMS, logit_bias={3: 1}),
        replace(PARAMS, temperature=0.7, n=2, prompt_logprobs=True),
    ]
    with new_runner(**changes) as runner:
        llm = LLM.from_model(runner, speculation=speculation)
        llm.set_params(jax.tree.map(lambda x: x * jnp.nan, params))
        outs = llm.generate([[1, 2]] * len(asked), asked, return_errors=True)
        assert len(outs) == len(asked) + 1
        for out in outs:
            assert isinstance(out.error, ModelError)
            assert "logits are not finite" in str(out.error)
            assert out.token_ids == []
        with pytest.raises(ModelError, match="logits are not finite"):
            llm.score([[1, 2]], [[3]])
        llm.set_params(params)
        edits = [None, Interventions({Point("resid_post", 0): Edit(add=np.array(np.inf, np.float32))})]
        good, bad = llm.generate([[1, 2]] * 2, PARAMS, interventions=edits, return_errors=True)
        assert (good.error, len(good.token_ids)) == (None, 3)
        assert isinstance(bad.error, ModelError)
        assert is_empty(runner)


@pytest.mark.parametrize("changes", [{"attention": "xla"}, {}, {"multi_step_tokens": 3, "attention": "xla"}])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_one_logit_that_is_not_finite_is_enough_alone_and_beside_others(
    new_runner: MakeRunner, params: ParamTree, changes: dict[str, Any], wrong: float
):
    table = params["model"]["embed_tokens"]["weight"]  # also the head
    spoilt = params | {"model": params["model"] | {"embed_tokens": {"weight": table.at[20].set(wrong)}}}
    ways = [
        PARAMS,
        replace(PARAMS, temperature=1.0),
        replace(PARAMS, temperature=1.0, top_k=5),
        replace(PARAMS, allowed_token_ids=[1, 2, 3]),
        replace(PARAMS, logit_bias={20: -np.inf}),
    ]
    with new_runner(spoilt, **changes) as runner:
        llm = LLM.from_model(runner)
        for way in ways:
            for asked in ([way], [way, replace(PARAMS, logprobs=True)]):
                for out in llm.generate([[1, 2]] * len(asked), asked, return_errors=True):
                    assert isinstance(out.error, ModelError), way


def test_a_draft_whose_numbers_are_not_finite_costs_nobody_an_answer(new_runner: MakeRunner):
    """A drafted token behind the answer's end spoils those before it in its forward: zero times NaN is NaN."""

    class Right(DraftSource):
        num_tokens = 2

        def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
            return [Draft([*right, 0, 0][len(want.tokens) - 2 :][: want.count]) for want in wants]

    nan = {Point("resid_post", 0): Edit(add=np.array(np.nan, np.float32))}
    with new_runner() as runner:
        for one in (PARAMS, replace(PARAMS, frequency_penalty=0.5), replace(PARAMS, temperature=1.0, seed=3)):
            right = LLM.from_model(runner).generate([[3, 4]], replace(one, max_tokens=7))[0].token_ids
            for last in range(1, 6):
                asked = replace(one, max_tokens=9, stop_token_ids=[right[last]])
                changes = Interventions(nan, start=2 + last + 1)
                (expected,) = LLM.from_model(runner).generate([[3, 4]], asked, interventions=changes)
                llm = LLM.from_model(runner, speculation=Speculation(draft=Right()))
                (out,) = llm.generate([[3, 4]], asked, interventions=changes)
                assert out.token_ids == expected.token_ids
                assert is_empty(runner)

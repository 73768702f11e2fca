"""`LLM`: over a hand-computable model, over a tiny runner, and once over the real one."""

import asyncio
import contextlib
import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import LLM, AsyncLLM, EngineConfig, SamplingParams
from ferrum_jax.contract.errors import (
    CancelledError,
    ConfigError,
    DeviceError,
    FerrumError,
    InternalError,
    ModelError,
    RequestValidationError,
    UnsupportedError,
)
from ferrum_jax.contract.llm import Logits
from ferrum_jax.executor import ModelRunner
from ferrum_jax.generate.speculation import Speculation
from tests.fake import CountingLLM, SummingLLM, answer
from tests.generate.conftest import MakeRunner, is_empty
from tests.generate.drafting import RollingLLM
from tests.generate.test_request import letters, spell

PROMPTS = [[1], [5, 6, 7], [2] * 17, [22, 0, 3, 4], [9, 9], [11] * 8]


def counting(max_rows: int = 8, *, eos: tuple[int, ...] = (), **sizes: int) -> tuple[LLM, CountingLLM]:
    model = CountingLLM(**sizes)
    return LLM.from_model(model, letters(eos=eos), max_rows=max_rows, chunk_tokens=6), model


def text_of(ids: Sequence[int]) -> str:
    return letters().decode(ids)


@pytest.mark.parametrize(("max_rows", "max_seqs"), [(8, 1000), (2, 1000), (1, 1000), (8, 2), (8, 1)])
def test_the_minimal_model_answers_prompts_of_any_length(max_rows: int, max_seqs: int):
    llm, model = counting(max_rows, max_seqs=max_seqs)
    outs = llm.generate(PROMPTS, SamplingParams(max_tokens=9))
    for out, prompt in zip(outs, PROMPTS, strict=True):
        assert out.prompt_token_ids == prompt
        assert out.token_ids == answer(model, prompt, 9)
        assert out.text == text_of(out.token_ids)
        assert out.finish_reason == "length"
        assert out.logprobs is None
        assert out.time_to_first_token > 0
    assert model.lengths == {}


def test_each_prompt_may_have_its_own_params():
    llm, model = counting()
    params = [SamplingParams(max_tokens=n, logprobs=n == 2) for n in (1, 2, 3)]
    outs = llm.generate(PROMPTS[:3], params)
    assert [out.token_ids for out in outs] == [answer(model, p, n) for p, n in zip(PROMPTS, (1, 2, 3), strict=False)]
    assert [out.logprobs is None for out in outs] == [True, False, True]


def test_a_prompt_may_be_text_or_ids_alone_or_several():
    llm, model = counting()
    greedy = SamplingParams(max_tokens=4)
    expected = answer(model, spell("cab"), 4)
    ids = spell("cab")
    forms: list[Any] = ["cab", ids, np.array(ids), tuple(ids), ["cab"], [ids], (one for one in ["cab"])]
    forms += [jnp.array(ids), jnp.array([ids]), [jnp.array(ids)], [np.array(ids)], [jnp.int32(one) for one in ids]]
    for form in forms:
        (out,) = llm.generate(form, greedy)
        assert out.token_ids == expected
        assert all(type(token) is int for token in (*out.token_ids, *out.prompt_token_ids))
    assert [out.token_ids for out in llm.generate(["cab", spell("cab")], greedy, progress=True)] == [expected] * 2
    assert llm.generate([], greedy) == []


def test_prompts_may_have_priorities():
    llm, _ = counting(1)
    how = SamplingParams(max_tokens=2)
    order = [at for at, _ in llm.as_completed(PROMPTS[:4], how, priority=[2, 1, 1, -1])]
    assert order == [3, 1, 2, 0]
    every: list[Any] = [7, np.int64(7), range(3), (0, 1, 2), np.arange(3), [np.int8(0), 1, 2]]
    for given in every:
        assert [at for at, _ in llm.as_completed(PROMPTS[:3], how, priority=given)] == [0, 1, 2]
    assert llm.generate(PROMPTS[0], how, priority=3)[0].finished
    assert list(llm.stream(PROMPTS[0], how, priority=3))


@pytest.mark.parametrize("wrong", [[1], [1, 2, 3], "high", "", b"", 0.5, 0.0, True, False, {}, [None, 1]])
def test_what_is_no_priority_of_each_prompt_is_refused(wrong: Any):
    llm, _ = counting()
    with pytest.raises(RequestValidationError, match=r"priorit(y|ies)"):
        llm.generate(PROMPTS[:2], priority=wrong)


def test_a_stop_id_ends_the_answer():
    for params, eos in ((SamplingParams(stop_token_ids=(7,)), ()), (SamplingParams(), (7,))):
        llm, model = counting(eos=eos)
        out = llm.generate([[1]], params)[0]
        expected = answer(model, [1], 60)
        assert out.token_ids == expected[: expected.index(7) + 1]
        assert (out.finish_reason, out.stop_reason) == ("stop", None if eos else 7)
    past = counting(eos=(7,))[0].generate([[1]], SamplingParams(ignore_eos=True, max_tokens=20))[0]
    assert past.token_ids == expected[:20]
    assert (past.finish_reason, past.stop_reason) == ("length", None)


def test_a_stop_text_that_a_stop_id_completes_is_the_reason():
    llm, model = counting()
    first = answer(model, [1], 3)[-1]
    out = llm.generate(
        [[1]], SamplingParams(stop_token_ids=[first], stop=(text_of([first]),), include_stop_str_in_output=True)
    )[0]
    assert out.token_ids[-1] == first
    assert (out.finish_reason, out.stop_reason) == ("stop", text_of([first]))


def test_a_stop_text_ends_the_answer_before_itself():
    llm, model = counting()
    whole = text_of(answer(model, [1], 20))
    out = llm.generate([[1]], SamplingParams(stop=(whole[9:12], "never there")))[0]
    assert out.text == whole.partition(whole[9:12])[0]
    assert (out.finish_reason, out.stop_reason) == ("stop", whole[9:12])


@pytest.mark.parametrize("count", [1, 5, 12])
def test_the_capacity_ends_the_answer(count: int):
    llm, model = counting(capacity=12)
    fed: list[int] = []
    prefill = model.prefill

    def watched(cache_id: str, tokens: Sequence[int]) -> Logits:
        fed.append(model.lengths.get(cache_id, 0) + len(tokens))
        return prefill(cache_id, tokens)

    model.prefill = watched
    out = llm.generate([[3] * count], SamplingParams(max_tokens=None))[0]
    assert out.finish_reason == "length"
    assert out.token_ids == answer(model, [3] * count, 12 - count + 1)  # the last is never read
    assert max(fed) == 12


REFUSED: dict[str, tuple[Any, type[FerrumError], str]] = {
    "an empty prompt": ([[1], []], RequestValidationError, "at least one token"),
    "an empty text": ([[1], ""], RequestValidationError, "at least one token"),
    "a prompt past the capacity": ([[1], [2] * 65], RequestValidationError, "65 tokens, the KV capacity is 64"),
    "an id past the vocabulary": ([[1], [2, 23]], RequestValidationError, "position 1 is 23, expected an id from 0"),
    "a negative id": ([[1], [-1]], RequestValidationError, "position 0 is -1"),
    "a float": ([[1], [2, 1.5]], RequestValidationError, "position 1 is 1.5"),
    "a digit": ([[1], ["5"]], RequestValidationError, "position 0 is '5'"),
    "a bool": ([[1], [True]], RequestValidationError, "position 0 is True"),
    "ids mixed with texts": ([1, "cab"], RequestValidationError, "mix"),
    "bytes": (b"cab", RequestValidationError, "prompts is of bytes"),
    "bytes in a list": ([[1], b"cab"], RequestValidationError, "the prompt is of bytes"),
    "nothing in a list": ([None], RequestValidationError, "the prompt is None"),
    "numbers that are no ids": (np.array([1.0, 2.0]), RequestValidationError, "the prompt is 1.0"),
    "no prompt at all": (7, RequestValidationError, "prompts is 7"),
    "a mapping": ({"cab": 1}, RequestValidationError, "a prompt has the keys"),
    "a set of ids": ([{1, 2}], RequestValidationError, "the prompt is {1, 2}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_prompt_is_refused_with_nothing_started(name: str):
    prompts, kind, says = REFUSED[name]
    llm, model = counting()
    with pytest.raises(kind, match=says):
        llm.generate(prompts, SamplingParams(max_tokens=3))
    assert model.lengths == {}
    assert not llm.engine.scheduler.has_work
    assert llm.generate([[1]], SamplingParams(max_tokens=3))[0].token_ids == answer(model, [1], 3)


def test_another_number_of_params_is_refused():
    with pytest.raises(RequestValidationError, match="2 prompts need as many SamplingParams, 1 were given"):
        counting()[0].generate([[1], [2]], [SamplingParams()])


class Unreadable:
    """An array of a library that does not give it away, as one of torch that needs gradients."""

    ndim = 1

    def __array__(self, *_: object) -> NoReturn:
        raise RuntimeError("ask for it otherwise")


def test_an_array_that_cannot_be_read_is_no_prompt():
    llm, _ = counting()
    gone = jnp.array([1, 2])
    gone.delete()
    others = Unreadable()
    forms: list[Any] = [gone, [gone], others, [others]]
    for prompts in forms:
        with pytest.raises(RequestValidationError, match="cannot be read"):
            llm.generate(prompts)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [None], 3, "greedy"])
def test_params_that_are_none_are_refused(params: Any):
    llm, _ = counting()
    with pytest.raises(RequestValidationError, match="SamplingParams"):
        llm.generate([[1]], params)
    with pytest.raises(RequestValidationError, match="expected SamplingParams"):
        llm.stream([1], params)


def test_what_goes_wrong_while_prompts_are_made_is_the_callers_to_see():
    def read() -> Iterator[str]:
        yield "cab"
        raise RuntimeError("the file is gone")

    prompts: Any = read()
    with pytest.raises(RuntimeError, match="the file is gone"):
        counting()[0].generate(prompts)


def test_without_a_tokenizer_there_are_ids_and_no_text():
    llm = LLM.from_model(CountingLLM())
    out = llm.generate([1, 2], SamplingParams(max_tokens=3))[0]
    assert out.token_ids == answer(CountingLLM(), [1, 2], 3)
    assert out.text == ""
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("text"),
        lambda: llm.generate([1], SamplingParams(stop="x")),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.runner,
    ]
    for call in calls:
        with pytest.raises(UnsupportedError):
            call()


def test_a_model_without_a_chat_template_cannot_chat():
    with pytest.raises(UnsupportedError, match="no chat template"):
        counting()[0].chat([{"role": "user", "content": "cab"}])


def test_a_stream_gives_the_same_text_piece_by_piece():
    llm, model = counting()
    params = SamplingParams(max_tokens=9)
    stream = llm.stream("cab", params)
    assert model.lengths == {}  # nothing is started yet
    with pytest.raises(RequestValidationError, match="not finished"):
        stream.output()
    pieces = [next(stream)]
    pieces += stream
    again = llm.generate("cab", params)[0]
    assert replace(stream.output(), time_to_first_token=again.time_to_first_token, request_id=again.request_id) == again
    assert "".join(pieces) == stream.output().text
    assert model.lengths == {}


def test_the_parameters_of_a_stream_have_both_names():
    llm, model = counting()
    params = SamplingParams(max_tokens=5)
    assert "".join(llm.stream([1], sampling_params=params)) == text_of(answer(model, [1], 5))
    with pytest.raises(RequestValidationError, match="give one of them"):
        llm.stream([1], params, sampling_params=params)


@pytest.mark.parametrize("how", ["closed", "dropped", "collected"])
def test_an_abandoned_stream_frees_what_it_holds(how: str):
    llm, model = counting()
    stream = llm.stream("cab")
    next(stream)
    if how == "closed":
        stream.close()
        assert list(stream) == []
    elif how == "dropped":
        del stream
    else:
        del stream
        lose_a_stream(llm)
        gc.collect()
    llm.engine.settle()
    assert model.lengths == {}
    assert llm.generate([[1]], SamplingParams(max_tokens=3))[0].token_ids == answer(model, [1], 3)


def lose_a_stream(llm: LLM) -> None:
    """Leaves a stream that has begun to the garbage collector."""
    stream = llm.stream([2, 0, 1])
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)


def test_a_stream_that_is_collected_in_the_middle_of_a_step_is_freed_after_it():
    llm, model = counting()
    prefill, collected = model.prefill, []

    def collecting(cache_id: str, tokens: Sequence[int]) -> Logits:
        collected.append(gc.collect())
        return prefill(cache_id, tokens)

    model.prefill = collecting
    gc.disable()
    try:
        lose_a_stream(llm)
        collected.clear()
        outs: list[Any] = []
        ask_in_a_thread(llm, outs)
    finally:
        gc.enable()
    assert collected
    assert outs, "the step waits for itself"
    assert outs[0].token_ids == answer(model, [1], 3)
    llm.engine.settle()
    assert model.lengths == {}


def ask_in_a_thread(llm: LLM, outs: list[Any]) -> None:
    """Asks for three tokens after [1] and waits a minute at most."""
    worker = threading.Thread(
        target=lambda: outs.extend(llm.generate([[1]], SamplingParams(max_tokens=3))), daemon=True
    )
    worker.start()
    worker.join(timeout=60)


@pytest.mark.slow
def test_a_stream_that_was_collected_is_in_nobodys_way(runner: ModelRunner):
    llm = LLM.from_model(runner, letters(), max_rows=5, chunk_tokens=16)
    lose_a_stream(llm)
    gc.collect()
    llm.runner.set_params(runner.params)  # refused while a sequence is live
    assert not runner._pipeline.table.live


# An interrupt that meets a finalizer, or JAX's callback of garbage collection, is reported and goes no further.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_time_leave_nothing_behind_and_concern_nobody_else():
    llm, model = counting(max_rows=2)
    params = SamplingParams(temperature=1.0, max_tokens=3, n=2)
    llm.generate(PROMPTS[:2], params)
    draw = random.Random(0)

    def work() -> None:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 3e-3))
        for _ in range(1000):  # where a finalizer runs, Python reports an interrupt and goes on
            llm.generate(PROMPTS[:2], params)

    stop, problems, finished = threading.Event(), [], []

    def beside() -> None:
        while not stop.is_set():
            try:
                finished.append(llm.generate([[1]], SamplingParams(max_tokens=3))[0].token_ids)
            except FerrumError as problem:
                problems.append(problem)

    other = threading.Thread(target=beside, daemon=True)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    other.start()
    try:
        num_interrupts = 0
        for _ in range(50):
            try:
                work()
            except KeyboardInterrupt:
                num_interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stop.set()
    other.join(timeout=60)
    assert not other.is_alive()
    assert num_interrupts > 40
    assert problems == []
    assert finished
    assert all(tokens == answer(model, [1], 3) for tokens in finished)
    llm.engine.settle()
    assert model.lengths == {}


class Slow(CountingLLM):
    """Takes its time to release a sequence of three tokens of prompt."""

    def __init__(self):
        super().__init__()
        self.releasing, self.slow = threading.Event(), ""

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        if len(tokens) == 3:
            self.slow = cache_id
        return super().prefill(cache_id, tokens)

    def release(self, cache_id: str) -> None:
        if cache_id == self.slow:
            self.releasing.set()
            time.sleep(0.1)
        super().release(cache_id)


@pytest.mark.parametrize("how", ["generate", "stream", "async"])
def test_whoever_has_an_answer_finds_its_sequence_released(how: str, monkeypatch: pytest.MonkeyPatch):
    model = Slow()
    llm = LLM.from_model(model, letters(), max_rows=8)
    params = SamplingParams(max_tokens=4)

    def late(groups: Iterable[Any]) -> Iterator[Any]:
        """Looks at the second group when its release has begun."""
        for group in groups:
            yield group
            assert model.releasing.wait(timeout=60)

    async def main() -> None:
        async for out in AsyncLLM(llm).generate([1, 2, 3], params):
            assert out.finished or model.releasing.wait(timeout=60)

    if how == "generate":
        monkeypatch.setattr(
            "ferrum_jax.generate.llm.track", lambda _: lambda groups: contextlib.nullcontext(late(groups))
        )
        llm.generate([[1], [1, 2, 3]], params, progress=True)
    elif how == "stream":
        for _ in llm.stream([1, 2, 3], params):
            assert model.releasing.wait(timeout=60)
    else:
        asyncio.run(main())
    assert model.lengths == {}


def test_a_model_cannot_call_the_llm_that_runs_it():
    llm, model = counting()
    prefill, refused = model.prefill, []

    def asking(cache_id: str, tokens: Sequence[int]) -> Logits:
        model.prefill = prefill
        for call in (lambda: llm.generate([[2]]), llm.reset):
            with pytest.raises(RequestValidationError, match="in the middle of a step"):
                call()
            refused.append(call)
        return prefill(cache_id, tokens)

    model.prefill = asking
    assert llm.generate([[1]], SamplingParams(max_tokens=3))[0].token_ids == answer(model, [1], 3)
    assert len(refused) == 2
    assert model.lengths == {}


def test_a_stream_is_closed_without_waiting_for_the_step_that_runs():
    llm, model = counting()
    stream = llm.stream([1, 2])
    next(stream)
    prefill, begun, goes_on = model.prefill, threading.Event(), threading.Event()

    def slow(cache_id: str, tokens: Sequence[int]) -> Logits:
        begun.set()
        assert goes_on.wait(timeout=60)
        return prefill(cache_id, tokens)

    model.prefill = slow
    worker = threading.Thread(target=lambda: llm.generate([[1]], SamplingParams(max_tokens=1)), daemon=True)
    worker.start()
    assert begun.wait(timeout=60)
    stream.close()  # returns while the step waits
    goes_on.set()
    worker.join(timeout=60)
    llm.engine.settle()
    assert model.lengths == {}


def test_a_release_that_fails_is_logged_and_costs_nobody_an_answer(caplog: pytest.LogCaptureFixture):
    llm, model = counting()
    release = model.release

    def broken(cache_id: str) -> None:
        release(cache_id)
        raise RuntimeError("broken")

    model.release = broken
    outs = llm.generate([[1], [2]], SamplingParams(max_tokens=3))
    assert [out.token_ids for out in outs] == [answer(model, [1], 3), answer(model, [2], 3)]
    assert "cannot release" in caplog.text
    assert model.lengths == {}


def test_an_error_that_is_none_of_the_contracts_ends_requests_and_not_the_engine():
    llm, model = counting()
    prefill = model.prefill

    def broken(cache_id: str, tokens: Sequence[int]) -> Logits:
        raise KeyError("no such thing")

    model.prefill = broken
    with pytest.raises(InternalError, match="no such thing"):
        llm.generate([[5]])
    model.prefill = prefill
    assert llm.generate([[1]], SamplingParams(max_tokens=3))[0].token_ids == answer(model, [1], 3)
    assert model.lengths == {}


@pytest.mark.parametrize(
    "given", [None, np.zeros(22, np.float32), [1.0], "text", np.full(23, np.nan, np.float32), 3, np.zeros((1, 23))]
)
def test_what_is_no_row_of_logits_is_an_error_of_the_model(given: Any):
    llm, model = counting()
    model.prefill = lambda cache_id, tokens: given
    with pytest.raises(ModelError, match="CountingLLM returned logits"):
        llm.generate([[1]], SamplingParams(max_tokens=3))


def test_copies_that_are_refused_are_no_end():
    model, prompts = SummingLLM(), [[1, 2], [3], [4]]
    params = [SamplingParams(temperature=1.0, top_k=1, max_tokens=3, n=n) for n in (2, 1, 2)]
    expected = LLM.from_model(SummingLLM()).generate(prompts, params)

    def fork(cache_id: str, new_cache_id: str) -> NoReturn:
        raise RequestValidationError("no copies today")

    model.fork = fork
    llm = LLM.from_model(model, max_rows=8, chunk_tokens=16)
    outs = llm.generate(prompts, params, return_errors=True)
    assert outs[2].error is None
    for out, alone in zip(outs, expected, strict=True):
        if out.error is None:
            assert out.token_ids == alone.token_ids
        else:
            assert isinstance(out.error, RequestValidationError)
    assert model.tokens == {}


def test_an_error_of_the_model_reaches_who_asked_and_the_llm_goes_on():
    llm, model = counting()
    prefill = model.prefill

    def broken(cache_id: str, tokens: Sequence[int]) -> Logits:
        if len(model.lengths) == 2:
            raise ModelError("broken")
        return prefill(cache_id, tokens)

    model.prefill = broken
    with pytest.raises(ModelError, match="broken"):
        llm.generate(PROMPTS)
    assert model.lengths == {}
    model.lengths = {"x": 1, "y": 1}
    with pytest.raises(ModelError, match="broken"):
        list(llm.stream([1, 2]))
    model.lengths = {}
    assert llm.generate([[1]], SamplingParams(max_tokens=3))[0].token_ids == answer(model, [1], 3)


@pytest.mark.parametrize("progress", [False, True])
def test_a_prompt_that_fails_costs_the_others_nothing_if_errors_are_returned(progress: bool):
    llm, model = counting()
    prefill = model.prefill

    def picky(cache_id: str, tokens: Sequence[int]) -> Logits:
        if 22 in tokens:
            raise RequestValidationError("22 is not to my taste")
        return prefill(cache_id, tokens)

    model.prefill = picky
    params = SamplingParams(max_tokens=3)
    outs = llm.generate(PROMPTS, params, progress=progress, return_errors=True)
    for out, prompt in zip(outs, PROMPTS, strict=True):
        if prompt[0] == 22:
            assert (out.finish_reason, out.token_ids, out.text) == ("error", [], "")
            assert isinstance(out.error, RequestValidationError)
        else:
            assert (out.finish_reason, out.token_ids, out.error) == ("length", answer(model, prompt, 3), None)
    with pytest.raises(RequestValidationError, match="taste") as refusal:
        llm.generate(PROMPTS, params, progress=progress)
    assert refusal.value.__notes__ == ["prompts[3] of 6"]
    assert model.lengths == {}


def test_threads_share_the_batch_and_each_gets_its_own_answers():
    llm, model = counting(max_rows=3, max_seqs=4)
    problems: list[BaseException] = []

    def ask(first: int) -> None:
        try:
            prompts = [[(first + i) % 23] * (1 + i % 5) for i in range(12)]
            for out, prompt in zip(llm.generate(prompts, SamplingParams(max_tokens=9)), prompts, strict=True):
                assert out.token_ids == answer(model, prompt, 9)
            for prompt in prompts[:6]:
                expected = answer(model, prompt, 40)
                assert "".join(llm.stream(prompt, SamplingParams(max_tokens=40))) == text_of(expected)
        except (AssertionError, FerrumError) as problem:
            problems.append(problem)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert problems == []
    assert model.lengths == {}


IDS = [[3, 1, 4], [1] * 11, [5, 9], [2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8]]
COUNT = 14


@pytest.fixture
def llm(runner: ModelRunner) -> LLM:
    return LLM.from_model(runner, max_rows=5, chunk_tokens=16)


def test_greedy_answers_are_the_arg_max_token_by_token(llm: LLM, runner: ModelRunner):
    outs = llm.generate(IDS, SamplingParams(max_tokens=COUNT))
    for out, prompt in zip(outs, IDS, strict=True):
        expected, logits = [], runner.prefill("check", prompt)
        for at in range(COUNT):
            expected.append(int(np.argmax(logits)))
            logits = runner.decode("check", expected[-1], len(prompt) + at)
        runner.release("check")
        assert out.token_ids == expected
    assert is_empty(runner)
    assert llm.runner is runner


def test_requests_without_a_seed_differ(llm: LLM):
    outs = llm.generate([IDS[0]] * 4, SamplingParams(temperature=5.0, max_tokens=COUNT))
    assert len({tuple(out.token_ids) for out in outs}) == 4


def test_a_prompt_can_be_prepared_without_a_trace(llm: LLM, runner: ModelRunner):
    before = runner.cache_metrics_snapshot(), runner.kv_slot_capacity_snapshot()
    llm.prepare(IDS[1])
    assert (runner.cache_metrics_snapshot(), runner.kv_slot_capacity_snapshot()) == before
    assert not runner._pipeline.table.live
    with pytest.raises(RequestValidationError, match="at least one token"):
        llm.prepare([])
    with pytest.raises(RequestValidationError, match="expected an id from 0"):
        llm.prepare([10**9])


def test_a_reset_drops_every_sequence_and_brings_a_failed_model_back(
    llm: LLM, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
):
    params = SamplingParams(max_tokens=COUNT)
    expected = llm.generate(IDS, params)

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: unplugged")

    runner.prefill("by hand", [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(runner._programs, "get", lambda _: fail)
        with pytest.raises(DeviceError, match="unplugged"):
            llm.generate(IDS, params)
    with pytest.raises(DeviceError, match="reset"):
        llm.generate(IDS, params)
    llm.reset()
    assert runner.kv_len("by hand") is None
    assert [out.token_ids for out in llm.generate(IDS, params)] == [out.token_ids for out in expected]
    assert is_empty(runner)


@pytest.mark.parametrize("count", [1, 2])
def test_requests_go_on_after_somebody_elses_reset(
    llm: LLM, runner: ModelRunner, count: int, monkeypatch: pytest.MonkeyPatch
):
    params, execute, calls = SamplingParams(max_tokens=COUNT), runner.execute, []
    expected = llm.generate(IDS[:count], params)

    def reset_once(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 4:
            runner.reset()
        return execute(batch)

    monkeypatch.setattr(runner, "execute", reset_once)
    assert [out.token_ids for out in llm.generate(IDS[:count], params)] == [out.token_ids for out in expected]


def test_warmup_leaves_nothing_to_compile(runner: ModelRunner, compiles: list[str]):
    llm = LLM.from_model(runner, max_rows=2)
    llm.warmup()
    assert runner._programs._steps.keys() >= set(runner.plan.declared())
    compiles.clear()
    llm.generate(IDS[:2], SamplingParams(max_tokens=2, temperature=1.0))
    assert compiles == []
    assert runner.compile_stats()["compiles_after_warmup"] == 0


def test_warmup_of_any_other_model_compiles_what_chooses_its_tokens(compiles: list[str]):
    llm = LLM.from_model(CountingLLM(vocab_size=19))
    llm.warmup(progress=False)
    assert compiles  # nothing else has a vocabulary of this size
    compiles.clear()
    assert len(llm.generate(IDS[:2], SamplingParams(max_tokens=3, temperature=0.8, seed=1))) == 2
    assert compiles == []


def test_warmup_asks_the_model_and_the_draft(monkeypatch: pytest.MonkeyPatch):
    warmed: list[tuple[object, bool]] = []
    monkeypatch.setattr(CountingLLM, "warmup", lambda self, *, progress: warmed.append((self, progress)))
    model, draft = RollingLLM(), CountingLLM()
    LLM.from_model(model, speculation=Speculation(draft=draft)).warmup(progress=False)
    assert warmed == [(model, False), (draft, False)]


def test_a_closed_model_says_so(new_runner: MakeRunner):
    with LLM.from_model(new_runner()) as llm:
        pass
    with pytest.raises(CancelledError, match="closed"):
        llm.generate(IDS[:1])
    with pytest.raises(CancelledError, match="closed"):
        llm.generate([])
    with pytest.raises(CancelledError, match="closed"):
        assert llm.runner.params
    with pytest.raises(CancelledError, match="closed"):
        llm.__enter__()


@pytest.mark.slow
def test_the_real_model_names_paris_and_streams_what_it_says(smollm2_path: Path):
    one_bucket = EngineConfig(decode_rows=(2,), query_blocks=(1,), block_tokens=64, verify_tokens=64)
    with LLM(smollm2_path, max_seqs=2, kv_capacity=256, engine=one_bucket, layout="scanned", progress=False) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        params = SamplingParams(max_tokens=24)
        out = llm.chat(question, params)
        assert "Paris" in out.text
        assert out.finish_reason == "stop"
        assert "<|im_end|>" not in out.text
        pieces = list(llm.stream(llm.chat_prompt(question), params))
        assert "".join(pieces) == out.text
        assert len(pieces) > 4
        assert llm.runner.kv_slot_capacity_snapshot().free_blocks == llm.runner.plan.cache.num_blocks
        assert llm.runner.compile_stats()["compiled"] == 4  # two steps, and the sampler of one row and of two


def test_the_list_of_a_single_answer_is_refused_where_there_are_several():
    llm, _ = counting()
    outs = llm.generate([[1], [2]], [SamplingParams(max_tokens=2), SamplingParams(temperature=1.0, max_tokens=2, n=3)])
    assert outs[0].outputs == [outs[0]]
    for out in outs[1:]:
        with pytest.raises(UnsupportedError, match="n=3 outputs per prompt, in order: group them by 3"):
            _ = out.outputs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "org/name"}, "no setting 'model': here it is path, the first argument"),
        ({"tensor_parallel_size": 2}, r'here it is mesh=\{"model": n\}'),
        ({"max_model_len": 64}, "here it is kv_capacity"),
        ({"window_kv": False}, r"give engine=EngineConfig\(window_kv=...\)"),
        ({"trust_remote_code": True}, "no setting 'trust_remote_code': known are tokenizer, speculation, dtype"),
        ({"max_seqs": 0}, "max_seqs is 0"),
        ({"max_seqs": 2, "engine": EngineConfig(max_seqs=3)}, "max_seqs is 2 as an argument and 3"),
        ({"tokenizer": ""}, "tokenizer is '', expected the path of one"),
    ],
)
def test_settings_are_refused_before_a_model_is_looked_for(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ferrum_jax.generate.llm.resolve", lambda *_, **__: pytest.fail("a model was looked for"))
    with pytest.raises(ConfigError, match=message):
        LLM(**settings)


def test_speculation_of_another_kind_is_refused_before_a_model_is_looked_for():
    wrong: Any = 3
    with pytest.raises(ConfigError, match="speculation is 3"):
        LLM("nowhere", speculation=wrong)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_rows": 0}, "max_rows is 0, expected an integer of at least 1"),
        ({"max_rows": "2"}, "max_rows is '2', expected an integer"),
        ({"chunk_tokens": -3}, "chunk_tokens is -3, expected an integer of at least 1"),
        ({"chunk_tokens": 1.5}, r"chunk_tokens is 1\.5, expected an integer"),
        ({"model": None}, "model is None, expected a DecoderOnlyLLM"),
        ({"tokenizer": "folder"}, "tokenizer is 'folder', expected a Tokenizer"),
        ({"speculation": "prompt-lookup"}, "speculation is 'prompt-lookup', expected a Speculation"),
    ],
)
def test_what_no_model_can_be_run_with_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        LLM.from_model(**{"model": CountingLLM(), **given})


def test_settings_beside_an_llm_are_refused():
    with pytest.raises(ConfigError, match="settings beside an LLM, which is loaded already: max_seqs, nonsense"):
        AsyncLLM(LLM.from_model(CountingLLM()), max_seqs=3, nonsense=True)


def test_a_prompt_that_is_too_long_says_what_to_raise():
    with pytest.raises(RequestValidationError, match="5 tokens, the KV capacity is 4, as long as the model allows"):
        counting(capacity=4)[0].generate([[1] * 5])


def test_a_chat_passes_on_how_the_template_is_rendered():
    tokenizer = replace(
        letters(),
        chat_templates={
            "default": "{{ mark }}{% for one in messages %}{{ one.content }}d{% endfor %}"
            "{% if add_generation_prompt %}e{% endif %}"
        },
    )
    llm, messages = LLM.from_model(CountingLLM(), tokenizer), [{"role": "user", "content": "ab"}]
    params = SamplingParams(max_tokens=1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "abde"),
        ({"add_generation_prompt": False}, "abd"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "ab"),
        ({"chat_template_kwargs": {"mark": "f"}}, "fabde"),
    ]
    for options, text in cases:
        assert llm.chat_prompt(messages, **options) == spell(text)
        assert llm.chat(messages, params, **options).prompt_token_ids == spell(text)
    with pytest.raises(RequestValidationError, match="continue_final_message needs add_generation_prompt=False"):
        llm.chat(messages, params, continue_final_message=True)
    with pytest.raises(RequestValidationError, match="chat_template_kwargs has messages, which are no variables"):
        llm.chat(messages, params, chat_template_kwargs={"messages": []})

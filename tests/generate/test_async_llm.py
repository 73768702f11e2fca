"""`AsyncLLM`: the same answers, piece by piece, for coroutines."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from ferrum_jax import LLM, AsyncLLM, SamplingParams
from ferrum_jax.contract.errors import AlreadyExistsError, CancelledError, ModelError, RequestValidationError
from ferrum_jax.contract.llm import Logits
from tests.fake import CountingLLM, answer
from tests.generate.test_request import letters, spell

PROMPTS = [[at] * (1 + at % 4) for at in range(6)]
PARAMS = SamplingParams(max_tokens=8)


def made() -> tuple[AsyncLLM, CountingLLM]:
    model = CountingLLM()
    return AsyncLLM(LLM.from_model(model, letters(), max_rows=3, chunk_tokens=6)), model


def test_coroutines_share_the_engine_and_each_gets_its_own_answer():
    llm, model = made()

    async def ask(prompt: list[int]) -> list[int]:
        sizes, last = [], None
        async for last in llm.generate(prompt, PARAMS):
            sizes.append(len(last.token_ids))
        assert last is not None
        assert last.finished
        assert sizes == sorted(sizes)
        assert 0 not in sizes  # although a prompt is read in several steps
        return last.token_ids

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(ask(prompt) for prompt in PROMPTS))

    assert asyncio.run(main()) == [answer(model, prompt, 8) for prompt in PROMPTS]
    llm.llm.engine.settle()
    assert model.lengths == {}


def test_nothing_comes_before_the_first_token():
    llm, model = made()

    async def main() -> list[int]:
        return [len(out.token_ids) async for out in llm.generate([1, 2] * 12, SamplingParams(max_tokens=4))]

    sizes = asyncio.run(main())
    assert sizes[0] > 0
    assert sizes == sorted(sizes)
    assert sizes[-1] == 4
    assert model.lengths == {}


def test_the_parameters_have_both_names():
    llm, model = made()

    async def main() -> None:
        outs = [out async for out in llm.generate([1], sampling_params=PARAMS)]
        assert outs[-1].token_ids == answer(model, [1], 8)
        with pytest.raises(RequestValidationError, match="give one of them"):
            await anext(llm.generate([1], PARAMS, sampling_params=PARAMS))

    asyncio.run(main())


def slow_tokenising(llm: AsyncLLM) -> tuple[list[str], threading.Event]:
    """Lets texts that begin with `a` wait for an event; returns what was begun, in order, and the event."""
    request, begun, gate = llm.llm.request, [], threading.Event()

    def slow(prompt: str, *more: Any) -> Any:
        assert not prompt.startswith("a") or gate.wait(timeout=60)
        begun.append(prompt)
        return request(prompt, *more)

    llm.llm.request = slow  # type: ignore[method-assign]
    return begun, gate


def test_the_loop_goes_on_while_a_prompt_is_tokenised_and_requests_keep_their_order():
    llm, model = made()
    begun, gate = slow_tokenising(llm)
    submitted: list[str | None] = []
    submit = llm.llm.engine.submit
    llm.llm.engine.submit = lambda one: (submitted.append(one.text_prompt), submit(one))[1]  # type: ignore[assignment]

    async def ask(prompt: str) -> list[int]:
        return [out async for out in llm.generate(prompt, PARAMS)][-1].token_ids

    async def main() -> list[list[int]]:
        tasks = [asyncio.create_task(ask(prompt)) for prompt in ("abc", "d", "ef")]
        await asyncio.sleep(0.05)
        assert begun == []  # and the loop has come here
        gate.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [answer(model, spell(prompt), 8) for prompt in ("abc", "d", "ef")]
    assert begun == submitted == ["abc", "d", "ef"]


@pytest.mark.parametrize("how", ["aborted", "cancelled"])
def test_a_request_may_end_while_its_prompt_is_tokenised(how: str, monkeypatch: pytest.MonkeyPatch):
    llm, model = made()
    begun, gate = slow_tokenising(llm)

    async def take() -> None:
        async for _ in llm.generate("abc", SamplingParams(max_tokens=60), request_id="mine"):
            pass

    async def main() -> None:
        task = asyncio.create_task(take())
        await asyncio.sleep(0.01)
        decode = model.decode
        monkeypatch.setattr(model, "decode", lambda *row: (_slowly(), decode(*row))[1])
        if how == "cancelled":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.set()
            await llm.abort("mine")
        else:
            threading.Timer(0.05, gate.set).start()
            await llm.abort("mine")
            with pytest.raises(CancelledError, match="aborted"):
                await task

    asyncio.run(main())
    assert begun == ["abc"]
    llm.llm.engine.settle()
    assert model.lengths == {}
    assert not llm._live


@pytest.mark.parametrize("how", ["left", "cancelled"])
def test_who_leaves_early_frees_what_the_request_held(how: str):
    llm, model = made()

    async def take_one() -> None:
        async for _ in llm.generate([1, 2], SamplingParams(max_tokens=50)):
            return

    async def main() -> None:
        if how == "left":
            await take_one()
            return
        task = asyncio.create_task(take_one())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    llm.llm.engine.settle()
    assert model.lengths == {}


def test_an_aborted_request_ends_with_an_error_for_who_waits():
    llm, model = made()
    prefill, aborted = model.prefill, []

    async def main() -> None:
        stream = llm.generate([1, 2], SamplingParams(max_tokens=60), request_id="mine")
        await anext(stream)
        with pytest.raises(AlreadyExistsError, match="mine"):
            await anext(llm.generate([3], PARAMS, request_id="mine"))
        wrong: Any = [1]
        with pytest.raises(RequestValidationError, match="request_id is"):
            await anext(llm.generate([3], PARAMS, request_id=wrong))
        await llm.abort("nobody's")
        await llm.abort("mine")
        with pytest.raises(CancelledError, match="aborted"):
            aborted.extend([output.finished async for output in stream])
        assert not any(aborted)

    model.prefill = lambda cache_id, tokens: (_slowly(), prefill(cache_id, tokens))[1]
    asyncio.run(main())
    llm.llm.engine.settle()
    assert model.lengths == {}


def test_outputs_have_the_callers_id_by_which_a_request_can_be_aborted(monkeypatch: pytest.MonkeyPatch):
    llm, model = made()
    decode = model.decode
    monkeypatch.setattr(model, "decode", lambda *row: (_slowly(), decode(*row))[1])

    async def main() -> None:
        async for out in llm.generate([1, 2], SamplingParams(max_tokens=60), request_id="mine"):
            assert out.request_id == "mine"
            await llm.abort(out.request_id)

    with pytest.raises(CancelledError, match="'mine' was aborted"):
        asyncio.run(main())
    llm.llm.engine.settle()
    assert model.lengths == {}


def _slowly() -> None:
    """Lets the other threads run, so that an answer of many tokens is not over at once."""
    time.sleep(0.01)


def test_refusals_and_failures_reach_who_asked():
    llm, model = made()

    async def main() -> None:
        with pytest.raises(RequestValidationError, match="at least one token"):
            await anext(llm.generate([], PARAMS))
        model.prefill = lambda cache_id, tokens: None  # type: ignore[assignment]
        with pytest.raises(ModelError):
            await anext(llm.generate([1], PARAMS))

    asyncio.run(main())
    assert model.lengths == {}


@pytest.mark.parametrize("is_late", [False, True], ids=["closed while it runs", "closed after its end"])
def test_an_iterator_whose_loop_was_closed_keeps_neither_its_id_nor_its_sequence(is_late: bool):
    llm, model = made()
    gate, prefill = threading.Event(), model.prefill

    def slow(cache_id: str, tokens: Sequence[int]) -> Logits:
        assert model.lengths.get(cache_id, 0) < 4 or gate.wait(timeout=60)
        return prefill(cache_id, tokens)

    model.prefill = slow
    loop = asyncio.new_event_loop()
    answers = llm.generate([1, 2], SamplingParams(max_tokens=60), request_id="mine")
    loop.run_until_complete(anext(answers))
    if is_late:
        gate.set()
        deadline = time.monotonic() + 60
        while model.lengths and time.monotonic() < deadline:
            time.sleep(0.001)
    loop.close()
    gate.set()
    llm.llm.engine.settle()
    llm.llm.engine.settle()  # what a step has aborted is freed after the next
    assert not llm._live
    assert model.lengths == {}

    async def again() -> list[int]:
        return [out async for out in llm.generate([1, 2], PARAMS, request_id="mine")][-1].token_ids

    assert asyncio.run(again()) == answer(model, [1, 2], 8)


def test_answers_that_no_loop_can_take_any_more_are_given_up():
    llm, model = made()
    gate, decode, read = threading.Event(), model.decode, []

    def slow(cache_id: str, token: int, pos: int) -> Logits:
        assert pos < 10 or gate.wait(timeout=60)
        read.append(token)
        return decode(cache_id, token, pos)

    model.decode = slow
    loop = asyncio.new_event_loop()
    answers = llm.as_completed([[1], [2, 3], [4]], [SamplingParams(max_tokens=count) for count in (1, 60, 60)])
    assert loop.run_until_complete(anext(answers))[0] == 0
    loop.close()
    gate.set()
    llm.llm.engine.settle()
    llm.llm.engine.settle()
    assert model.lengths == {}
    assert len(read) < 60


def test_closing_ends_what_runs():
    model = CountingLLM()
    inner, decode = LLM.from_model(model, max_rows=3), model.decode

    def slow(cache_id: str, token: int, pos: int) -> Logits:
        while pos == 10 and not inner.engine._is_closed:
            time.sleep(0.001)
        return decode(cache_id, token, pos)

    model.decode = slow

    async def main() -> None:
        async with AsyncLLM(inner) as llm:
            answers = llm.generate([1], SamplingParams(max_tokens=60))
            await anext(answers)
        inner.close()
        assert model.lengths == {}
        with pytest.raises(CancelledError, match="closed"):
            _ = [out async for out in answers]
        with pytest.raises(CancelledError, match="closed"):
            await anext(AsyncLLM(inner).generate([1], PARAMS))

    asyncio.run(main())


def test_parameters_have_both_names_in_as_completed_too_and_one_answer_says_which_gives_several():
    llm, model = made()

    async def main() -> None:
        outs = [out async for _, out in llm.as_completed([[1]], sampling_params=PARAMS)]
        assert outs[-1].token_ids == answer(model, [1], 8)
        several = SamplingParams(temperature=1.0, n=2)
        with pytest.raises(RequestValidationError, match=r"n is 2, but this call gives one .*AsyncLLM.as_completed"):
            await anext(llm.generate([1], several))

    asyncio.run(main())
    assert [out.token_ids for _, out in llm.llm.as_completed([[1]], sampling_params=PARAMS)] == [answer(model, [1], 8)]

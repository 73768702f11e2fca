"""`AsyncLLM`: the same answers, piece by piece, for coroutines."""

import asyncio

import pytest

from ferrum_jax import LLM, AsyncLLM, SamplingParams
from ferrum_jax.contract.errors import AlreadyExistsError, CancelledError, ModelError, RequestValidationError
from tests.fake import CountingLLM, answer
from tests.generate.test_request import letters

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
        return last.token_ids

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(ask(prompt) for prompt in PROMPTS))

    assert asyncio.run(main()) == [answer(model, prompt, 8) for prompt in PROMPTS]
    llm.llm.engine.settle()
    assert model.lengths == {}


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
        await llm.abort("nobody's")
        await llm.abort("mine")
        with pytest.raises(CancelledError, match="aborted"):
            aborted.extend([output.finished async for output in stream])
        assert not any(aborted)

    model.prefill = lambda cache_id, tokens: (_slowly(), prefill(cache_id, tokens))[1]
    asyncio.run(main())
    llm.llm.engine.settle()
    assert model.lengths == {}


def _slowly() -> None:
    """Lets the other threads run, so that an answer of many tokens is not over at once."""
    import time

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


def test_closing_ends_what_runs():
    model = CountingLLM()
    inner = LLM.from_model(model, max_rows=3)

    async def main() -> None:
        async with AsyncLLM(inner) as llm:
            await anext(llm.generate([1], PARAMS))
        inner.close()
        with pytest.raises(CancelledError, match="closed"):
            await anext(AsyncLLM(inner).generate([1], PARAMS))

    asyncio.run(main())

"""Answers that stop early and go on later, and answers in the order in which they finish."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ferrum_jax import LLM, AsyncLLM, SamplingParams
from ferrum_jax.contract.errors import CancelledError, RequestValidationError, ResourceExhaustedError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.generate.params import RequestOutput
from ferrum_jax.generate.updates import LivePolicy, params_update
from ferrum_jax.models.specs import ParamTree
from tests.generate.conftest import MakeRunner, is_empty
from tests.generate.updates import make_oracle, versions_of

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [8] * 20]
PENALISED = SamplingParams(
    max_tokens=16, temperature=0.9, top_p=0.95, seed=11, repetition_penalty=1.3, presence_penalty=0.4,
    frequency_penalty=0.2, min_tokens=12, logprobs=2, logprobs_mode="processed", prompt_logprobs=1, stop_token_ids=[4],
)  # fmt: skip


def same(one: RequestOutput, other: RequestOutput) -> None:
    """Fails unless two answers are equal, but for rounding."""
    assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
    for name in ("logprobs", "processed_logprobs"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=0, atol=2e-5)
    assert one.top_logprobs is not None
    assert other.top_logprobs is not None
    for mine, theirs in zip(one.top_logprobs, other.top_logprobs, strict=True):
        assert list(mine) == list(theirs)
        np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=0, atol=2e-5)
    assert one.weight_versions == other.weight_versions


@pytest.mark.parametrize("first", [1, 5, 13])
def test_an_answer_in_parts_is_the_answer_in_one(first: int, runner: ModelRunner):
    llm = LLM.from_model(runner)
    whole = llm.generate(PROMPTS, PENALISED)
    parts = llm.generate(PROMPTS, replace(PENALISED, max_tokens=first, min_tokens=min(first, 12)))
    again = [part for part in parts if part.finish_reason == "length"]
    assert len(again) >= 2
    found = iter(llm.generate(again, PENALISED))
    for part, one in zip(parts, whole, strict=True):
        same(next(found) if part.finish_reason == "length" else part, one)
    assert is_empty(runner)


def test_what_an_answer_was_before_a_change_of_weights_goes_on_after_it(new_runner: MakeRunner, params: ParamTree):
    weights = versions_of(params, 2)
    oracle = make_oracle(weights)
    plain = SamplingParams(max_tokens=24, logprobs=True, ignore_eos=True)
    with new_runner(prefix_cache=True) as runner:
        llm = LLM.from_model(runner)
        requests, scheduler = [llm.request(prompt, plain) for prompt in PROMPTS], llm.engine.scheduler
        for request in requests:
            scheduler.submit(request)
        while not all(len(one.choices) > 2 for one in requests):
            scheduler.step()
        scheduler.update(params_update(runner, weights[1], "abort"))
        scheduler.step()
        parts = [one.output() for one in requests]
        assert [part.finish_reason for part in parts] == ["abort"] * 3
        for part, out in zip(parts, llm.generate(parts, plain), strict=True):
            count = len(part.token_ids)
            assert out.token_ids[:count] == part.token_ids
            assert out.weight_versions == [0] * count + [1] * (24 - count)
            tokens = out.prompt_token_ids + out.token_ids
            for version, of in ((0, slice(0, count)), (1, slice(count, None))):
                logprobs = oracle(tokens, [version] * len(tokens))[len(out.prompt_token_ids) - 1 : -1]
                expected = logprobs[np.arange(24), out.token_ids][of]
                assert out.logprobs is not None
                np.testing.assert_allclose(out.logprobs[of], expected, rtol=0, atol=2e-5)


def test_an_answer_that_goes_on_begins_after_an_update_that_waits(new_runner: MakeRunner, params: ParamTree):
    plain, weights = SamplingParams(max_tokens=6, ignore_eos=True), versions_of(params, 2)
    with new_runner() as runner:
        llm = LLM.from_model(runner)
        (part,) = llm.generate([PROMPTS[0]], plain)
        part = replace(part, token_ids=np.array(part.token_ids))  # perhaps from a file
        scheduler = llm.engine.scheduler
        llm.engine.settle()
        first = llm.request(PROMPTS[1], replace(plain, max_tokens=8))
        scheduler.submit(first)
        while len(first.choices) < 2:
            scheduler.step()
        update = params_update(runner, weights[1], "wait")
        scheduler.update(update)
        later = llm.request(part, replace(plain, max_tokens=30))
        scheduler.submit(later)
        while not first.is_done:
            scheduler.step()
        assert len(later.choices) == 6
        while not later.is_done:
            scheduler.step()
        assert update.done.result() == 1
        assert later.versions == [0] * 6 + [1] * 24
        assert {type(token) for token in later.output().token_ids} == {int}


@pytest.mark.parametrize("live", ["keep", "recompute"])
def test_an_answer_that_has_not_gone_on_yet_begins_again_under_new_weights(
    live: LivePolicy, new_runner: MakeRunner, params: ParamTree
):
    asked, weights = (
        SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=0, ignore_eos=True),
        versions_of(params, 2),
    )
    oracle = make_oracle(weights)
    with new_runner() as runner:
        llm = LLM.from_model(runner, chunk_tokens=4)
        (part,) = llm.generate([PROMPTS[0]], asked)
        llm.engine.settle()
        scheduler = llm.engine.scheduler
        request = llm.request(part, replace(asked, max_tokens=6))
        scheduler.submit(request)
        while request.num_unscored or not request.scores:
            scheduler.step()
        assert len(request.choices) == 3
        scheduler.update(params_update(runner, weights[1], live))
        while not request.is_done:
            scheduler.step()
        out = request.output()
    assert out.weight_versions == [0] * 3 + [1] * 3
    tokens, count = out.prompt_token_ids + out.token_ids, len(out.prompt_token_ids)
    expected = oracle(tokens, [1] * len(tokens))[np.arange(len(tokens) - 1), tokens[1:]]
    assert out.prompt_logprobs is not None
    assert out.logprobs is not None
    found = [*out.prompt_logprobs[1:], *out.logprobs[3:]]
    np.testing.assert_allclose(found, [*expected[: count - 1], *expected[count + 2 :]], rtol=0, atol=2e-5)


def test_an_answer_that_cannot_go_on_is_refused(runner: ModelRunner):
    llm = LLM.from_model(runner)
    (done,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=4))
    refused = [
        (SamplingParams(max_tokens=4), "complete with 4 tokens: length"),
        (SamplingParams(max_tokens=9, stop_token_ids=[done.token_ids[2]]), "complete with 4 tokens: stop"),
        (SamplingParams(max_tokens=9, logprobs=True), "has no logprobs"),
        (SamplingParams(temperature=1.0, max_tokens=9, n=2), "n is 2, an answer that is continued takes n=1"),
    ]
    for params, message in refused:
        with pytest.raises(RequestValidationError, match=message):
            llm.generate(done, params)
    for changes, how, message in (
        ({"weight_versions": []}, SamplingParams(max_tokens=9), "4 tokens, but 0 weight_versions"),
        ({"token_ids": [1, 2, 3, 999]}, SamplingParams(max_tokens=9), "999"),
        ({"weight_versions": None}, SamplingParams(max_tokens=9), "4 tokens, but None, which is no list"),
        ({"logprobs": [0.0]}, SamplingParams(max_tokens=9), "4 tokens, but 1 logprobs"),
        ({"processed_logprobs": 5}, SamplingParams(max_tokens=9), "4 tokens, but 5, which is no list"),
        ({"logprobs": [0.0] * 4}, SamplingParams(max_tokens=9, logprobs=True), "has no processed_logprobs"),
        ({"top_logprobs": [None] * 4}, SamplingParams(max_tokens=9), "top_logprobs that are no mappings"),
    ):
        with pytest.raises(RequestValidationError, match=message):
            llm.generate(replace(done, **changes), how)
    (few,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=4, logprobs=1))
    with pytest.raises(RequestValidationError, match="1 top_logprobs a token, its next are to have 3"):
        llm.generate(few, SamplingParams(max_tokens=9, logprobs=3))
    with pytest.raises(RequestValidationError, match="complete with 4 tokens: stop"):
        llm.generate(replace(done, finish_reason="stop"), SamplingParams(max_tokens=9))
    assert is_empty(runner)


def test_answers_come_as_they_finish_and_say_which_they_are(runner: ModelRunner):
    llm = LLM.from_model(runner, max_rows=4)
    lengths = [9, 1, 4]
    each = [SamplingParams(max_tokens=count, seed=5, temperature=1.0, n=3, ignore_eos=True) for count in lengths]
    expected = llm.generate(PROMPTS, each)
    found = list(llm.as_completed(PROMPTS, each))
    assert sorted(at for at, _ in found) == list(range(9))
    assert all(out.token_ids == expected[at].token_ids for at, out in found)
    assert found[0][0] in range(3, 6)  # the shortest
    assert list(llm.as_completed([], each[:0])) == []

    async def collect() -> list[tuple[int, RequestOutput]]:
        async with AsyncLLM(llm) as engine:
            return [one async for one in engine.as_completed(PROMPTS, each)]

    assert sorted((at, out.token_ids) for at, out in asyncio.run(collect())) == [
        (at, out.token_ids) for at, out in enumerate(expected)
    ]


def test_leaving_early_frees_what_the_others_hold(runner: ModelRunner):
    llm = LLM.from_model(runner, max_rows=4)
    params = [SamplingParams(max_tokens=count, ignore_eos=True, temperature=1.0, n=4) for count in (40, 2, 40)]
    answers: Iterator[tuple[int, RequestOutput]] = llm.as_completed(PROMPTS, params)
    assert next(answers)[0] in range(4, 8)
    answers.close()  # type: ignore[attr-defined]
    llm.engine.settle()
    assert is_empty(runner)

    async def first() -> int:
        async with AsyncLLM(llm) as engine:
            iterator = engine.as_completed(PROMPTS, params)
            at, _ = await anext(iterator)
            await iterator.aclose()  # type: ignore[attr-defined]
            return at

    assert asyncio.run(first()) in range(4, 8)
    llm.engine.settle()
    assert is_empty(runner)


def test_errors_are_raised_or_come_as_outputs(new_runner: MakeRunner):
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 2, 30)]
    with new_runner(prefix_cache=True, kv_blocks=3) as runner:
        llm = LLM.from_model(runner)
        runner.prefill("mine", [1])  # two blocks are left
        found = dict(llm.as_completed(PROMPTS, params, return_errors=True))
        assert [found[at].finish_reason for at in range(3)] == ["length", "length", "error"]
        assert isinstance(found[2].error, ResourceExhaustedError)
        with pytest.raises(ResourceExhaustedError, match="blocks"):
            list(llm.as_completed(PROMPTS, params))
        runner.release("mine")
        assert is_empty(runner)
        llm.close()
        with pytest.raises(CancelledError):
            next(llm.as_completed(PROMPTS, params))


@pytest.mark.parametrize("changes", [{}, {"multi_step_tokens": 4}], ids=str)
def test_what_the_whole_pool_cannot_hold_is_refused_at_once_or_ends_there(
    changes: dict[str, int], new_runner: MakeRunner
):
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (6, 1, 6)]
    with new_runner(prefix_cache=True, kv_blocks=3, **changes) as runner:
        llm = LLM.from_model(runner)
        expected = llm.generate(PROMPTS[0], params[0])[0]
        stream = llm.stream(PROMPTS[0], params[0])
        with pytest.raises(RequestValidationError, match=r"24: load with .*kv_capacity=, --kv-capacity or FERRUM_KV_"):
            llm.generate([[1] * 30], params[1])
        assert len([*stream]) <= len(expected.token_ids)
        assert stream.output().token_ids == expected.token_ids
        longest = llm.generate(PROMPTS[2], SamplingParams(max_tokens=30, ignore_eos=True))[0]
        assert (longest.finish_reason, len(longest.token_ids)) == ("length", 24 - 20 + 1)  # the last is never read
        assert is_empty(runner)

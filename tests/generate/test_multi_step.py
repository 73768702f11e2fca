"""Answers are the same whether the model decodes token by token or many tokens in one call."""

from collections.abc import Iterator
from typing import Any

import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.contract import DecodeRun
from ferrum_jax.contract.errors import DeviceError, ResourceExhaustedError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.generate.conftest import MakeRunner, crowded, is_empty

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [8], [2, 7, 1, 8], [9, 9], [4, 4, 4, 4, 4, 4]]
PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3, logprobs=True),
    SamplingParams(max_tokens=17, repetition_penalty=1.5, stop_token_ids=(5, 6)),
    SamplingParams(max_tokens=1, logprobs=True),
    SamplingParams(max_tokens=20, temperature=1.2, top_k=5, seed=4, stop_token_ids=tuple(range(30, 37))),
    SamplingParams(max_tokens=7, stop_token_ids=tuple(range(17))),  # more than a loop takes
]


@pytest.fixture(scope="module")
def loops(new_runner: MakeRunner) -> Iterator[ModelRunner]:
    with new_runner(multi_step_tokens=4, decode_rows=(8,)) as runner:
        yield runner


def test_answers_are_the_same_with_loops_and_without(loops: ModelRunner, runner: ModelRunner):
    expected = LLM.from_model(runner, max_rows=4).generate(PROMPTS, PARAMS)
    found = LLM.from_model(loops, max_rows=4).generate(PROMPTS, PARAMS)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.token_ids, mine.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4) if theirs.logprobs else True
    assert is_empty(loops)


def test_a_batch_of_decodes_takes_one_call_for_many_tokens(loops: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    calls: list[list[DecodeRun]] = []
    decode_n = loops.decode_n

    def counted(runs: list[DecodeRun], *, until_one_ends: bool = False):
        calls.append(list(runs))
        return decode_n(runs, until_one_ends=until_one_ends)

    monkeypatch.setattr(loops, "decode_n", counted)
    LLM.from_model(loops, max_rows=4).generate(PROMPTS[:2], SamplingParams(max_tokens=13))
    assert [[run.max_tokens for run in runs] for runs in calls] == [[4, 4]] * 3


@pytest.mark.parametrize("penalty", [1.3, 2.5])
def test_penalties_count_the_tokens_of_loops_in_the_steps_after_them(
    penalty: float, repeating_params: ParamTree, new_runner: MakeRunner
):
    """While another prompt joins, the request decodes one token at a time between loops."""

    def answer(**changes: Any) -> list[int]:
        with new_runner(repeating_params, decode_rows=(8,), **changes) as runner:
            llm = LLM.from_model(runner, max_rows=4)
            scheduler = llm.engine.scheduler
            params = SamplingParams(max_tokens=30, repetition_penalty=penalty, ignore_eos=True)
            request = llm.request([3, 1, 4], params)
            scheduler.submit(request)
            while len(request.choices) < 9:
                scheduler.step()
            scheduler.submit(llm.request([2, 7, 1, 8] * 5, SamplingParams(max_tokens=2)))
            while not request.is_done:
                scheduler.step()
            return request.output().token_ids

    assert answer(multi_step_tokens=4) == answer()


def test_a_failure_of_the_device_in_a_loop_is_what_the_caller_hears(
    loops: ModelRunner, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object, **__: object) -> None:
        raise DeviceError("it fell over")

    monkeypatch.setattr(loops, "decode_n", broken)
    with pytest.raises(DeviceError, match="it fell over"):
        LLM.from_model(loops, max_rows=4).generate(PROMPTS[:2], SamplingParams(max_tokens=13))
    assert is_empty(loops)


def test_where_blocks_for_a_whole_call_are_short_it_goes_on_token_by_token(
    loops: ModelRunner, monkeypatch: pytest.MonkeyPatch
):
    prompts, params = [[1, 2, 3], [4, 5], [6]], SamplingParams(max_tokens=14)
    alone = [LLM.from_model(loops, max_rows=1).generate([prompt], params)[0] for prompt in prompts]
    decode_n, refusals = loops.decode_n, []

    def watched(runs: list[DecodeRun], *, until_one_ends: bool = False):
        try:
            return decode_n(runs, until_one_ends=until_one_ends)
        except ResourceExhaustedError as problem:
            refusals.append(problem)
            raise

    monkeypatch.setattr(loops, "decode_n", watched)
    with crowded(loops, 5):
        answers = LLM.from_model(loops, max_rows=3).generate(prompts, params)
        assert refusals
    assert [one.token_ids for one in answers] == [one.token_ids for one in alone]

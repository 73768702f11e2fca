"""Answers are the same whether the model decodes token by token or many tokens in one call."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import pytest

from ferrum_jax import LLM, SamplingParams, models
from ferrum_jax.contract import DecodeRun
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CFG, ENGINE, make_runner

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
def params() -> ParamTree:
    return models.specs.initialise(models.family(CFG).param_specs(CFG), jax.random.key(0), "float32", scale=0.4)


@pytest.fixture(scope="module")
def plain(params: ParamTree) -> Iterator[ModelRunner]:
    with make_runner(params, ENGINE) as runner:
        yield runner


@pytest.fixture(scope="module")
def loops(params: ParamTree) -> Iterator[ModelRunner]:
    engine = replace(ENGINE, multi_step_tokens=4, decode_rows=(1, 4), query_blocks=(1,), block_tokens=24)
    with make_runner(params, engine) as runner:
        yield runner


def test_answers_are_the_same_with_loops_and_without(loops: ModelRunner, plain: ModelRunner):
    expected = LLM.from_model(plain, max_rows=4).generate(PROMPTS, PARAMS)
    found = LLM.from_model(loops, max_rows=4).generate(PROMPTS, PARAMS)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.token_ids, mine.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4) if theirs.logprobs else True
    assert loops.kv_slot_capacity_snapshot().free_blocks == 18


def test_a_batch_of_decodes_takes_one_call_for_many_tokens(loops: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    calls: list[list[DecodeRun]] = []
    decode_n = loops.decode_n

    def counted(runs: list[DecodeRun], *, until_one_ends: bool = False):
        calls.append(list(runs))
        return decode_n(runs, until_one_ends=until_one_ends)

    monkeypatch.setattr(loops, "decode_n", counted)
    LLM.from_model(loops, max_rows=4).generate(PROMPTS[:2], SamplingParams(max_tokens=13))
    assert [[run.max_tokens for run in runs] for runs in calls] == [[4, 4]] * 3


def test_where_blocks_for_a_whole_call_are_short_it_goes_on_token_by_token(params: ParamTree):
    engine = replace(ENGINE, multi_step_tokens=16, kv_blocks=6, decode_rows=(4,), query_blocks=(3,), block_tokens=8)
    with make_runner(params, engine) as runner:
        answers = LLM.from_model(runner, max_rows=3).generate([[1, 2, 3], [4, 5], [6]], SamplingParams(max_tokens=14))
        alone = [
            LLM.from_model(runner, max_rows=1).generate([tokens], SamplingParams(max_tokens=14))[0]
            for tokens in ([1, 2, 3], [4, 5], [6])
        ]
    assert [one.token_ids for one in answers] == [one.token_ids for one in alone]

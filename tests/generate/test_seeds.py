"""A seed gives the same text alone, in any batch, with a step in flight or not, in multi-step programs, preempted."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams, Speculation
from ferrum_jax.compile.sampler import WAYS, SlotSettings
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.batch import SampledToken, ScheduledRow
from tests.executor.conftest import CFG, adapter_tensors
from tests.generate.conftest import MakeRunner, crowded
from tests.generate.test_request import letters

PROMPTS = [[3, 1, 4], [1] * 11, [5, 9], [2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8], [6], [2, 2, 2], [7, 1, 8, 2]]
COUNT = 12
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"temperature": 1.4, "top_k": 9, "logprobs": 3},
    {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 1.1, "min_p": 0.05, "presence_penalty": 0.5},
    {"temperature": 1.0, "frequency_penalty": 0.7, "logit_bias": {5: 2.0, 6: float("-inf")}},
    {"temperature": 1.2, "allowed_token_ids": list(range(3, 30)), "logprobs": True},
    {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": list(range(12))},
    {"repetition_penalty": 1.5, "bad_words": ["ab", "c"]},
]


def asked(at: int, **more: Any) -> SamplingParams:
    return SamplingParams(seed=100 + at, max_tokens=COUNT, **(OPTIONS[at] | more))


ALL = [asked(at) for at in range(8)]


@pytest.fixture(scope="module")
def alone(common_runner: ModelRunner) -> list[list[int]]:
    """Each prompt answered by itself."""
    common_runner.reset()
    llm = LLM.from_model(common_runner, letters(), max_rows=8, chunk_tokens=24)
    return [llm.generate([prompt], one)[0].token_ids for prompt, one in zip(PROMPTS, ALL, strict=True)]


def test_in_a_batch_of_eight_with_every_option(runner: ModelRunner, alone: list[list[int]]):
    llm = LLM.from_model(runner, letters(), max_rows=8, chunk_tokens=24)
    outs = llm.generate(PROMPTS, ALL)
    assert [out.token_ids for out in outs] == alone
    assert len({tuple(ids) for ids in alone}) == 8


def test_without_a_step_in_flight(runner: ModelRunner, alone: list[list[int]]):
    llm = LLM.from_model(runner, letters(), max_rows=3, chunk_tokens=7)
    assert llm.engine.scheduler._runs_ahead
    llm.engine.scheduler._runs_ahead = False
    assert [out.token_ids for out in llm.generate(PROMPTS, ALL)] == alone


def test_in_the_ways_of_a_gpu(new_runner: MakeRunner, alone: list[list[int]], compiles: list[str]):
    """Programs without branches, of which each step takes the first that suffices."""
    runner = new_runner()
    runner.plan = runner._pipeline.plan = replace(runner.plan, buckets=replace(runner.plan.buckets, sample_ways=WAYS))
    with runner:
        runner.prepare("some", 3)
        compiles.clear()
        for settings in (SlotSettings(), SlotSettings(top_k=3, temperature=1.0), SlotSettings(num_logprobs=2)):
            row = ScheduledRow("some", np.array([1], np.int32), runner.kv_len("some") or 0, SampledToken(settings))
            assert runner.execute([row]).result()[0].token_id < CFG.vocab_size
        assert compiles == []
        runner.release("some")
        runner.warmup()
        compiles.clear()
        llm = LLM.from_model(runner, letters(), max_rows=8, chunk_tokens=24)
        assert [out.token_ids for out in llm.generate(PROMPTS, ALL)] == alone
        several = [llm.generate([prompt], one)[0].token_ids for prompt, one in zip(PROMPTS, ALL, strict=True)]
    assert several == alone
    assert compiles == []


def test_after_preemption(runner: ModelRunner, alone: list[list[int]], caplog: pytest.LogCaptureFixture):
    llm = LLM.from_model(runner, letters(), max_rows=8, chunk_tokens=24)
    caplog.set_level("INFO", logger="ferrum_jax.generate.scheduler")
    with crowded(runner, 5):
        outputs = llm.generate(PROMPTS, ALL)
    assert [out.token_ids for out in outputs] == alone
    assert sum(out.preemptions for out in outputs) > 0
    assert "are free; more kv_blocks or fewer max_seqs avoid it" in caplog.text


def test_what_is_recomputed_after_preemption_is_not_told_as_cached(runner: ModelRunner):
    """Although its own blocks are known prefixes then."""
    prompts = [[30 + at, *range(15)] for at in range(3)]
    with crowded(runner, 5):
        outs = LLM.from_model(runner, max_rows=8, chunk_tokens=24).generate(prompts, SamplingParams(max_tokens=COUNT))
    assert sum(out.preemptions for out in outs) > 0
    assert [out.num_cached_tokens for out in outs] == [0, 0, 0]


def test_answers_under_adapters_after_preemption(new_runner: MakeRunner):
    """A request binds its adapter anew each time it is recomputed, also where drafts are verified."""
    prompts, adapters = PROMPTS[:3], ["one", "two", None]
    params = SamplingParams(max_tokens=COUNT, temperature=1.0, seed=7, n=3, ignore_eos=True)
    with new_runner(prefix_cache=True, max_loras=2, max_lora_rank=4) as runner:
        for name in ("one", "two"):
            runner.set_lora(name, adapter_tensors(name), scale=2.0)
        for speculation in (None, Speculation(num_tokens=3)):
            llm = LLM.from_model(runner, max_rows=8, chunk_tokens=24, speculation=speculation)
            expected = [
                out.token_ids
                for prompt, name in zip(prompts, adapters, strict=True)
                for out in llm.generate([prompt], params, lora_request=name)
            ]
            runner.reset()
            with crowded(runner, 5):
                outs = llm.generate(prompts, params, lora_request=adapters)
            assert [out.token_ids for out in outs] == expected
            assert all(sum(out.preemptions for out in outs[at : at + 3]) > 0 for at in (0, 3))


def test_in_multi_step_programs(new_runner: MakeRunner, alone: list[list[int]]):
    with new_runner(multi_step_tokens=4, decode_rows=(8,)) as many:
        llm = LLM.from_model(many, letters(), max_rows=8, chunk_tokens=24)
        found = [llm.generate([prompt], one)[0].token_ids for prompt, one in zip(PROMPTS, ALL, strict=True)]
        assert found == alone


def test_what_is_forbidden_is_never_chosen(runner: ModelRunner, alone: list[list[int]]):
    assert 6 not in alone[4]
    assert set(alone[5]) <= set(range(3, 30))
    assert len(alone[6]) >= 6
    assert not set(alone[6][:5]) & set(range(12))
    text = "".join(chr(97 + token) for token in alone[7])
    assert "ab" not in text
    assert "c" not in text


def test_alternatives_are_reported_best_first_and_hold_the_greedy_token(runner: ModelRunner):
    llm = LLM.from_model(runner, max_rows=8, chunk_tokens=24)
    (out,) = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=5, logprobs=4))
    assert out.top_logprobs is not None
    assert out.logprobs is not None
    for token, logprob, likeliest in zip(out.token_ids, out.logprobs, out.top_logprobs, strict=True):
        values = list(likeliest.values())
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert next(iter(likeliest)) == token
        assert values[0] == pytest.approx(logprob, abs=1e-5)

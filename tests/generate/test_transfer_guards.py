"""`LLM` under JAX's transfer guards, also those of every thread: the engine has one of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.executor import ModelRunner
from tests.fake import SummingLLM

PROMPTS = [[1, 2, 3], [4] * 9]
PARAMS = SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9, seed=1, logprobs=3, prompt_logprobs=1, n=2)


@contextmanager
def of_all_threads(level: str) -> Iterator[None]:
    before = jax.config.jax_transfer_guard  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_transfer_guard", level)
    try:
        yield
    finally:
        jax.config.update("jax_transfer_guard", before)


@pytest.mark.parametrize("guard", [jax.transfer_guard, of_all_threads])
def test_generating_and_scoring_pass_a_guard(guard, runner: ModelRunner):
    llm = LLM.from_model(runner)
    texts, scores = [out.token_ids for out in llm.generate(PROMPTS, PARAMS)], llm.score(PROMPTS, [[5, 6], [7]])
    runner.reset()
    with guard("disallow"):
        assert [out.token_ids for out in llm.generate(PROMPTS, PARAMS)] == texts
        assert [one.logprobs for one in llm.score(PROMPTS, [[5, 6], [7]])] == [one.logprobs for one in scores]
        llm.set_params(runner.params)
        llm.reset()


def test_a_model_of_others_passes_too():
    llm, params = LLM.from_model(SummingLLM()), replace(PARAMS, prompt_logprobs=True)
    expected = llm.generate(PROMPTS, params)
    with of_all_threads("disallow"):
        assert [out.token_ids for out in llm.generate(PROMPTS, params)] == [out.token_ids for out in expected]

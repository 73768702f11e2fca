"""Speculation on a real model: prompt lookup on SmolLM2 gives what plain greedy generation gives."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import ferrum_jax
from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.generate.speculation import Speculation
from ferrum_jax.generate.tokenizer import load_tokenizer

NEARLY_EQUAL = 1e-3  # logits so close may change places between a step of one token and one of five
PASSAGE = "The quick brown fox jumps over the lazy dog. The dog sleeps, and the fox runs back to the wood."
TASKS = (
    "Repeat this word for word: {}",
    "Write this again, with `cat` in place of `dog`: {}",
    "Translate into French: {}",
    "Continue this text: {}",
    "Make a list of the animals in this text: {}",
    "def f(x):\n    # {}\n    return",
    "Explain in one sentence: {}",
    "Write a poem about this: {}",
    "{}\n\nQuestion: what does the fox do?\nAnswer:",
    "1, 2, 3, 4, 1, 2, 3, 4, {} 1, 2,",
)
VARIANTS = (
    PASSAGE,
    "Water boils at one hundred degrees and freezes at zero degrees.",
    "A list: apples, pears, plums; plums, pears, apples.",
    "for i in range(10):\n    for j in range(10):\n        print(i, j)",
    "Paris is the capital of France, Rome is the capital of Italy, and Madrid is the capital of Spain.",
    "The model reads the prompt, the model writes the answer, and the reader reads the answer.",
    '{"name": "Ada", "age": 36, "city": "London", "name2": "Alan", "age2": 41, "city2": "London"}',
    "She said that he said that she said that he had said nothing.",
    "In 1905 Einstein wrote four papers. In 1915 he wrote another one.",
    "If it rains, the street is wet. The street is wet. Did it rain?",
)


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[ferrum_jax.ModelRunner]:
    engine = EngineConfig(
        max_seqs=4, kv_capacity=256, block_size=64, decode_rows=(4,), query_blocks=(1,), block_tokens=64,
        verify_blocks=(4,), verify_tokens=5, max_step_tokens=256, spec_tokens=4,
    )  # fmt: skip
    with ferrum_jax.load(smollm2_path, engine=engine, progress=False) as runner:
        yield runner


def compare(model: ferrum_jax.ModelRunner, llm: LLM, prompts: Sequence[list[int]], count: int) -> None:
    """Demands the same answers with and without speculation, up to where the two best logits are nearly equal."""
    model.reset()
    params = SamplingParams(max_tokens=count)
    plain = LLM.from_model(model, llm.tokenizer, max_rows=4, chunk_tokens=64).generate(prompts, params)
    found = llm.generate(prompts, params)
    for out, expected, prompt in zip(found, plain, prompts, strict=True):
        if out.token_ids == expected.token_ids:
            continue
        same = next(at for at, (a, b) in enumerate(zip(out.token_ids, expected.token_ids, strict=False)) if a != b)
        best = np.sort(model.prefill("check", [*prompt, *expected.token_ids[:same]]))
        model.release("check")
        assert best[-1] - best[-2] < NEARLY_EQUAL, (prompt, same)
    assert model.kv_slot_capacity_snapshot().free_blocks == model.plan.cache.num_blocks


@pytest.fixture(scope="module")
def llm(model: ferrum_jax.ModelRunner, smollm2_path: Path) -> LLM:
    tokenizer = load_tokenizer(smollm2_path)
    return LLM.from_model(model, tokenizer, max_rows=4, chunk_tokens=64, speculation=Speculation(num_tokens=4))


def prompts_of(llm: LLM, tasks: Sequence[str], variants: Sequence[str]) -> list[list[int]]:
    return [
        llm.chat_prompt([{"role": "user", "content": task.replace("{}", variant)}])
        for variant in variants
        for task in tasks
    ]


@pytest.mark.slow
def test_prompt_lookup_answers_as_plain_greedy(model: ferrum_jax.ModelRunner, llm: LLM):
    compare(model, llm, prompts_of(llm, TASKS[:2], VARIANTS[:1]), 24)
    assert llm.acceptance_rate > 0.1


@pytest.mark.slow
def test_prompt_lookup_answers_as_plain_greedy_over_100_prompts(model: ferrum_jax.ModelRunner, llm: LLM):
    prompts = prompts_of(llm, TASKS, VARIANTS)
    assert len(prompts) == 100
    compare(model, llm, prompts, 48)

"""Answers of one prompt that do not all fit at once: it is read once, and every answer is the one of its seed."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.contract.errors import UnsupportedError
from tests.fake import CountingLLM, SummingLLM
from tests.generate.conftest import MakeRunner

PROMPTS = [list(range(1, 21)), list(range(5, 24)), [7, 3, 9] * 6]
PARAMS = SamplingParams(max_tokens=6, temperature=1.0, seed=40, n=11)


def run(new_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[list[int]], int]:
    """Returns all answers, and how many tokens were read in chunks of more than one."""
    read = 0
    with new_runner(**settings) as runner:
        llm, execute = LLM.from_model(runner, max_rows=4), runner.execute

        def counted(batch: Any) -> Any:
            nonlocal read
            read += sum(len(row.tokens) for row in batch if row.tokens is not None and len(row.tokens) > 1)
            return execute(batch)

        monkeypatch.setattr(runner, "execute", counted)
        outs = llm.generate(PROMPTS, PARAMS)
        assert runner.kv_slot_capacity_snapshot().free_blocks == runner.plan.cache.num_blocks
        return [out.token_ids for out in outs], read


def test_prompts_are_read_once_however_many_answers_wait(new_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch):
    answers, read = run(new_runner, monkeypatch)
    assert read == sum(len(prompt) - 1 for prompt in PROMPTS)
    with new_runner() as runner:
        llm = LLM.from_model(runner, max_rows=4)
        alone = [
            llm.generate([prompt], SamplingParams(max_tokens=6, temperature=1.0, seed=40 + at))[0].token_ids
            for prompt in PROMPTS
            for at in range(PARAMS.n)
        ]
    assert answers == alone


def test_a_short_kv_changes_no_answer(new_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch):
    answers, _ = run(new_runner, monkeypatch, kv_blocks=9)
    assert answers == run(new_runner, monkeypatch)[0]


def test_an_urgent_request_comes_before_the_answers_that_wait_to_take_over_a_sequence():
    llm = LLM.from_model(SummingLLM(), max_rows=1)
    scheduler, order = llm.engine.scheduler, []
    group = llm.group([1, 2, 3], SamplingParams(n=4, temperature=1.0, seed=0, max_tokens=3))
    urgent = llm.request([5], SamplingParams(max_tokens=2), priority=-1)
    for name, one in [*((f"answer {at}", one) for at, one in enumerate(group)), ("urgent", urgent)]:
        one.notify = lambda request, name=name: order.append(name) if request.is_done else None
    scheduler.submit(group[0])
    scheduler.step()
    scheduler.submit(urgent)
    while scheduler.has_work:
        scheduler.step()
    assert order == ["answer 0", "urgent", "answer 1", "answer 2", "answer 3"]


@pytest.mark.parametrize("window", [False, True])
def test_prefixes_may_be_forgotten_while_copies_run(window: bool, new_runner: MakeRunner):
    """Copies take over what was computed, also where a sliding-window cache has to compute it anew."""
    sizes: dict[str, Any] = {"max_seqs": 1, "decode_rows": (1,), "query_blocks": (1,), "prefix_cache": not window}
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1, n=3, ignore_eos=True)
    with new_runner(window_kv=window, **sizes) as runner:
        llm = LLM.from_model(runner)
        expected = [out.token_ids for out in llm.generate([list(range(1, 12))], params)]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(llm.generate, [list(range(1, 12))], params)
            while not answer.done():
                llm.reset_prefix_cache()
        assert [out.token_ids for out in answer.result()] == expected
        version = runner.params_version
        llm.reset_prefix_cache()
        assert runner.params_version == version
    with pytest.raises(UnsupportedError, match="not a ModelRunner"):
        LLM.from_model(CountingLLM()).reset_prefix_cache()

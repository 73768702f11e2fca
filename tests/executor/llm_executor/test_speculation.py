"""Drafted tokens: which are accepted, what comes after them, and that the rest leaves no trace."""

import math

import numpy as np
import pytest

from ferrum_jax import LlmExecutor
from ferrum_jax.contract.errors import ModelError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.llm_executor.model_calls import is_accepted
from tests.executor.asking import prompt, run, token
from tests.executor.conftest import Oracle
from tests.fake import SummingLLM

PROMPT = [3, 1, 4, 1, 5]


def _greedy(oracle: Oracle, tokens: list[int], count: int) -> list[int]:
    grown = list(tokens)
    for _ in range(count):
        grown.append(int(np.argmax(oracle(grown)[-1])))
    return grown[len(tokens) :]


@pytest.mark.parametrize("good", range(5))
def test_at_threshold_one_the_greedy_prefix_of_the_draft_is_accepted(runner: ModelRunner, oracle: Oracle, good: int):
    executor = LlmExecutor(runner)
    handle = run(executor.prefill(prompt(PROMPT))).kv_cache
    draft = _greedy(oracle, [*PROMPT, 9], 4)
    if good < 4:
        draft[good] = (draft[good] + 1) % 37
    out = run(executor.speculative_decode(token(9, handle), draft, 1.0))
    assert (list(out.accepted_tokens), out.acceptance_count) == (draft[:good], good)
    whole = [*PROMPT, 9, *draft[:good]]
    np.testing.assert_allclose(out.next_logits, oracle(whole)[-1:], atol=1e-4)
    assert out.kv_cache.num_tokens == len(whole)
    assert out.kv_cache.is_valid()
    on = run(executor.decode(token(2, out.kv_cache)))
    np.testing.assert_allclose(on.logits[0], oracle([*whole, 2])[-1], atol=1e-4)


def test_at_threshold_zero_everything_is_accepted(runner: ModelRunner, oracle: Oracle):
    executor = LlmExecutor(runner)
    handle = run(executor.prefill(prompt(PROMPT))).kv_cache
    out = run(executor.speculative_decode(token(9, handle), [1, 2, 3, 4, 5, 6, 7, 8], 0.0))
    assert list(out.accepted_tokens) == [1, 2, 3, 4, 5, 6, 7, 8]
    np.testing.assert_allclose(out.next_logits, oracle([*PROMPT, 9, 1, 2, 3, 4, 5, 6, 7, 8])[-1:], atol=1e-4)


def test_an_empty_draft_is_a_decode(runner: ModelRunner, oracle: Oracle):
    executor = LlmExecutor(runner)
    handle = run(executor.prefill(prompt(PROMPT))).kv_cache
    out = run(executor.speculative_decode(token(9, handle, position_ids=np.array([[5]])), [], 1.0))
    assert (list(out.accepted_tokens), out.kv_cache.num_tokens) == ([], 6)
    np.testing.assert_allclose(out.next_logits, oracle([*PROMPT, 9])[-1:], atol=1e-4)


def test_the_threshold_is_a_share_of_the_largest_probability():
    logits = np.log(np.array([0.5, 0.25, 0.2, 0.05], np.float32)) + 7
    accepted = [[is_accepted(logits, token, threshold) for token in range(4)] for threshold in (1.0, 0.45, 0.11, 0.0)]
    assert accepted == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]
    impossible = np.array([0.0, -math.inf], np.float32)
    assert is_accepted(impossible, 1, 0.0)
    assert not is_accepted(impossible, 1, 1e-300)


def test_one_forward_checks_the_whole_draft():
    model = SummingLLM()
    executor = LlmExecutor(model)
    handle = run(executor.prefill(prompt([1, 2, 3]))).kv_cache
    run(executor.speculative_decode(token(4, handle), [10, 20, 1], 1.0))
    assert model.calls == ["prefill", "forward_verify", "truncate_kv"]
    assert model.tokens == {"llm-cache-0": [1, 2, 3, 4, 10, 20]}


def test_a_roll_back_that_fails_takes_the_whole_call_back():
    class Stuck(SummingLLM):
        is_stuck = True

        def truncate_kv(self, cache_id: str, new_len: int) -> None:
            if self.is_stuck:
                self.is_stuck = False
                raise ModelError("injected")
            super().truncate_kv(cache_id, new_len)

    model = Stuck()
    executor = LlmExecutor(model)
    handle = run(executor.prefill(prompt([1, 2, 3]))).kv_cache
    with pytest.raises(ModelError):
        run(executor.speculative_decode(token(4, handle), [11], 1.0))
    assert model.tokens == {"llm-cache-0": [1, 2, 3]}
    assert handle.is_valid()

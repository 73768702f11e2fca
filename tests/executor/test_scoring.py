"""Log-probabilities of given tokens are those of the forward, whatever steps they were computed in."""

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from ferrum_jax.contract import RequestValidationError
from ferrum_jax.executor import ModelRunner
from tests.executor.conftest import CAPACITY, CFG, ENGINE, Oracle, late_compiles
from tests.fake import SummingLLM

TOLERANCE = 1e-5  # float32 sums in another order; log-probabilities are of order 5


def logprobs_of(logits: NDArray[np.float32]) -> NDArray[np.floating]:
    return logits - np.logaddexp.reduce(logits, axis=-1, dtype=np.float64, keepdims=True)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_the_forward_in_any_chunking_and_batch(seed: int, runner: ModelRunner, oracle: Oracle):
    rng = random.Random(seed)
    tokens = {key: [rng.randrange(CFG.vocab_size) for _ in range(rng.randint(2, 36))] for key in "abcd"}
    expected = {key: logprobs_of(oracle(row)) for key, row in tokens.items()}
    done, before = dict.fromkeys(tokens, 0), late_compiles(runner)
    while left := [key for key, row in tokens.items() if done[key] < len(row) - 1]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        ends = {key: rng.randint(done[key] + 1, len(tokens[key]) - 1) for key in chosen}
        rows = [(key, tokens[key][done[key] : end], tokens[key][done[key] + 1 : end + 1]) for key, end in ends.items()]
        for (key, end), found in zip(ends.items(), runner.score_batch(rows), strict=True):
            places = slice(done[key], end)
            wanted = np.take_along_axis(expected[key][places], np.array(tokens[key])[done[key] + 1 : end + 1, None], 1)
            np.testing.assert_allclose(found.logprobs, wanted[:, 0], rtol=0, atol=TOLERANCE)
            np.testing.assert_array_equal(found.greedy_ids, expected[key][places].argmax(axis=1))
            done[key] = end
            assert runner.kv_len(key) == end
    assert late_compiles(runner) == before


def test_two_numbers_a_token_cross_to_the_host(runner: ModelRunner):
    runner.score_batch([("a", [1, 2, 3], [2, 3, 4])])
    before = runner._device.fetched_bytes
    runner.score_batch([("a", [4, 5, 6], [5, 6, 7])])
    assert runner._device.fetched_bytes - before == 2 * 4 * ENGINE.verify_tokens  # type: ignore[operator]


def test_a_known_prefix_is_scored_all_the_same(reusing: ModelRunner, oracle: Oracle):
    tokens = list(range(30))
    reusing.prefill("a", tokens)
    (found,) = reusing.score_batch([("b", tokens[:-1], tokens[1:])])
    expected = logprobs_of(oracle(tokens))[np.arange(29), tokens[1:]]
    np.testing.assert_allclose(found.logprobs, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("a", [1, 2], [3])], "2 tokens, but 1 targets"),
        ([("a", [1], [CFG.vocab_size])], "position 0"),
        ([("a", [1], [2]), ("a", [1], [2])], "occurs twice"),
        ([("a", [], [])], "at least one token"),
        ([("a", [1])], "cache_id, tokens, targets"),
        ([("a", [1] * (CAPACITY + 1), [1] * (CAPACITY + 1))], str(CAPACITY)),
    ],
)
def test_what_cannot_be_scored_is_refused_and_changes_nothing(rows: list, message: str, runner: ModelRunner):
    with pytest.raises(RequestValidationError, match=message):
        runner.score_batch(rows)
    assert runner.kv_len("a") is None
    assert runner.score_batch([]) == []


def test_a_model_that_only_verifies_scores_on_the_host():
    model = SummingLLM()
    (found,) = model.score_batch([("a", [3, 4], [4, 7])])
    expected = logprobs_of(model.forward_verify("b", [3, 4]))
    np.testing.assert_allclose(found.logprobs, [expected[0, 4], expected[1, 7]], rtol=0, atol=1e-6)
    assert found.greedy_ids.tolist() == [3, 7]
    with pytest.raises(RequestValidationError, match="1 tokens, but 2 targets"):
        model.score_batch([("a", [3], [4, 7])])

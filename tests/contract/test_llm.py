from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from ferrum_jax.contract import ActiveLoraAdapter, FullLogits, GreedyArgmax, GreedyRepetitionPenalty, TokenSelectionMask
from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError
from tests.fake import CountingLLM


@pytest.fixture
def model() -> CountingLLM:
    return CountingLLM(vocab_size=10)


def test_four_methods_make_a_model(model: CountingLLM):
    first = model.prefill("a", [1, 2, 3])
    assert int(np.argmax(first)) == 5
    assert int(np.argmax(model.decode_batch([("a", 5, 3)])[0])) == 8
    model.prefill("b", [4])
    both = model.decode_batch_with_full_logits([("a", 8, 4), ("b", 4, 1)], True)
    assert [int(np.argmax(row)) for row in both] == [2, 5]


def test_policies_choose_on_the_host(model: CountingLLM):
    model.prefill("a", [1, 2, 3])
    model.prefill("b", [1, 2, 3])
    model.prefill("c", [1, 2, 3])
    mask = TokenSelectionMask(fingerprint=1, valid_token_mask=np.array([0, 1, 1], np.int8))
    penalty = GreedyRepetitionPenalty(penalty=100.0, token_ids=[8, 7])
    rows = model.decode_batch_with_logits_policy(
        [("a", 5, 3), ("b", 5, 3), ("c", 5, 3)],
        [FullLogits(), GreedyArgmax(token_mask=mask), GreedyArgmax(repetition_penalty=penalty)],
    )
    full, masked, penalised = rows
    assert isinstance(full, np.ndarray)
    assert int(np.argmax(full)) == 8
    assert masked == 2  # the nearest of the allowed ids 1 and 2; those past the mask's end are not allowed
    assert penalised == 8  # the best logit is 0, which a penalty does not move


def test_a_mask_that_allows_nothing_is_refused(model: CountingLLM):
    model.prefill("a", [1])
    mask = TokenSelectionMask(fingerprint="none", valid_token_mask=np.zeros(10, np.int8))
    with pytest.raises(RequestValidationError, match="allows none of 10"):
        model.decode_batch_with_logits_policy([("a", 1, 1)], [GreedyArgmax(token_mask=mask)])


def test_a_policy_that_is_refused_leaves_the_sequence_as_it_was(model: CountingLLM):
    model.prefill("a", [1])
    wrong = [
        GreedyArgmax(token_mask=TokenSelectionMask(fingerprint="none", valid_token_mask=np.zeros(10, np.int8))),
        GreedyArgmax(repetition_penalty=GreedyRepetitionPenalty(penalty=2.0, token_ids=[10])),
    ]
    for policy in wrong:
        with pytest.raises(RequestValidationError):
            model.decode_batch_with_logits_policy([("a", 1, 1)], [policy])
    with pytest.raises(RequestValidationError, match="'a' occurs twice"):
        model.decode_batch([("a", 1, 1), ("a", 1, 2)])
    assert model.lengths == {"a": 1}


def test_one_policy_per_row_is_needed(model: CountingLLM):
    with pytest.raises(RequestValidationError, match="1 rows need as many policies, 0"):
        model.decode_batch_with_logits_policy([("a", 1, 0)], [])


def test_what_is_no_batch_is_refused(model: CountingLLM):
    given = cast(Any, None)
    calls: list[Callable[[], Any]] = [
        lambda: model.decode_batch_with_logits_policy(given, []),
        lambda: model.decode_batch_with_logits_policy(cast(Any, iter(())), []),
        lambda: model.unified_forward_with_logits_policy(given, []),
        lambda: model.score_batch([("a", cast(Any, 5), [1])]),
        lambda: model.decode_batch([(cast(Any, ["x"]), 1, 0)] * 2),
        lambda: model.forward_verify_batch([(cast(Any, {}), [1])]),
    ]
    for call in calls:
        with pytest.raises(RequestValidationError):
            call()
    assert model.lengths == {}


def test_a_model_without_logits_in_its_unified_forward_has_none_to_choose_from():
    class Greedy(CountingLLM):
        def unified_forward_can_return_full_logits(self) -> bool:
            return False

    with pytest.raises(UnsupportedError, match="no unified forward with logits to choose from"):
        Greedy().unified_forward_with_logits_policy([("a", [1], 0, True)], [GreedyArgmax()])


def test_scores_are_log_probabilities_of_the_targets(model: CountingLLM):
    class Knowing(CountingLLM):
        def kv_len(self, cache_id: str) -> int:
            return self.lengths.get(cache_id, 0)

    (scores,) = Knowing(vocab_size=10).score_batch([("a", [1, 2], [1, 9])])
    weights = np.exp(-np.abs(np.arange(10) - np.array([[1], [3]])))
    expected = np.log(weights / weights.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(scores.logprobs, [expected[0, 1], expected[1, 9]], rtol=1e-6)
    assert scores.greedy_ids.tolist() == [1, 3]
    with pytest.raises(RequestValidationError, match="2 tokens, but 1 targets"):
        model.score_batch([("a", [1, 2], [1])])


def test_what_a_model_does_not_offer_is_refused_or_none(model: CountingLLM):
    with pytest.raises(UnsupportedError, match="CountingLLM has no unified forward"):
        model.unified_forward([("a", [1], 0, True)])
    with pytest.raises(UnsupportedError, match="roll"):
        model.truncate_kv("a", 0)
    with pytest.raises(UnsupportedError, match="does not know where 'a' ends"):
        model.forward_verify("a", [1])
    with pytest.raises(UnsupportedError, match="adapter 'x'"):
        model.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="x", path="y"))
    model.set_lora_adapter_for_cache("a", None)
    assert model.kv_len("a") is None
    assert model.reserve_kv_slots([]) is None
    assert model.kv_slot_capacity_snapshot() is None
    assert model.cache_metrics_snapshot() is None
    assert model.lora_metrics_snapshot() is None
    assert model.unified_forward_can_return_full_logits()
    assert model.kv_capacity() == 64
    model.prepare("a", 3)
    model.prepare_kv_capacity("a", 3)
    model.reset()
    assert model.lengths == {}


def test_verify_decodes_from_the_end_where_the_end_is_known():
    class Knowing(CountingLLM):
        def kv_len(self, cache_id: str) -> int:
            return self.lengths.get(cache_id, 0)

    model = Knowing(vocab_size=10)
    model.prefill("a", [1, 2])
    rows = model.forward_verify("a", [3, 4])
    assert rows.shape == (2, 10)
    assert np.argmax(rows, axis=1).tolist() == [5, 7]
    with pytest.raises(RequestValidationError, match="at least one token"):
        model.forward_verify("a", [])

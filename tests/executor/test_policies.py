"""Logits policies: the choice is made on the device, and only what was asked for crosses to the host."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.contract import (
    FullLogits,
    GreedyArgmax,
    GreedyRepetitionPenalty,
    LogitsReturnPolicy,
    TokenSelectionMask,
)
from ferrum_jax.contract.llm import choose
from ferrum_jax.executor import ModelRunner
from tests.executor.conftest import CFG, Oracle
from tests.executor.drawn import POLICIES

V = CFG.vocab_size
PROMPTS = {"a": [1, 2, 3], "b": [9, 8, 7, 6, 5], "c": [4] * 11, "d": [30, 20, 10]}


def last_bytes(runner: ModelRunner) -> int:
    return runner.cache_metrics_snapshot()["last_step_device_to_host_bytes"]


def same(answer: object, expected: np.ndarray, policy: LogitsReturnPolicy) -> None:
    if isinstance(policy, FullLogits):
        np.testing.assert_allclose(np.asarray(answer), expected, atol=1e-4)
    else:
        assert answer == choose(expected, policy)


def test_ids_equal_the_arg_max_of_full_logits_in_every_mix_of_rows(shared_runner: ModelRunner, oracle: Oracle):
    @settings(max_examples=20, deadline=None)
    @given(policies=st.lists(POLICIES, min_size=4, max_size=4), unified=st.booleans())
    def law(policies: list[LogitsReturnPolicy], unified: bool):
        shared_runner.reset()
        items = [(key, tokens, 0, True) for key, tokens in PROMPTS.items()]
        rows = shared_runner.unified_forward_with_logits_policy(items, policies)
        for row, tokens, policy in zip(rows, PROMPTS.values(), policies, strict=True):
            same(row, oracle(tokens)[-1], policy)
        if unified:
            mixed = [("a", [5], 3, True), ("b", [5, 6, 7], 5, True), ("c", [5], 11, True), ("d", [5], 3, False)]
            rows = shared_runner.unified_forward_with_logits_policy(mixed, policies)
            assert rows[3] is None
        else:
            mixed = [(key, [5], len(tokens), True) for key, tokens in PROMPTS.items()]
            batch = [(key, 5, at) for key, _, at, _ in mixed]
            rows = shared_runner.decode_batch_with_logits_policy(batch, policies)
        for row, (key, more, _, last), policy in zip(rows, mixed, policies, strict=True):
            if last:
                same(row, oracle([*PROMPTS[key], *more])[-1], policy)

    law()


@pytest.mark.parametrize("count", [1, 3, 4])
def test_of_greedy_rows_one_id_each_crosses_to_the_host(count: int, runner: ModelRunner):
    batch = [(key, 1, 0) for key in "abcd"[:count]]
    bucket = {1: 1, 3: 4, 4: 4}[count]
    ids = runner.decode_batch_with_logits_policy(batch, [GreedyArgmax()] * count)
    assert all(type(token) is int for token in ids)
    assert last_bytes(runner) == 12 * bucket
    runner.truncate_kv("a", 0)
    one_full = [FullLogits(), *[GreedyArgmax()] * (count - 1)]
    batch = [(key, 1, 0 if key == "a" else 1) for key, _, _ in batch]
    rows = runner.decode_batch_with_logits_policy(batch, one_full)
    assert isinstance(rows[0], np.ndarray)
    assert last_bytes(runner) == (4 * V + (0 if count == 1 else 12)) * bucket


def test_a_chunk_that_is_not_final_copies_nothing(runner: ModelRunner):
    assert runner.unified_forward_with_logits_policy([("a", [1, 2, 3], 0, False)], [GreedyArgmax()]) == [None]
    assert last_bytes(runner) == 0


def test_ids_past_the_end_of_a_mask_are_not_allowed(runner: ModelRunner):
    mask = TokenSelectionMask(fingerprint=0, valid_token_mask=np.array([0, 0, 1], np.int8))
    assert runner.decode_batch_with_logits_policy([("a", 1, 0)], [GreedyArgmax(token_mask=mask)]) == [2]
    longer = TokenSelectionMask(fingerprint=0, valid_token_mask=[*[0] * 36, 1, 1, 1, 1])
    assert runner.decode_batch_with_logits_policy([("a", 1, 1)], [GreedyArgmax(token_mask=longer)]) == [36]


def test_a_penalty_divides_positive_and_multiplies_negative_logits(runner: ModelRunner, oracle: Oracle):
    logits = oracle([1])[-1]
    best = int(np.argmax(logits))
    penalty = GreedyRepetitionPenalty(penalty=1e6, token_ids=[best, best])
    chosen = runner.decode_batch_with_logits_policy([("a", 1, 0)], [GreedyArgmax(repetition_penalty=penalty)])
    assert chosen == [choose(logits, GreedyArgmax(repetition_penalty=penalty))]
    assert chosen != [best]


def test_a_penalty_past_all_numbers_never_makes_room_for_what_is_not_allowed(runner: ModelRunner):
    worst = GreedyRepetitionPenalty(penalty=3e38, token_ids=list(range(V)))
    for allowed in (3, 17, 36):
        mask = TokenSelectionMask(fingerprint=0, valid_token_mask=[at == allowed for at in range(V)])
        policy = GreedyArgmax(token_mask=mask, repetition_penalty=worst)
        runner.release("a")
        assert runner.decode_batch_with_logits_policy([("a", 1, 0)], [policy]) == [allowed]
        assert choose(np.full(V, -20.0, np.float32), policy) == allowed

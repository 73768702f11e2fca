"""What a model may return, and what is a ModelError."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ferrum_jax.contract import Captured, FullLogits, GreedyArgmax, ModelError
from ferrum_jax.contract.answers import (
    TokenScores,
    check_answers,
    check_captured,
    check_kind,
    check_length,
    check_logit_rows,
    check_logits,
    check_scores,
)
from tests.fake import CountingLLM

MODEL = CountingLLM(vocab_size=5)
ROW = np.arange(5, dtype=np.float32)


def with_value(value: float) -> np.ndarray:
    row = ROW.copy()
    row[1] = value
    return row


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int32, ml_dtypes.bfloat16, list])
def test_logits_of_any_number_format_become_float32(kind: Any):
    found = check_logits(MODEL, ROW.tolist() if kind is list else ROW.astype(kind))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, ROW)


def test_a_token_may_be_impossible_but_not_all_of_them():
    assert check_logits(MODEL, with_value(-np.inf))[1] == -np.inf
    with pytest.raises(ModelError, match="CountingLLM returned logits that are not finite"):
        check_logits(MODEL, np.full(5, -np.inf, np.float32))


@pytest.mark.parametrize(
    ("logits", "match"),
    [
        (with_value(np.nan), "not finite"),
        (with_value(np.inf), "not finite"),
        (np.array([0, 0, 0, 0, 1e300]), "not finite"),
        (ROW[:4], r"shape \[4\], expected \[5\]"),
        (ROW[None], r"shape \[1, 5\], expected \[5\]"),
        (3, r"shape \[\], expected \[5\]"),
        (None, "dtype object, expected float32"),
        (["a"] * 5, "expected float32"),
        (np.zeros(5, np.bool_), "dtype bool"),
        ([[1.0], [1.0, 2.0]], "no array"),
    ],
)
def test_what_is_no_row_of_logits_is_a_model_error(logits: Any, match: str):
    with pytest.raises(ModelError, match=match):
        check_logits(MODEL, logits)
    with pytest.raises(ModelError):
        check_logit_rows(MODEL, [logits, logits], 2)


def test_rows_of_logits_are_counted():
    assert check_logit_rows(MODEL, [ROW, ROW], 2).shape == (2, 5)
    with pytest.raises(ModelError, match=r"shape \[2, 5\], expected \[3, 5\]"):
        check_logit_rows(MODEL, [ROW, ROW], 3)


@pytest.mark.parametrize("token", [-1, 5, 1.0, True, ROW])
def test_what_is_no_token_id_is_a_model_error(token: Any):
    with pytest.raises(ModelError, match="expected an id from 0 to 4"):
        check_answers(MODEL, [token], [GreedyArgmax()])
    assert check_answers(MODEL, [np.int64(4)], [GreedyArgmax()]) == [4]


def test_every_row_answers_as_it_was_asked():
    wanted = [FullLogits(), None, GreedyArgmax()]
    logits, none, token = check_answers(MODEL, [ROW, None, np.int32(3)], wanted)
    np.testing.assert_array_equal(np.asarray(logits), ROW)
    assert (none, token) == (None, 3)
    for answers, match in (
        ([ROW, None], "2 answers for 3 rows"),
        (None, "a NoneType for 3 rows"),
        ([None, None, 3], "None for row 0, where is_final is True"),
        ([ROW, 2, 3], "2 for row 1, where is_final is False"),
        ([3, None, 3], r"shape \[\], expected \[5\]"),
        ([ROW, None, ROW], "expected an id"),
    ):
        with pytest.raises(ModelError, match=match):
            check_answers(MODEL, answers, wanted)


def test_captures_have_the_layers_that_were_asked_for():
    logits, states, weights = np.stack([ROW, ROW]), np.ones((2, 1), np.float32), np.ones((3, 2, 4), np.float32)

    def captured(**changes: Any) -> Captured:
        return Captured(**{"logits": logits, "hidden": {1: states}, "attention_weights": {0: weights}, **changes})

    found = check_captured(MODEL, captured(), 2, [1], [0])
    assert (found.hidden[1].shape, found.attention_weights[0].shape) == ((2, 1), (3, 2, 4))
    for wrong, match in (
        (None, "capture returned None, expected a Captured"),
        (captured(hidden={}), r"no hidden states \[1\]"),
        (captured(attention_weights={1: weights}), r"no hidden states \[\] and no weights \[0\]"),
        (captured(hidden={1: states[:1]}), r"hidden states of shape \[1, 1\], expected \[2, 1\]"),
        (captured(hidden={1: states * np.nan}), "hidden states that are not finite"),
        (captured(attention_weights={0: weights[:, :1]}), r"attention weights of shape \[3, 1, 4\]"),
        (captured(attention_weights={0: weights[0]}), r"attention weights of shape \[2, 4\]"),
        (captured(logits=ROW), r"logits of shape \[5\], expected \[2, 5\]"),
    ):
        with pytest.raises(ModelError, match=match):
            check_captured(MODEL, wrong, 2, [1], [0])


def test_scores_are_one_figure_and_one_token_for_each_target():
    def scores(logprobs: Any = (-1.0, -np.inf), greedy_ids: Any = (0, 4)) -> TokenScores:
        return TokenScores(logprobs=logprobs, greedy_ids=greedy_ids)

    found = check_scores(MODEL, scores(), 2)
    assert (found.logprobs.dtype, found.greedy_ids.dtype) == (np.float32, np.int32)
    assert found.greedy_ids.tolist() == [0, 4]
    for wrong, match in (
        (None, "score_batch returned None, expected TokenScores"),
        (scores([-1.0]), r"log-probabilities of shape \[1\], expected \[2\]"),
        (scores([-1.0, np.nan]), "NaN or infinite"),
        (scores([-1.0, np.inf]), "NaN or infinite"),
        (scores(["a", "b"]), "log-probabilities of dtype <U1, expected float32"),
        (scores(greedy_ids=[0]), r"greedy ids of shape \[1\]"),
        (scores(greedy_ids=[0, 5]), "expected ids from 0 to 4"),
        (scores(greedy_ids=[0, 2**32]), "expected ids from 0 to 4"),
        (scores(greedy_ids=[0, -1]), "expected ids from 0 to 4"),
        (scores(greedy_ids=[0.0, 1.0]), "greedy ids of dtype float64, expected int64"),
        (scores(greedy_ids=np.zeros(2, ml_dtypes.bfloat16)), "greedy ids of dtype bfloat16"),
        (scores(greedy_ids=[True, False]), "greedy ids of dtype bool"),
    ):
        with pytest.raises(ModelError, match=match):
            check_scores(MODEL, wrong, 2)


def test_lengths_and_kinds_are_checked():
    assert check_length(MODEL, "kv_len", np.int32(3)) == 3
    assert check_kind(MODEL, "state", "x", str) == "x"
    assert check_kind(MODEL, "state", None, str) is None
    for wrong in (-1, "3", 2.0, True):
        with pytest.raises(ModelError, match=r"CountingLLM\.kv_len returned"):
            check_length(MODEL, "kv_len", wrong)
    with pytest.raises(ModelError, match=r"CountingLLM\.state returned 3, expected a str"):
        check_kind(MODEL, "state", 3, str)

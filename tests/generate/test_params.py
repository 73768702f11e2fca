"""What a caller may not ask for."""

from typing import Any

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.contract.errors import InvalidParameterError

REFUSED: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", float("inf")), ("temperature", float("nan")), ("temperature", "hot"),
    ("temperature", None), ("top_k", -2), ("top_k", 1.5), ("top_k", True), ("top_p", 0.0), ("top_p", 1.1),
    ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.01), ("repetition_penalty", 0.0), ("repetition_penalty", -1),
    ("repetition_penalty", 1e-46),
    ("repetition_penalty", float("inf")), ("seed", -1), ("seed", 2**32), ("seed", 0.5), ("max_tokens", 0),
    ("max_tokens", -3), ("max_tokens", 2.0), ("max_tokens", True), ("stop", ""), ("stop", ("a", "")), ("stop", (1,)),
    ("stop", 5), ("stop_token_ids", 5), ("stop_token_ids", (-1,)), ("stop_token_ids", ("a",)),
    ("ignore_eos", "no"), ("logprobs", 21), ("logprobs", -1), ("prompt_logprobs", "yes"), ("logprobs_mode", "cooked"),
    ("presence_penalty", float("nan")), ("frequency_penalty", "a"), ("min_tokens", -1), ("bad_words", ("",)),
    ("bad_words", 3),     ("allowed_token_ids", ()), ("allowed_token_ids", (-1,)), ("logit_bias", {1: float("nan")}),
    ("logit_bias", [1]), ("logit_bias", {1: -1e39}), ("logit_bias", {1: float("inf")}),
    ("logit_bias", dict.fromkeys(range(513), 1.0)), ("skip_special_tokens", 1), ("include_stop_str_in_output", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str, value: Any):
    with pytest.raises(InvalidParameterError, match=f"^{name} is .*, expected"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0), ("temperature", np.float32(0.7)), ("top_k", 0), ("top_k", np.int64(3)), ("top_p", 1),
        ("top_p", 1e-9), ("min_p", 0.0), ("min_p", 1.0), ("seed", 0), ("seed", 2**32 - 1), ("max_tokens", None),
        ("max_tokens", 1), ("stop", "x"), ("stop", ["x", "yy"]), ("stop_token_ids", [0, 5]),
    ],
)  # fmt: skip
def test_the_ends_of_every_range_are_allowed(name: str, value: Any):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_the_spellings_of_vllm_mean_what_they_mean_there():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(stop=None).stop_texts == ()
    assert SamplingParams(logprobs=None).num_logprobs == SamplingParams(logprobs=False).num_logprobs == -1
    assert SamplingParams(logprobs=True).num_logprobs == SamplingParams(logprobs=0).num_logprobs == 0
    assert SamplingParams(logprobs=5, prompt_logprobs=2).num_logprobs == 5


def test_fewer_tokens_at_most_than_at_least_are_refused():
    with pytest.raises(InvalidParameterError, match="min_tokens is 5, max_tokens is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_one_stop_text_is_as_a_tuple_of_one():
    assert SamplingParams(stop="ab").stop_texts == SamplingParams(stop=["ab"]).stop_texts == ("ab",)
    assert SamplingParams().stop_texts == ()


def test_later_changes_of_what_was_given_change_nothing():
    given: dict[str, Any] = {
        "logit_bias": {5: 1.0}, "allowed_token_ids": [5], "stop_token_ids": [7], "stop": ["x"], "bad_words": ["y"]
    }  # fmt: skip
    params = SamplingParams(**given)
    for value in given.values():
        value.clear()
    assert (params.logit_bias, params.allowed_token_ids, params.stop_token_ids) == ({5: 1.0}, [5], [7])
    assert (params.stop, params.bad_words) == (["x"], ["y"])


def test_the_defaults_are_greedy():
    params = SamplingParams()
    assert (params.temperature, params.repetition_penalty, params.num_logprobs) == (0.0, 1.0, -1)


def test_several_answers_need_a_temperature():
    with pytest.raises(InvalidParameterError, match="n is 8 and temperature is 0, which gives the same answer 8 times"):
        SamplingParams(n=8)
    assert SamplingParams(n=8, temperature=1.0).n == 8

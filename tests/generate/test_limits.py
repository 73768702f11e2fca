"""What one request may ask: it is refused when it is submitted, or ends alone; the model and the others go on."""

from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.compile.sampler import MAX_BIAS
from ferrum_jax.contract.errors import FerrumError, InvalidParameterError, RequestValidationError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.executor import ModelRunner
from ferrum_jax.generate.tokenizer import Tokenizer
from tests.fake import CountingLLM, answer
from tests.generate.conftest import is_empty
from tests.generate.test_request import letters

SIGNS = [chr(0x4E00 + at) for at in range(600)]
ONE, OTHER = SIGNS[0], SIGNS[1]
NESTED = [*SIGNS[:256], *(ONE + sign for sign in SIGNS[256:400]), *(OTHER + ONE + sign for sign in SIGNS[400:])]


def wide() -> LLM:
    """A model and a tokenizer of 600 signs."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={sign: at for at, sign in enumerate(SIGNS)}, merges=[]))
    return LLM.from_model(CountingLLM(vocab_size=len(SIGNS)), Tokenizer(backend=backend))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"bad_words": SIGNS}, r"up to 600 tokens at one time \(0 by logit_bias\), a slot holds 512"),
        ({"bad_words": [ONE], "logit_bias": dict.fromkeys(range(1, 513), 1.0)}, r"up to 513 tokens at .* \(512 by"),
        ({"bad_words": [ONE + sign for sign in SIGNS]}, "up to 600 tokens"),
        ({"bad_words": [*SIGNS[:256], *(ONE + sign for sign in SIGNS[256:])]}, "up to 600 tokens"),
        ({"bad_words": NESTED}, "up to 600 tokens"),
    ],
)  # fmt: skip
def test_more_tokens_than_a_slot_can_forbid_at_one_time_are_refused(params: dict[str, Any], says: str):
    llm = wide()
    with pytest.raises(InvalidParameterError, match=says):
        llm.generate([[1]], SamplingParams(**params))
    assert not llm.engine.scheduler.has_work


@pytest.mark.parametrize(
    "params",
    [
        {"bad_words": SIGNS[:MAX_BIAS]},
        {"bad_words": [ONE], "logit_bias": dict.fromkeys(range(512), 1.0)},  # one token, forbidden and biased
        {"bad_words": [sign + sign for sign in SIGNS]},  # each after another token
        {"bad_words": [*(ONE + sign for sign in SIGNS[:300]), *(OTHER + sign for sign in SIGNS[300:])]},
    ],
)
def test_as_many_as_a_slot_can_forbid_at_one_time_are_served(params: dict[str, Any]):
    (out,) = wide().generate([[1]], SamplingParams(max_tokens=5, **params))
    assert len(out.token_ids) == 5


def test_more_bad_words_than_can_be_compared_are_refused_before_they_are_read():
    with pytest.raises(InvalidParameterError, match="bad_words has 1025 texts, the limit is 1024"):
        SamplingParams(bad_words=[SIGNS[0]] * 1025)


def test_bad_words_become_tokens_once_for_all_answers_to_a_prompt(monkeypatch: pytest.MonkeyPatch):
    llm, encode, encoded = wide(), Tokenizer.encode, []

    def watched(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    group = llm.group(ONE + OTHER, SamplingParams(n=3, temperature=1.0, seed=5, bad_words=[ONE, OTHER + ONE, ONE]))
    assert len(encoded) == 1 + 2 * 3
    for at, request in enumerate(group):
        assert request.bad_words == [[0], [1, 0]]
        assert (request.text_prompt, request.prompt, request.seed) == (ONE + OTHER, [0, 1], 5 + at)


def test_a_bad_word_that_the_model_cannot_say_forbids_nothing():
    model = CountingLLM(vocab_size=5)
    llm = LLM.from_model(model, letters())  # of 23 tokens
    (out,) = llm.generate([[1]], SamplingParams(max_tokens=4, bad_words=["w"]))
    assert out.token_ids == answer(model, [1], 4)


def test_narrow_and_wide_integers_count_as_what_they_are():
    llm = LLM.from_model(CountingLLM(capacity=400), letters())
    ten: Any = np.uint8(10)
    for length in (250, 300):
        narrow, wide = (
            llm.request([1] * length, SamplingParams(min_tokens=least, top_k=most, temperature=1.0)).settings()
            for least, most in ((ten, 2**40), (10, 2**31 - 1))
        )
        assert (narrow.min_position, narrow.top_k) == (wide.min_position, wide.top_k) == (length + 10, 2**31 - 1)
    (out,) = llm.generate([[1]], SamplingParams(top_k=2**40, temperature=1.0, max_tokens=2))
    assert len(out.token_ids) == 2


@pytest.mark.parametrize("min_tokens", [2**31, 63])
def test_more_tokens_at_least_than_the_capacity_leaves_are_refused(min_tokens: int):
    llm = LLM.from_model(CountingLLM(capacity=64), letters())
    params = SamplingParams(min_tokens=min_tokens, max_tokens=None)
    with pytest.raises(
        RequestValidationError, match=f"min_tokens is {min_tokens}, a KV capacity of 64 leaves 62 after 3"
    ):
        llm.generate([[1, 2, 3]], params)
    (out,) = llm.generate([[1, 2, 3]], SamplingParams(min_tokens=62, max_tokens=None, stop_token_ids=tuple(range(16))))
    assert len(out.token_ids) == 62
    assert all(token >= 16 for token in out.token_ids[:-1])


NOTHING_LEFT: list[dict[str, Any]] = [
    {"allowed_token_ids": [5], "bad_words": ["f"]},
    {"allowed_token_ids": [5, 6], "logit_bias": {5: float("-inf"), 6: float("-inf")}},
    {"allowed_token_ids": [5, 6], "logit_bias": {6: float("-inf")}, "bad_words": ["f"]},
    {"allowed_token_ids": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 2},
    {"allowed_token_ids": [5, 6], "stop_token_ids": [6], "min_tokens": 2, "bad_words": ["f"]},
    {"logit_bias": dict.fromkeys(range(23), float("-inf"))},
    {"allowed_token_ids": [5], "bad_words": ["bf"]},  # the prompt ends in b
]


@pytest.mark.parametrize("params", NOTHING_LEFT)
def test_a_request_that_leaves_no_token_to_choose_is_refused(params: dict[str, Any]):
    model = CountingLLM()
    with pytest.raises(FerrumError, match=r"no token may be chosen at position 1: all \d+ that are allowed"):
        LLM.from_model(model, letters()).generate([[1]], SamplingParams(**params))
    assert model.lengths == {}


@pytest.mark.parametrize("given", [{"allowed_token_ids": [5, 23]}, {"logit_bias": {23: 1.0}}, {"stop_token_ids": [23]}])
def test_ids_that_the_model_does_not_have_are_refused(given: dict[str, Any]):
    (name,) = given
    with pytest.raises(RequestValidationError, match=f"{name} has 23, ids go from 0 to 22"):
        LLM.from_model(CountingLLM()).generate([[1]], SamplingParams(**given))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("where", ["on the host", "on the device"])
def test_an_answer_that_a_bad_word_leaves_no_token_ends_with_an_error_alone(
    where: str, temperature: float, runner: ModelRunner
):
    llm = LLM.from_model(runner if where == "on the device" else CountingLLM(), letters(), max_rows=4, chunk_tokens=8)
    plain = SamplingParams(max_tokens=12, temperature=temperature, seed=1)
    (alone,) = llm.generate([[3, 1, 4]], plain)
    trapped = SamplingParams(temperature=temperature, allowed_token_ids=[5], bad_words=["fff"], seed=2)
    caught, other = llm.generate([[2, 7], [3, 1, 4]], [trapped, plain], return_errors=True)
    assert (caught.finish_reason, caught.token_ids) == ("error", [5, 5])
    assert isinstance(caught.error, RequestValidationError)
    assert "no token may be chosen at position 4" in str(caught.error)
    assert (other.error, other.token_ids) == (None, alone.token_ids)
    if where == "on the device":
        assert runner.state is ExecutorState.Ready
        assert is_empty(runner)


def test_a_stop_id_may_be_the_only_token_once_it_may_be_chosen():
    llm = LLM.from_model(CountingLLM(), letters())
    params = SamplingParams(allowed_token_ids=[5, 6], stop_token_ids=[6], min_tokens=3, bad_words=["fff"])
    (out,) = llm.generate([[1]], params, return_errors=True)
    assert out.error is not None  # the third may be neither f nor the stop
    params = SamplingParams(allowed_token_ids=[5, 6], stop_token_ids=[6], min_tokens=2, bad_words=["fff"])
    (out,) = llm.generate([[1]], params)
    assert (out.token_ids[:2], out.token_ids[-1], out.finish_reason) == ([5, 5], 6, "stop")
    assert not np.isin(out.token_ids, [5, 6], invert=True).any()

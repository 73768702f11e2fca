"""Models of third parties: what they return is checked, and what they say they cannot is not asked of them."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.contract import DecodedRun, DecodeRun, TokenScores
from ferrum_jax.contract.errors import ModelError, UnsupportedError
from ferrum_jax.contract.llm import DecodeRow, UnifiedRow
from ferrum_jax.generate.drafts import Draft
from ferrum_jax.generate.speculation import Speculation
from tests.fake import CountingLLM, answer
from tests.generate.drafting import RollingLLM, Scripted

V = 23
PARAMS = SamplingParams(max_tokens=3)


def generated(model: Any) -> Any:
    return LLM.from_model(model).generate([[1], [2, 3]], PARAMS)


def scored(model: Any) -> Any:
    return LLM.from_model(model).score([[1, 2]], [[3, 4]])


def verified(model: Any) -> Any:
    drafts = Scripted(lambda want: Draft([1] * min(2, want.count)), num_tokens=2)
    return LLM.from_model(model, speculation=Speculation(draft=drafts)).generate([[1, 2]], SamplingParams(max_tokens=9))


def scores(logprobs: Any = (-1.0, -1.0), greedy_ids: Any = (1, 2)) -> TokenScores:
    return TokenScores(logprobs=np.array(logprobs), greedy_ids=np.array(greedy_ids))


row, nan = np.zeros(V, np.float32), np.full((3, V), np.nan, np.float32)
WRONG: dict[str, tuple[Callable[[Any], Any], str, Any, str]] = {
    "logits that are NaN": (generated, "prefill", nan[0], "logits that are not finite"),
    "logits that are booleans": (generated, "prefill", np.ones(V, bool), "logits of dtype bool"),
    "logits that are digits": (generated, "prefill", ["1"] * V, "logits of dtype <U1"),
    "decodes of another number": (generated, "decode_batch", [row], "1 answers for 2 rows"),
    "decodes that are None": (generated, "decode_batch", None, "a NoneType for 2 rows"),
    "decodes that are a number": (generated, "decode_batch", 3, "a int for 2 rows"),
    "unified answers that are None": (generated, "unified_forward", None, "a NoneType for 2 rows"),
    "verified logits that are NaN": (verified, "forward_verify_batch", [nan], "logits that are not finite"),
    "verified logits that are text": (verified, "forward_verify_batch", ["text"], "logits of dtype"),
    "verified logits of another shape": (verified, "forward_verify_batch", [row], r"shape \[23\], expected \[3, 23\]"),
    "verified logits that are ragged": (verified, "forward_verify_batch", [[[1.0], []]], "logits that are no array"),
    "scores that are None": (scored, "score_batch", [None], "score_batch returned None"),
    "scores of another length": (scored, "score_batch", [scores([-1.0])], r"shape \[1\], expected \[2\]"),
    "scores that are NaN": (scored, "score_batch", [scores([-1.0, np.nan])], "NaN"),
    "scored ids past the vocabulary": (scored, "score_batch", [scores(greedy_ids=[1, 23])], "greedy id"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_model_may_not_return_is_an_error_of_the_model(name: str):
    ask, method, given, says = WRONG[name]
    model = RollingLLM()
    setattr(model, method, lambda *_: given)
    with pytest.raises(ModelError, match=f"RollingLLM.*{says}"):
        ask(model)
    assert model.lengths == {}


class GreedyOnlyLLM(CountingLLM):
    """Its unified forward serves greedy policies alone, as it says."""

    def __init__(self):
        super().__init__()
        self.batches: list[int] = []

    def unified_forward(self, items: Sequence[UnifiedRow]) -> Any:
        return [self.next_token(tokens[-1], at) for _, tokens, at, _ in items]

    def unified_forward_can_return_full_logits(self) -> bool:
        return False

    def decode_batch(self, batch: Sequence[DecodeRow]) -> list[Any]:
        self.batches.append(len(batch))
        return super().decode_batch(batch)


def test_a_unified_forward_without_logits_is_not_called():
    model = GreedyOnlyLLM()
    outs = generated(model)
    assert [out.token_ids for out in outs] == [answer(model, prompt, 3) for prompt in ([1], [2, 3])]
    assert model.batches == [2, 2]


class Kept(CountingLLM):
    """The four required methods, and a sequence that goes on where it was left."""

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Any:
        time.sleep(0.002)
        return super().prefill(cache_id, tokens)


def test_the_likeliest_tokens_of_a_prompt_are_refused():
    with pytest.raises(UnsupportedError, match=r"need a ModelRunner, not a CountingLLM: prompt_logprobs=True reports"):
        LLM.from_model(CountingLLM()).generate([[1, 2]], SamplingParams(prompt_logprobs=2))


@pytest.mark.parametrize(("reported", "penalty", "loops"), [(None, 3.0, True), (True, 1.0, True), (True, 3.0, False)])
def test_tokens_of_a_loop_are_reported_under_the_distribution_they_were_drawn_from(
    reported: bool | None, penalty: float, loops: bool
):
    """`decode_n` need not tell it: where it is not the model's own, tokens are chosen one by one."""

    class Loop(RollingLLM):
        loop_tokens, calls = 4, 0

        def decode_n(self, runs: Sequence[DecodeRun], *, until_one_ends: bool = False) -> list[DecodedRun]:
            self.calls += 1
            found = []
            for run in runs:
                ids, figures = [run.token], []
                for at in range(run.max_tokens):
                    logits = self.decode(run.cache_id, ids[-1], run.pos + at)
                    ids.append(int(np.argmax(logits)))
                    figures.append(float(logits.max() - np.log(np.exp(logits).sum())))
                found.append(DecodedRun(ids[1:], figures))
            return found

    how, model = SamplingParams(max_tokens=6, repetition_penalty=penalty, logprobs=reported), Loop()
    (out,) = LLM.from_model(model).generate([[1, 2]], how)
    (plain,) = LLM.from_model(RollingLLM()).generate([[1, 2]], how)
    for found, expected in ((out.logprobs, plain.logprobs), (out.processed_logprobs, plain.processed_logprobs)):
        assert (found is None) == (expected is None) == (reported is None)
        np.testing.assert_allclose(found or (), expected or (), rtol=0, atol=1e-3)
    assert (model.calls > 0) == loops


def test_a_reset_reaches_a_model_that_has_none():
    model = Kept()
    llm, params = LLM.from_model(model), SamplingParams(max_tokens=40)
    expected = answer(model, [1, 2, 3], 40)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(llm.generate, [[1, 2, 3]], params)
        while not model.lengths and not begun.done():
            time.sleep(0.001)
        time.sleep(0.02)
        llm.reset()
        assert begun.result()[0].token_ids == expected
    assert model.lengths == {}

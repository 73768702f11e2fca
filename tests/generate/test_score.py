"""`LLM.score`, log-probabilities of prompts and answers, and several answers of one prompt."""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray

from ferrum_jax import LLM, SamplingParams, Speculation, models
from ferrum_jax.contract.errors import (
    InvalidParameterError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
)
from ferrum_jax.contract.llm import Logits
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.batch import ScheduledBatch, TargetScores
from ferrum_jax.generate.tokenizer import Tokenizer
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CAPACITY, CFG
from tests.fake import CountingLLM, SummingLLM, answer
from tests.generate.conftest import MakeRunner, is_empty

Oracle = Callable[[Sequence[int]], NDArray[np.floating]]
TOLERANCE = 1e-5  # float32 sums in another order, beside 2e-6 of the number itself
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [8] * 20, [36, 0, 1], [5], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11]]


@pytest.fixture(scope="module")
def oracle(params: ParamTree) -> Oracle:
    run = jax.jit(lambda tokens: models.forward(params, tokens, CFG))

    def logprobs(tokens: Sequence[int]) -> NDArray[np.floating]:
        padded = np.zeros((1, CAPACITY + 1), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(run(padded))[0, : len(tokens)]
        return logits - np.logaddexp.reduce(logits, axis=-1, dtype=np.float64, keepdims=True)

    return logprobs


@pytest.fixture
def llm(runner: ModelRunner) -> LLM:
    return LLM.from_model(runner, max_rows=4, chunk_tokens=11)


def chosen(oracle: Oracle, tokens: list[int], start: int) -> NDArray[np.floating]:
    """Log-probabilities of the tokens from `start` on, each given those before it."""
    return oracle(tokens)[np.arange(start - 1, len(tokens) - 1), tokens[start:]]


def test_score_targets_any_batch_are_those_of_the_forward(llm: LLM, oracle: Oracle):
    continuations = [[7, 7], [1] * 14, [0], [30, 31, 32], [5, 5, 5, 5], [12]]
    for _ in range(2):  # the second time, the prompts are known prefixes
        scores = llm.score(PROMPTS, continuations)
        for score, prompt, after in zip(scores, PROMPTS, continuations, strict=True):
            assert (score.prompt_token_ids, score.token_ids) == (prompt, after)
            expected = chosen(oracle, prompt + after, len(prompt))
            np.testing.assert_allclose(score.logprobs, expected, rtol=2e-6, atol=TOLERANCE)
            assert score.total == pytest.approx(expected.sum(), abs=len(after) * TOLERANCE)
            best = oracle(prompt + after)[len(prompt) - 1 : -1].argmax(axis=1)
            assert score.greedy_ids == best.tolist()
            assert score.is_greedy == (best.tolist() == after)
    assert llm.runner.cache_metrics_snapshot()["hits"] > 0
    assert is_empty(llm.runner)


@pytest.mark.slow
def test_a_greedy_answer_scores_as_greedy_and_with_its_own_logprobs(llm: LLM):
    outs = llm.generate(PROMPTS, SamplingParams(max_tokens=6, logprobs=True))
    for score, out in zip(llm.score(PROMPTS, [out.token_ids for out in outs]), outs, strict=True):
        assert score.is_greedy
        assert out.logprobs is not None
        np.testing.assert_allclose(score.logprobs, out.logprobs, rtol=2e-6, atol=TOLERANCE)


def test_one_prompt_goes_before_every_continuation_and_is_read_once(
    llm: LLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    read: list[int] = []
    execute = llm.runner.execute

    def counted(batch: ScheduledBatch):
        read.extend(row.num_tokens for row in batch if not isinstance(row.output, TargetScores))
        return execute(batch)

    monkeypatch.setattr(llm.runner, "execute", counted)
    prompt, continuations = [4, 2, 9, 9, 9, 1], [[1], [2], [3, 4], [9, 0, 1]]
    scores = llm.score(prompt, continuations)
    assert sum(read) == len(prompt) - 1
    for score, after in zip(scores, continuations, strict=True):
        assert (score.prompt_token_ids, score.token_ids) == (prompt, after)
        expected = chosen(oracle, prompt + after, len(prompt))
        np.testing.assert_allclose(score.logprobs, expected, rtol=2e-6, atol=TOLERANCE)
    short = llm.score([7], [[token] for token in range(6)])  # nothing is read before what is scored
    np.testing.assert_allclose([score.total for score in short], oracle([7])[-1][:6], rtol=2e-6, atol=TOLERANCE)
    many = llm.score(prompt, [[token] for token in range(20)])  # more than there are slots
    found = [score.total for score in many]
    np.testing.assert_allclose(found, oracle(prompt)[-1][:20], rtol=2e-6, atol=TOLERANCE)


@pytest.mark.parametrize("rows", [2, 3])
def test_continuations_that_share_a_prompt_while_its_scores_are_in_flight(
    rows: int, runner: ModelRunner, oracle: Oracle
):
    """A sequence then holds more than is counted as read, and a copy of it must not."""
    llm, draw = LLM.from_model(runner, max_rows=rows, chunk_tokens=11), random.Random(rows)
    for _ in range(12):
        asked = []
        for _ in range(draw.randint(2, 4)):
            prompt = [draw.randrange(CFG.vocab_size) for _ in range(draw.choice([1, 2, 5, 12]))]
            asked += [
                (prompt, [draw.randrange(CFG.vocab_size)] * draw.choice([1, 2, 4])) for _ in range(draw.randint(1, 4))
            ]
        for (prompt, after), score in zip(asked, llm.score(*zip(*asked, strict=True)), strict=True):
            expected = chosen(oracle, prompt + after, len(prompt))
            np.testing.assert_allclose(score.logprobs, expected, rtol=2e-6, atol=TOLERANCE)
    assert is_empty(runner)


def test_a_continuation_up_to_the_capacity_can_be_scored(llm: LLM, oracle: Oracle):
    after = [9] * (CAPACITY - 1)
    (score,) = llm.score([[1, 2]], [after])
    np.testing.assert_allclose(score.logprobs, chosen(oracle, [1, 2, *after], 2), rtol=2e-6, atol=TOLERANCE)
    with pytest.raises(RequestValidationError, match=f"{CAPACITY + 1} positions, the KV capacity is {CAPACITY}"):
        llm.score([[1, 2]], [[*after, 9]])


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ([[1], [2]], [[1]], "2 prompts, 1 continuations"),
        ([[1]], [[]], "1 and 0 are there"),
        ([[]], [[1]], "0 and 1 are there"),
        ([[1]], [[CFG.vocab_size]], "position 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(prompts, continuations, message: str, llm: LLM):
    with pytest.raises(RequestValidationError, match=message):
        llm.score(prompts, continuations)


class CrampedLLM(SummingLLM):
    """Scores row by row, has room for so many tokens, and refuses a row that begins with some token."""

    def __init__(self, room: int = 1000, refused: int = -1):
        super().__init__()
        self._room, self._refused = room, refused

    def forward_verify(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        if sum(map(len, self.tokens.values())) + len(tokens) > self._room:
            raise ResourceExhaustedError("full", needed=1, free=0)
        if tokens[0] == self._refused:
            raise RequestValidationError("not this token")
        return super().forward_verify(cache_id, tokens)


@pytest.mark.parametrize("refusing", [{"room": 12}, {"refused": 7}])
def test_a_batch_that_is_refused_half_way_scores_nothing_twice(refusing: dict[str, int]):
    prompts = [[1, 2, 3, 4, 5], [7, 9, 8, 6, 5], [4, 2, 9, 8, 6]]
    params = SamplingParams(max_tokens=2, prompt_logprobs=True)
    expected = LLM.from_model(CrampedLLM(), max_rows=4, chunk_tokens=64).generate(prompts, params)
    model = CrampedLLM(**refusing)
    outs = LLM.from_model(model, max_rows=4, chunk_tokens=64).generate(prompts, params, return_errors=True)
    assert [out.error is not None for out in outs] == [False, "refused" in refusing, False]
    for out, alone in zip(outs, expected, strict=True):
        if out.error is None:
            assert (out.token_ids, out.prompt_logprobs) == (alone.token_ids, alone.prompt_logprobs)
    assert model.tokens == {}


def test_texts_are_tokenised_together_and_scored_from_where_they_differ():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "c": 2, "bc": 3}, merges=[("b", "c")]))
    llm = LLM.from_model(SummingLLM(vocab_size=4), Tokenizer(backend=backend))
    (apart, merged, ids) = (
        llm.score("ab", "ab")[0], llm.score("ab", "ca")[0], llm.score([[0, 1]], ["ca"])[0]
    )  # fmt: skip
    assert (apart.prompt_token_ids, apart.token_ids) == ([0, 1], [0, 1])
    assert (merged.prompt_token_ids, merged.token_ids) == ([0], [3, 0])
    assert (ids.prompt_token_ids, ids.token_ids) == ([0, 1], [2, 0])


ALL = SamplingParams(max_tokens=7, temperature=0.9, seed=11, logprobs=True, prompt_logprobs=True)


def test_logprobs_of_prompts_and_answers_are_those_of_the_forward(llm: LLM, oracle: Oracle):
    for _ in range(2):  # known prefixes do not hide what was asked for
        asked = [
            replace(ALL, logprobs=at % 3 > 0, temperature=0.9 * (at % 2), repetition_penalty=1 + at % 4 / 2)
            for at in range(len(PROMPTS))
        ]  # the model's own are reported, whatever changes the choice
        for out in llm.generate(PROMPTS, asked):
            tokens = out.prompt_token_ids + out.token_ids
            expected = chosen(oracle, tokens, 1)
            count = len(out.prompt_token_ids)
            assert out.prompt_logprobs is not None
            assert out.prompt_logprobs[0] is None
            np.testing.assert_allclose(np.array(out.prompt_logprobs[1:], float), expected[: count - 1], atol=TOLERANCE)
            if out.logprobs is not None:
                np.testing.assert_allclose(out.logprobs, expected[count - 1 :], rtol=2e-6, atol=TOLERANCE)


def test_asking_for_logprobs_of_the_prompt_changes_no_answer(llm: LLM):
    plain = llm.generate(PROMPTS, replace(ALL, prompt_logprobs=False))
    assert [out.prompt_logprobs for out in plain] == [None] * len(PROMPTS)
    assert [out.token_ids for out in llm.generate(PROMPTS, ALL)] == [out.token_ids for out in plain]


def test_several_answers_are_those_of_their_seeds_and_the_prompt_is_read_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    read: list[int] = []
    execute = llm.runner.execute

    def counted(batch: ScheduledBatch):
        read.extend(row.num_tokens for row in batch if not isinstance(row.output, TargetScores))
        return execute(batch)

    prompt = [33, 34, 35] * 3
    expected = [llm.generate([prompt], replace(ALL, seed=(2**32 - 2 + at) % 2**32))[0] for at in range(4)]
    llm.runner.reset()
    monkeypatch.setattr(llm.runner, "execute", counted)
    outs = llm.generate([prompt], replace(ALL, seed=2**32 - 2, n=4, prompt_logprobs=False))
    assert sum(count for count in read if count > 1) == len(prompt) - 1  # each answer reads the last token itself
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert len({tuple(out.token_ids) for out in outs}) > 1
    for out, alone in zip(outs, expected, strict=True):
        assert out.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("max_rows", [1, 2, 4])
def test_answers_for_which_there_is_no_room_come_later(max_rows: int, runner: ModelRunner):
    runner.reset()
    asked = [replace(ALL, n=5), SamplingParams(max_tokens=3), replace(ALL, n=3, seed=40)]
    outs = LLM.from_model(runner, max_rows=max_rows).generate(PROMPTS[:3], asked)
    llm = LLM.from_model(runner, max_rows=1)
    seeds = [replace(ALL, seed=11 + at) for at in range(5)]
    later = [replace(ALL, seed=40 + at) for at in range(3)]
    alone = llm.generate([PROMPTS[0]] * 5 + [PROMPTS[1]] + [PROMPTS[2]] * 3, [*seeds, asked[1], *later])
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
    assert [out.prompt_logprobs is None for out in outs] == [out.prompt_logprobs is None for out in alone]
    assert is_empty(runner)


@pytest.mark.slow
def test_several_answers_of_a_model_that_cannot_fork_or_drafts(runner: ModelRunner):
    counting = CountingLLM()
    outs = LLM.from_model(counting).generate([[1, 2], [3]], SamplingParams(temperature=1.0, top_k=1, max_tokens=4, n=3))
    assert [out.token_ids for out in outs] == [answer(counting, [1, 2], 4)] * 3 + [answer(counting, [3], 4)] * 3
    runner.reset()
    drafting = LLM.from_model(runner, max_rows=4, speculation=Speculation(num_tokens=2))
    outs = drafting.generate(PROMPTS[:2], replace(ALL, temperature=1.0, top_k=1, n=2))
    plain = LLM.from_model(runner, max_rows=4).generate(PROMPTS[:2], replace(ALL, temperature=0.0))
    assert [out.token_ids for out in outs] == [plain[0].token_ids] * 2 + [plain[1].token_ids] * 2
    assert [out.prompt_logprobs for out in outs[:2]] == [plain[0].prompt_logprobs] * 2


def test_what_fails_while_a_prompt_is_read_fails_all_its_answers(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    def short(items):
        raise ResourceExhaustedError("no block", needed=1, free=0)

    runner.reset()
    llm = LLM.from_model(runner, max_rows=1)
    monkeypatch.setattr(runner, "execute", short)
    outs = llm.generate([[1, 2, 3]], SamplingParams(temperature=1.0, n=3), return_errors=True)
    assert [out.finish_reason for out in outs] == ["error"] * 3
    with pytest.raises(ResourceExhaustedError, match="no block") as caught:
        llm.generate([[5, 6]], SamplingParams(temperature=1.0, n=2))
    assert caught.value.__notes__ == ["prompts[0] of 1"]


def test_the_note_and_the_bar_count_continuations_though_some_share_their_prompt(monkeypatch: pytest.MonkeyPatch):
    counts: list[int] = []

    def counted(items: list[Any]) -> contextlib.AbstractContextManager[list[Any]]:
        counts.append(len(items))
        return contextlib.nullcontext(items)

    monkeypatch.setattr("ferrum_jax.generate.llm.track", lambda _: counted)
    llm = LLM.from_model(CrampedLLM(refused=9))
    assert len(llm.score([[1, 2], [1, 2], [7, 8]], [[3], [4], [5]], progress=True)) == 3
    with pytest.raises(RequestValidationError, match="not this token") as caught:
        llm.score([[1, 2], [1, 2], [7, 9]], [[3], [4], [5]], progress=True)
    assert caught.value.__notes__ == ["prompts[2] of 3"]
    assert counts == [3, 3]


def test_n_is_refused_where_it_makes_no_sense(llm: LLM):
    with pytest.raises(InvalidParameterError, match="n is 0"):
        SamplingParams(n=0)
    with pytest.raises(RequestValidationError, match="n is 2"):
        llm.stream([1], SamplingParams(temperature=1.0, n=2))


def test_the_longest_are_scored_first_and_scores_come_in_the_callers_order(
    llm: LLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    begun: list[int] = []
    submit = llm.engine.submit
    monkeypatch.setattr(
        llm.engine, "submit", lambda *these: (begun.extend(len(one.prompt) for one in these), submit(*these))
    )
    texts = [list(range(size, 1 + 2 * size)) for size in (3, 11, 5, 8)]
    scores = llm.score([text[:1] for text in texts], [text[1:] for text in texts])
    assert begun == [12, 9, 6, 4]
    for text, score in zip(texts, scores, strict=True):
        assert score.prompt_token_ids + score.token_ids == text
        np.testing.assert_allclose(score.logprobs, chosen(oracle, text, 1), rtol=0, atol=2e-5)


def agree(found: Sequence[float] | None, expected: Sequence[float] | None) -> None:
    assert found is not None
    assert expected is not None
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


DRAWN = SamplingParams(
    max_tokens=24, temperature=0.8, top_k=12, top_p=0.9, min_p=0.01, seed=5, repetition_penalty=1.3,
    presence_penalty=0.3, frequency_penalty=0.4, min_tokens=20, stop_token_ids=[4, 5], logit_bias={3: 2.0, 9: -1.0},
    logprobs=True, n=3,
)  # fmt: skip


@pytest.mark.parametrize("how", [
    DRAWN, replace(DRAWN, top_k=0, top_p=1.0, min_p=0.0), replace(DRAWN, temperature=0.0, n=1),
    SamplingParams(max_tokens=24, temperature=0.7, allowed_token_ids=list(range(20)), seed=1, logprobs=True),
])  # fmt: skip
@pytest.mark.parametrize("kv_blocks", [48, 14])
def test_what_was_drawn_scores_under_its_parameters_as_it_was_drawn(
    how: SamplingParams, kv_blocks: int, new_runner: MakeRunner
):
    """In blocks of few tokens, several of a sequence in one step, beside sequences with other parameters."""
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [8] * 11, [2]]
    with new_runner(prefix_cache=True, kv_blocks=kv_blocks, verify_blocks=(4,), verify_tokens=4) as runner:
        llm = LLM.from_model(runner, max_rows=6)
        outs = llm.generate(prompts, how)
        befores, afters = [out.prompt_token_ids for out in outs], [out.token_ids for out in outs]
        scores = llm.score(befores, afters, how)
        for score, out in zip(scores, outs, strict=True):
            agree(score.processed_logprobs, out.processed_logprobs)
            agree(score.logprobs, out.logprobs)
        mixed = [replace(how, temperature=0.5 + at / 4) for at in range(len(outs))]
        alone = [llm.score([one], [two], own)[0] for one, two, own in zip(befores, afters, mixed, strict=True)]
        for score, single in zip(llm.score(befores, afters, mixed), alone, strict=True):
            agree(score.processed_logprobs, single.processed_logprobs)
        assert all(one.processed_logprobs is None for one in llm.score(befores, afters))
        assert is_empty(runner)


def test_what_parameters_exclude_is_impossible_under_them(runner: ModelRunner):
    llm = LLM.from_model(runner)
    (score,) = llm.score([[1, 2]], [[3, 9]], SamplingParams(allowed_token_ids=[3, 4]))
    assert score.processed_logprobs is not None
    assert score.processed_logprobs[0] > -20
    assert score.processed_logprobs[1] == -np.inf
    assert np.isfinite(score.logprobs).all()
    with pytest.raises(RequestValidationError, match="2 prompts need as many SamplingParams, 1 were given"):
        llm.score([[1], [2]], [[3], [4]], [SamplingParams()])
    with pytest.raises(UnsupportedError, match="scores under parameters need a ModelRunner"):
        LLM.from_model(CountingLLM()).score([[1]], [[3]], SamplingParams())


def test_answers_of_one_prompt_share_no_scores(llm: LLM):
    outs = llm.generate([[33, 34, 35]], replace(ALL, n=2, prompt_logprobs=2))
    found: list[Any] = [one.prompt_top_logprobs for one in outs]
    assert found[0] == found[1]
    found[0][1].clear()
    assert len(found[1][1]) == 2


def test_a_warm_strict_model_scores_under_settings(new_runner: MakeRunner):
    with LLM.from_model(new_runner(strict=True)) as llm:
        llm.warmup(progress=False, scores=True)
        (score,) = llm.score([[3, 1, 4]], [[1, 2, 3]], SamplingParams(temperature=0.5, top_k=3))
        assert score.processed_logprobs is not None
        assert llm.runner.compile_stats()["compiles_after_warmup"] == 0

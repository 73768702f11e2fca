"""Speculation over hand-computable models: the answers of plain generation, fewer steps, nothing left behind."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.contract.errors import (
    ConfigError,
    DeviceError,
    ModelError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
)
from ferrum_jax.contract.llm import DecoderOnlyLLM, VerifyRow
from ferrum_jax.generate.drafts import Draft, DraftSource, DraftWant, PromptLookup
from ferrum_jax.generate.model_draft import Drawing, ModelDraft
from ferrum_jax.generate.scheduler import Scheduler
from tests.fake import CountingLLM, answer
from tests.generate.drafting import MarkovLLM, RollingLLM, Scripted, UnifiedRollingLLM, finish, request

PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 22), min_size=1, max_size=20), st.integers(1, 12)), min_size=1, max_size=8
)


def right(model: CountingLLM, upto: int = 100) -> DraftSource:
    """Proposes what is right for `upto` tokens and wrong from then on."""

    def say(want: DraftWant) -> Draft:
        said = answer(model, want.tokens, want.count)
        return Draft([token if at < upto else (token + 1) % 23 for at, token in enumerate(said)])

    return Scripted(say)


@settings(max_examples=150, deadline=None)
@given(
    work=PROMPTS,
    unified=st.booleans(),
    max_rows=st.integers(1, 5),
    chunk=st.integers(1, 9),
    slots=st.integers(1, 6),
    spare=st.integers(0, 40),
    proposals=st.lists(st.lists(st.integers(0, 22), max_size=5), min_size=1, max_size=7),
    upto=st.integers(0, 5),
)
def test_every_answer_is_right_whatever_is_drafted_and_however_little_room_there_is(
    work: list[tuple[list[int], int]],
    unified: bool,
    max_rows: int,
    chunk: int,
    slots: int,
    spare: int,
    proposals: list[list[int]],
    upto: int,
):
    longest = max(len(prompt) + count - 1 for prompt, count in work)
    kind = UnifiedRollingLLM if unified else RollingLLM
    model = kind(longest + spare, max_seqs=slots, capacity=longest)
    halfway = right(model, upto)

    def say(want: DraftWant) -> Draft:
        random = proposals[len(want.tokens) % len(proposals)]
        return halfway.propose([want])[0] if len(random) < 3 else Draft(random[: want.count])

    engine = Scheduler(model, max_rows=max_rows, chunk_tokens=chunk, drafts=Scripted(say))
    requests = [request(engine, prompt, count) for prompt, count in work]
    finish(engine, requests)
    for one, (prompt, count) in zip(requests, work, strict=True):
        output = one.output()
        assert output.token_ids == answer(model, prompt, count)
        assert output.finish_reason == "length"
        assert 0 <= output.accepted <= output.drafted
    assert model.lengths == {}


@pytest.mark.parametrize("upto", [0, 1, 3, 4])
def test_a_step_takes_what_was_agreed_and_one_more(upto: int):
    model = UnifiedRollingLLM()
    engine = Scheduler(model, max_rows=2, chunk_tokens=50, drafts=right(model, upto))
    requests = [request(engine, prompt, 21) for prompt in ([1, 2], [3])]
    steps = finish(engine, requests)
    assert steps == 1 + -(-20 // (upto + 1))
    for one, prompt in zip(requests, ([1, 2], [3]), strict=True):
        assert one.answer == answer(model, prompt, 21)
        assert (one.accepted == one.drafted) == (upto == 4)
    assert engine.speculator is not None
    assert engine.speculator.accepted == sum(one.accepted for one in requests)
    assert engine.speculator.drafted == sum(one.drafted for one in requests)


def test_the_kv_holds_what_was_accepted_after_every_step():
    model = UnifiedRollingLLM()
    engine = Scheduler(model, max_rows=2, chunk_tokens=3, drafts=right(model, 2))
    requests = [request(engine, prompt, 30) for prompt in ([1, 2], [3] * 7)]
    for one in requests:
        engine.submit(one)
    for _ in range(8):
        engine.step()
        for one in requests:
            assert model.fed[one.cache_id] == one.tokens[: one.num_read]


def test_rows_that_speculate_and_rows_that_do_not_share_a_step():
    model = UnifiedRollingLLM()
    verified: list[list[int]] = []
    verify = model.forward_verify_batch

    def watched(rows: Sequence[VerifyRow]):
        verified.append([len(tokens) for _, tokens in rows])
        return verify(rows)

    model.forward_verify_batch = watched
    draft = right(model)
    source = Scripted(lambda want: draft.propose([want])[0] if want.tokens[0] != 9 else Draft([]))
    engine = Scheduler(model, max_rows=4, chunk_tokens=4, drafts=source)
    requests = [request(engine, prompt, 11) for prompt in ([1], [2, 2], [9], [4] * 12)]
    finish(engine, requests)
    assert max(map(len, verified)) >= 2
    for one in requests:
        assert one.answer == answer(model, one.prompt, 11)


@pytest.mark.parametrize("at", range(9))
def test_tokens_after_a_stop_inside_an_accepted_run_are_dropped(at: int):
    model = UnifiedRollingLLM()
    expected = answer(model, [1], 9)
    engine = Scheduler(model, max_rows=1, chunk_tokens=50, drafts=right(model))
    one = request(engine, [1], 40, stop_ids=[expected[at]])
    finish(engine, [one])
    assert one.answer == expected[: expected.index(expected[at]) + 1]
    assert one.finish_reason == "stop"
    assert model.lengths == {}


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("capacity", range(4, 12))
def test_nothing_is_drafted_past_the_limit_or_the_capacity(count: int, capacity: int):
    model = UnifiedRollingLLM(capacity=capacity)  # it asserts that nothing goes past it
    wanted: list[DraftWant] = []
    draft = right(model)
    engine = Scheduler(
        model,
        max_rows=1,
        chunk_tokens=50,
        drafts=Scripted(lambda want: (wanted.append(want), draft.propose([want])[0])[1]),
    )
    count = min(count, capacity - 2)
    one = request(engine, [1, 2, 3], count)
    finish(engine, [one])
    assert one.answer == answer(model, [1, 2, 3], count)
    assert all(len(want.tokens) + want.count <= min(capacity, 3 + count - 1) for want in wanted)


def test_a_pool_too_full_for_a_draft_serves_without_it():
    model = UnifiedRollingLLM(pool=12)
    engine = Scheduler(model, max_rows=1, chunk_tokens=50, drafts=right(model, 0))  # 4 wrong ones each time
    one = request(engine, [1] * 5, 8)
    finish(engine, [one])
    assert one.answer == answer(model, [1] * 5, 8)


class Failing(Scripted):
    """A source that raises."""

    def __init__(self, problem: BaseException):
        super().__init__(lambda _: Draft([1]))
        self.problem = problem

    def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
        raise self.problem


@pytest.mark.parametrize(
    "problem", [ModelError("broken"), DeviceError("gone"), ResourceExhaustedError("full"), KeyError("no such id")]
)
def test_a_draft_that_fails_costs_nobody_an_answer(problem: Exception):
    model = UnifiedRollingLLM()
    engine = Scheduler(model, max_rows=2, chunk_tokens=50, drafts=Failing(problem))
    one = request(engine, [1, 2], 9)
    finish(engine, [one])
    assert one.output().token_ids == answer(model, [1, 2], 9)
    assert one.output().drafted == 0


def test_a_source_with_too_few_drafts_costs_nobody_an_answer():
    class Lazy(Scripted):
        def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
            return []

    model = UnifiedRollingLLM()
    engine = Scheduler(model, max_rows=2, chunk_tokens=50, drafts=Lazy(lambda _: Draft([])))
    one = request(engine, [1, 2], 9)
    finish(engine, [one])
    assert one.output().token_ids == answer(model, [1, 2], 9)


EVEN = np.full((2, 23), 1 / 23)
MALFORMED = {
    "none": None,
    "a token that is none": Draft([None]),  # type: ignore[list-item]
    "a token of 64 bits": Draft([2**40]),
    "fewer probabilities": Draft([1, 2], EVEN[:1]),
    "another vocabulary": Draft([1, 2], EVEN[:, :5]),
    "no numbers": Draft([1, 2], EVEN * np.nan),
    "no distribution": Draft([1, 2], EVEN / 40),
    "below zero": Draft([1, 2], np.where(np.arange(23) == 0, -1.0, 2 / 22) + 0 * EVEN),
}


@pytest.mark.parametrize("draft", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_malformed_draft_costs_time_only(draft: Draft, temperature: float):
    model = MarkovLLM(23, seed=1)
    alone = Scheduler(model, max_rows=2, chunk_tokens=50)
    plain = [request(alone, [number], 9, temperature=temperature) for number in (1, 2)]
    finish(alone, plain)
    said = plain[1].answer

    def say(want: DraftWant) -> Draft:
        return draft if want.tokens[0] == 1 else Draft(said[len(want.tokens) - 1 :][:2])

    source = Scripted(say, num_tokens=2)
    engine = Scheduler(model, max_rows=2, chunk_tokens=50, drafts=source)
    found = [request(engine, [number], 9, temperature=temperature) for number in (1, 2)]
    finish(engine, found)
    assert [one.output().token_ids for one in found] == [one.answer for one in plain]
    assert found[1].accepted > 0


def test_tokens_of_any_kind_of_integer_are_a_draft_and_a_greedy_answer_needs_no_probabilities():
    model = UnifiedRollingLLM()
    said = right(model)

    def say(want: DraftWant) -> Draft:
        (draft,) = said.propose([want])
        return Draft(np.array(draft.tokens), np.full((len(draft.tokens), 23), 1 / 23))  # type: ignore[arg-type]

    engine = Scheduler(model, max_rows=2, chunk_tokens=50, drafts=Scripted(say))
    one = request(engine, [1, 2], 9)
    finish(engine, [one])
    assert one.output().token_ids == answer(model, [1, 2], 9)
    assert one.accepted == one.drafted > 0


def test_what_the_model_refuses_of_a_draft_is_generated_without_it():
    model = UnifiedRollingLLM()
    engine = Scheduler(model, max_rows=2, chunk_tokens=50, drafts=Scripted(lambda _: Draft([0, 999])))
    one = request(engine, [1, 2], 9)
    finish(engine, [one])
    assert one.output().token_ids == answer(model, [1, 2], 9)


@pytest.mark.parametrize("problem", [ModelError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("method", ["forward_verify_batch", "truncate_kv"])
def test_an_error_while_verifying_rolls_back(method: str, problem: BaseException, monkeypatch: pytest.MonkeyPatch):
    model = UnifiedRollingLLM()
    engine = Scheduler(model, max_rows=2, chunk_tokens=50, drafts=right(model, 1))
    one, other = request(engine, [1, 2], 9), request(engine, [3], 9)
    for each in (one, other):
        engine.submit(each)
    engine.step()
    working, calls = getattr(model, method), []

    def broken(*arguments: object) -> object:
        calls.append(arguments)
        result = working(*arguments)
        if len(calls) == 1:  # it fails once, after it has done its work
            raise problem
        return result

    with monkeypatch.context() as patch:
        patch.setattr(model, method, broken)
        if isinstance(problem, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            finish(engine, [])
            while not one.is_done or not other.is_done:
                engine.step()
            assert one.answer == answer(model, [1, 2], 9)
        else:
            engine.step()
            with pytest.raises(ModelError):
                one.output()
    assert model.lengths == {}


def test_a_model_that_cannot_roll_back_is_refused():
    with pytest.raises(UnsupportedError, match="CountingLLM cannot roll its KV back"):
        Scheduler(CountingLLM(), max_rows=1, chunk_tokens=4, drafts=PromptLookup())


def test_a_model_that_cannot_verify_says_so_rather_than_going_on_without():
    class Lengthless(UnifiedRollingLLM):
        kv_len = DecoderOnlyLLM.kv_len

    model = Lengthless()
    engine = Scheduler(model, max_rows=2, chunk_tokens=50, drafts=right(model))
    requests = [request(engine, [1, 2], 9), request(engine, [1], 9)]
    finish(engine, requests)
    for one in requests:
        with pytest.raises(UnsupportedError, match="cannot verify"):
            one.output()
    assert model.lengths == {}


def test_prompt_lookup_finds_what_repeats():
    model = UnifiedRollingLLM(vocab_size=5, capacity=200)  # the answer repeats every few tokens
    engine = Scheduler(model, max_rows=1, chunk_tokens=50, drafts=PromptLookup(3, 4))
    one = request(engine, [1, 2], 150)
    steps = finish(engine, [one])
    assert one.answer == answer(model, [1, 2], 150)
    assert steps < 100
    assert one.accepted > 50


@pytest.mark.parametrize(
    ("drawing", "temperature"), [("best", 0.0), ("shared", 0.0), ("shared", 0.8), ("own", 0.0), ("own", 0.8)]
)
def test_a_draft_equal_to_the_target_is_always_right(drawing: Drawing, temperature: float):
    model, twin = MarkovLLM(11, seed=3), MarkovLLM(11, seed=3)
    engine = Scheduler(model, max_rows=3, chunk_tokens=50, drafts=ModelDraft(twin, 4, drawing=drawing))
    requests = [
        request(engine, [at, 2], 21, seed=at, temperature=temperature, top_k=7, repetition_penalty=1.2)
        for at in range(5)
    ]
    steps = finish(engine, requests)
    assert all(one.accepted == one.drafted == 16 for one in requests)
    assert steps == 2 * (1 + 4)
    assert model.lengths == twin.lengths == {}


@pytest.mark.parametrize("drawing", ["best", "shared"])
def test_what_is_drawn_is_what_plain_generation_draws(drawing: Drawing):
    asked = [
        {"temperature": 0.9, "seed": 1}, {"temperature": 1.5, "top_p": 0.8, "seed": 2, "repetition_penalty": 1.3},
        {"seed": 3, "repetition_penalty": 2.0, "logprobs": True}, {"temperature": 1.0, "min_p": 0.1, "logprobs": True},
    ]  # fmt: skip
    outputs = []
    for drafts in (None, ModelDraft(MarkovLLM(11, seed=4), 3, drawing=drawing), PromptLookup(2, 3)):
        engine = Scheduler(MarkovLLM(11, seed=3), max_rows=3, chunk_tokens=50, drafts=drafts)
        requests = [request(engine, [at, 2, 5, at, 2], 25, **one) for at, one in enumerate(asked)]
        finish(engine, requests)
        outputs.append([(one.output().token_ids, one.output().logprobs) for one in requests])
        assert drafts is None or sum(one.accepted for one in requests) > 0
    assert outputs[1] == outputs[0] == outputs[2]


def test_drafts_of_their_own_are_the_same_alone_and_in_a_batch_and_have_right_logprobs():
    def run(seeds: Sequence[int]) -> dict[int, tuple[list[int], list[float] | None]]:
        model = MarkovLLM(11, seed=3)
        drafts = ModelDraft(MarkovLLM(11, seed=4), 3, drawing="own")
        engine = Scheduler(model, max_rows=4, chunk_tokens=50, drafts=drafts)
        requests = [request(engine, [2, 5], 25, seed=seed, temperature=0.9, logprobs=True) for seed in seeds]
        finish(engine, requests)
        assert sum(one.accepted for one in requests) > 0
        for one in requests:
            rows = model.table[one.tokens[1:-1]]
            logprobs = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
            np.testing.assert_allclose(np.array(one.output().logprobs), logprobs[np.arange(25), one.answer], atol=1e-5)
        return {one.seed: (one.answer, one.output().logprobs) for one in requests}

    together = run(range(6))
    assert together == {seed: found for seed in range(6) for found in run([seed]).values()}
    assert len({tuple(tokens) for tokens, _ in together.values()}) == 6


def test_another_vocabulary_and_the_target_itself_are_refused():
    model = UnifiedRollingLLM()
    with pytest.raises(ConfigError, match="vocabulary of 11 tokens, the target one of 23"):
        Scheduler(model, max_rows=1, chunk_tokens=4, drafts=ModelDraft(MarkovLLM(11, seed=0)))
    with pytest.raises(ConfigError, match="the target itself"):
        Scheduler(model, max_rows=1, chunk_tokens=4, drafts=ModelDraft(model))


def test_refused_requests_fail_alone():
    class Picky(UnifiedRollingLLM):
        def prefill(self, cache_id: str, tokens: Sequence[int]):
            if 13 in tokens:
                raise RequestValidationError("13")
            return super().prefill(cache_id, tokens)

    model = Picky()
    engine = Scheduler(model, max_rows=3, chunk_tokens=50, drafts=right(model))
    requests = [request(engine, [at, 1], 30) for at in range(6)]
    finish(engine, requests)
    for one in requests:
        expected = answer(model, one.prompt, 30)
        if 13 in expected[:-1]:
            assert isinstance(one.error, RequestValidationError)
        else:
            assert one.answer == expected
    assert model.lengths == {}


def test_a_first_token_is_never_drafted():
    model, wants = UnifiedRollingLLM(), []
    source = Scripted(lambda want: (wants.append(want), Draft([1]))[1])
    engine = Scheduler(model, max_rows=2, chunk_tokens=4, drafts=source)
    one = request(engine, [1] * 5, 6)  # all but its last token is read by the first step
    finish(engine, [one])
    assert one.answer == answer(model, [1] * 5, 6)
    assert wants
    assert all(len(want.tokens) > want.num_prompt for want in wants)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5, "top_k": 3, "logprobs": 2}])
def test_probabilities_of_a_draft_change_no_answer_that_is_greedy_or_tells_its_own(params: dict[str, Any]):
    model, found = MarkovLLM(23, seed=1), []
    source = Scripted(lambda want: Draft([7, 9][: want.count], EVEN[: want.count]), num_tokens=2)
    for drafts in (None, source):
        engine = Scheduler(model, max_rows=2, chunk_tokens=50, drafts=drafts)
        one = request(engine, [1, 2, 3], 9, seed=4, **params)
        finish(engine, [one])
        found.append(one.output())
    plain, drafted = found
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == pytest.approx(plain.logprobs) if params else drafted.logprobs is None

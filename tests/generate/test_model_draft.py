"""A draft model's sequences: in step with the requests, gone with them, and never in their way."""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract.errors import (
    DeviceError,
    FerrumError,
    InvalidParameterError,
    ModelError,
    RequestValidationError,
    UnsupportedError,
)
from ferrum_jax.contract.llm import Logits, UnifiedRow, VerifyRow
from ferrum_jax.generate.drafts import DraftWant
from ferrum_jax.generate.model_draft import Drawing, ModelDraft
from ferrum_jax.generate.scheduler import Scheduler
from tests.fake import CountingLLM
from tests.generate.drafting import MarkovLLM, RollingLLM, UnifiedRollingLLM, finish, request

V = 11


class WatchedDraft(MarkovLLM):
    """Half like the target; can be made unable to do things, and to fail now and then."""

    def __init__(self, *, unified: bool = True, rolls: bool = True, fails: Sequence[int] = (), **sizes: int):
        super().__init__(V, seed=3)
        self.table[::2] = MarkovLLM(V, seed=4).table[::2]
        self._max_seqs = sizes.get("slots", 1000)
        self.pool = sizes.get("pool", 10_000)
        self.unified, self.rolls, self.fails, self.calls = unified, rolls, set(fails), 0

    def unified_forward(self, items: Sequence[UnifiedRow]) -> list[Logits | None]:
        if not self.unified:
            raise UnsupportedError("not unified")
        self._count()
        return super().unified_forward(items)

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        if not self.unified:
            self._count()
        return super().prefill(cache_id, tokens)

    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        if not self.rolls:
            raise UnsupportedError("not rolled")
        super().truncate_kv(cache_id, new_len)

    def _count(self) -> None:
        self.calls += 1
        if self.calls in self.fails:
            raise ModelError("now and then")


@settings(max_examples=25, deadline=None)
@given(
    work=st.lists(
        st.tuples(st.lists(st.integers(0, V - 1), min_size=1, max_size=12), st.integers(1, 12)), min_size=1, max_size=6
    ),
    unified=st.booleans(),
    rolls=st.booleans(),
    fails=st.lists(st.integers(1, 30), max_size=4),
    slots=st.integers(1, 5),
    pool=st.integers(1, 60),
    num_tokens=st.integers(1, 5),
    target_pool=st.integers(25, 80),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_a_draft_however_poor_changes_no_answer_and_leaves_nothing(
    work: list[tuple[list[int], int]],
    unified: bool,
    rolls: bool,
    fails: list[int],
    slots: int,
    pool: int,
    num_tokens: int,
    target_pool: int,
    temperature: float,
):
    draft = WatchedDraft(unified=unified, rolls=rolls, fails=fails, slots=slots, pool=pool)
    model = MarkovLLM(V, seed=3)
    model.pool = target_pool
    answers = []
    for source in (None, ModelDraft(draft, num_tokens)):
        engine = Scheduler(model, max_rows=4, chunk_tokens=7, drafts=source)
        requests = [request(engine, prompt, count, seed=7, temperature=temperature) for prompt, count in work]
        finish(engine, requests)
        answers.append([one.output().token_ids for one in requests])
    assert answers[0] == answers[1]
    assert model.lengths == draft.lengths == {}


class Sliced(list[int]):
    """Tokens that may be sliced, and not walked through."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("every token was looked at")


@pytest.mark.parametrize("drawing", ["shared", "own"])
def test_a_step_looks_at_new_tokens_alone(drawing: Drawing):
    model = WatchedDraft()
    drafts = ModelDraft(model, 4, drawing=drawing)
    settings = SlotSettings(temperature=0.8, seed=1)
    tokens = [1, 2, 3] * 6

    def propose(given: Sequence[int], cache_id: str) -> list[int]:
        return drafts.propose([DraftWant(cache_id, given, settings, 4, 3)])[0].tokens

    for right in (0, 1, 4, 2):
        found = propose(Sliced(tokens), "mine")
        assert found == propose(list(tokens), f"anew after {len(tokens)}")
        tokens += [*found[:right], (found[right] + 1) % V if right < 4 else 5]
    tokens[:] = [4, *tokens[1:-1], (tokens[-1] + 1) % V]  # another sequence under the same id
    assert propose(Sliced(tokens), "mine") == propose(list(tokens), "anew")
    assert model.fed[drafts._id("mine")] == model.fed[drafts._id("anew")]


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("rolls", [True, False])
def test_the_draft_holds_nothing_but_accepted_tokens_and_its_own(unified: bool, rolls: bool):
    draft = WatchedDraft(unified=unified, rolls=rolls)
    engine = Scheduler(MarkovLLM(V, seed=3), max_rows=3, chunk_tokens=50, drafts=ModelDraft(draft, 4))
    requests = [request(engine, [at, 1, 2], 30, seed=at, temperature=0.8) for at in range(3)]
    for one in requests:
        engine.submit(one)
    for _ in range(7):
        before = [list(one.tokens) for one in requests]
        engine.step()
        for one, known in zip(requests, before, strict=True):
            held = next((fed for cache_id, fed in draft.fed.items() if cache_id.endswith(one.cache_id)), known)
            assert held[: len(known)] == known
            assert len(held) <= len(known) + 3  # the last drafted token is never read
    assert sum(one.accepted for one in requests) > 0
    for one in requests:
        engine.abort(one)
    assert draft.lengths == {}


def test_sequences_are_drafted_in_one_batch_and_each_token_is_read_once():
    draft = WatchedDraft()
    engine = Scheduler(MarkovLLM(V, seed=3), max_rows=3, chunk_tokens=50, drafts=ModelDraft(draft, 4))
    requests = [request(engine, [at, 1, 2], 30) for at in range(3)]
    for one in requests:
        engine.submit(one)
    engine.step()
    assert draft.calls == 0  # prompts are read first
    engine.step()
    assert draft.calls == 4


@pytest.mark.parametrize("slots", [1, 2])
def test_who_finds_no_room_in_the_draft_goes_on_without(slots: int):
    draft = WatchedDraft(slots=slots)
    engine = Scheduler(MarkovLLM(V, seed=3), max_rows=4, chunk_tokens=50, drafts=ModelDraft(draft, 4))
    requests = [request(engine, [at, 1, 2], 30) for at in range(4)]
    for one in requests:
        engine.submit(one)
    for _ in range(4):
        engine.step()
    assert [one.drafted > 0 for one in requests] == [at < slots for at in range(4)]
    finish(engine, [])
    while not all(one.is_done for one in requests):
        engine.step()
    assert draft.lengths == {}


@pytest.mark.parametrize("drawing", ["shared", "own"])
def test_one_that_the_draft_refuses_does_not_end_drafting_for_others(drawing: Drawing):
    draft = WatchedDraft()
    read, verify = draft.unified_forward, draft.forward_verify_batch

    def check(cache_ids: Sequence[str]) -> None:
        if any(one.endswith(requests[1].cache_id) for one in cache_ids):
            raise RequestValidationError("this one")

    draft.unified_forward = lambda items: (check([one[0] for one in items]), read(items))[1]
    draft.forward_verify_batch = lambda rows: (check([one[0] for one in rows]), verify(rows))[1]
    engine = Scheduler(MarkovLLM(V, seed=3), max_rows=3, chunk_tokens=50, drafts=ModelDraft(draft, 4, drawing=drawing))
    requests = [request(engine, [at, 1, 2], 9, temperature=0.8) for at in range(3)]
    finish(engine, requests)
    assert [one.drafted > 0 for one in requests] == [True, False, True]
    assert draft.lengths == {}


def test_own_draws_ask_for_the_distributions_after_two_tokens_at_most():
    draft, sizes = WatchedDraft(), []
    verify = draft.forward_verify_batch
    draft.forward_verify_batch = lambda rows: (sizes.extend(len(row[1]) for row in rows), verify(rows))[1]
    engine = Scheduler(MarkovLLM(V, seed=3), max_rows=2, chunk_tokens=50, drafts=ModelDraft(draft, 4, drawing="own"))
    requests = [request(engine, [1, 2] * count, 20, temperature=0.8) for count in (1, 9)]
    finish(engine, requests)
    assert all(one.drafted > 0 for one in requests)
    assert set(sizes) == {1, 2}


def test_one_too_long_for_the_draft_does_not_end_drafting_for_others():
    draft = WatchedDraft(pool=12)
    engine = Scheduler(MarkovLLM(V, seed=3), max_rows=4, chunk_tokens=50, drafts=ModelDraft(draft, 4))
    long, short = request(engine, [1, 2] * 10, 9), request(engine, [1, 2], 8)
    finish(engine, [long])
    finish(engine, [short])
    assert (long.drafted > 0, short.drafted > 0) == (False, True)


def test_a_dead_draft_is_left_alone_until_a_reset():
    draft = WatchedDraft()
    working = draft.unified_forward

    def dead(items: Sequence[UnifiedRow]) -> list[Logits | None]:
        raise DeviceError("gone")

    draft.unified_forward = dead
    model = MarkovLLM(V, seed=3)
    engine = Scheduler(model, max_rows=3, chunk_tokens=50, drafts=ModelDraft(draft, 4))
    one = request(engine, [1, 2], 30)
    engine.submit(one)
    for _ in range(5):
        engine.step()
    assert (one.drafted, len(one.answer)) == (0, 5)
    assert draft.lengths == {}
    draft.unified_forward = working
    model.reset, draft.reset = model.lengths.clear, draft.lengths.clear
    engine.reset()
    engine.step()
    engine.step()
    assert one.drafted > 0


def test_a_request_that_fails_frees_its_draft():
    model, draft = MarkovLLM(V, seed=3), WatchedDraft()
    engine = Scheduler(model, max_rows=3, chunk_tokens=50, drafts=ModelDraft(draft, 4))
    one = request(engine, [1, 2], 30)
    engine.submit(one)
    for _ in range(3):
        engine.step()
    assert len(draft.lengths) == 1

    def broken(rows: Sequence[VerifyRow]) -> list[NDArray[np.float32]]:
        raise ModelError("broken")

    model.forward_verify_batch = broken
    engine.step()
    with pytest.raises(ModelError):
        one.output()
    assert model.lengths == draft.lengths == {}


def test_a_draft_that_is_shorter_than_the_target_stops_drafting():
    model = UnifiedRollingLLM(capacity=64)
    draft = UnifiedRollingLLM(capacity=20)  # it asserts that nothing goes past it
    engine = Scheduler(model, max_rows=1, chunk_tokens=50, drafts=ModelDraft(draft, 4))
    one = request(engine, [1, 2], 50)
    finish(engine, [one])
    assert one.accepted == one.drafted
    assert 14 <= one.accepted <= 19
    assert draft.lengths == {}


def test_a_minimal_model_can_draft():
    draft = CountingLLM()
    engine = Scheduler(RollingLLM(), max_rows=2, chunk_tokens=50, drafts=ModelDraft(draft, 4))
    requests = [request(engine, prompt, 21) for prompt in ([1, 2], [3])]
    assert finish(engine, requests) == 5
    assert all(one.accepted == one.drafted == 16 for one in requests)
    assert draft.lengths == {}


@pytest.mark.parametrize(("name", "value"), [("num_tokens", 0), ("drawing", "worst")])
def test_a_wrong_setting_is_refused(name: str, value: Any):
    with pytest.raises(InvalidParameterError, match=f"{name} is {value!r}") as refusal:
        ModelDraft(CountingLLM(), **{name: value})
    assert isinstance(refusal.value, FerrumError)

"""Continuous batching over hand-computable models: right answers, everything released, no livelock."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.contract.errors import (
    CancelledError,
    DeviceError,
    ModelError,
    RequestValidationError,
    ResourceExhaustedError,
)
from ferrum_jax.contract.llm import DecodeRow, Logits, UnifiedRow
from ferrum_jax.generate.scheduler import Scheduler
from tests.fake import CountingLLM, SummingLLM, answer
from tests.generate.drafting import finish, request


class PooledLLM(CountingLLM):
    """Holds `pool` positions in all, and refuses to go past its capacity."""

    def __init__(self, pool: int, **sizes: int):
        super().__init__(**sizes)
        self.pool = pool

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        assert self.lengths.get(cache_id, 0) + len(tokens) <= self.kv_capacity()
        free = self.pool - sum(self.lengths.values())
        if len(tokens) > free:
            raise ResourceExhaustedError("no room", needed=len(tokens), free=free)
        return super().prefill(cache_id, tokens)


class UnifiedLLM(PooledLLM):
    """The same with a unified forward, all or nothing; it keeps the sizes of its batches."""

    def __init__(self, pool: int, **sizes: int):
        super().__init__(pool, **sizes)
        self.batches: list[list[int]] = []

    def unified_forward(self, items: Sequence[UnifiedRow]) -> list[Logits | None]:
        free = self.pool - sum(self.lengths.values())
        needed = sum(len(tokens) for _, tokens, _, _ in items)
        newcomers = sum(cache_id not in self.lengths for cache_id, _, _, _ in items)
        if needed > free or newcomers > self._max_seqs - len(self.lengths):
            raise ResourceExhaustedError("no room", needed=needed, free=free)
        rows: list[Logits | None] = []
        for cache_id, tokens, offset, is_final in items:
            assert offset == self.lengths.get(cache_id, 0)
            logits = self.prefill(cache_id, tokens)
            rows.append(logits if is_final else None)
        self.batches.append([len(tokens) for _, tokens, _, _ in items])
        return rows

    def decode_batch(self, batch: Sequence[DecodeRow]) -> list[Logits]:
        raise AssertionError("a model with a unified forward is served by it alone")


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 22), min_size=1, max_size=20), st.integers(1, 12), st.integers(-1, 1)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    work=PROMPTS,
    unified=st.booleans(),
    max_rows=st.integers(1, 5),
    chunk=st.integers(1, 9),
    slots=st.integers(1, 6),
    spare=st.integers(0, 40),
)
def test_every_answer_is_right_however_little_room_there_is(
    work: list[tuple[list[int], int, int]], unified: bool, max_rows: int, chunk: int, slots: int, spare: int
):
    longest = max(len(prompt) + count - 1 for prompt, count, _ in work)
    kind = UnifiedLLM if unified else PooledLLM
    model = kind(longest + spare, max_seqs=slots)
    engine = Scheduler(model, max_rows=max_rows, chunk_tokens=chunk)
    requests = [request(engine, prompt, count, priority=priority) for prompt, count, priority in work]
    finish(engine, requests)
    for one, (prompt, count, _) in zip(requests, work, strict=True):
        output = one.output()
        assert output.token_ids == answer(model, prompt, count)
        assert output.finish_reason == "length"
    assert model.lengths == {}


def test_prompts_are_read_in_chunks_beside_decodes_oldest_first():
    model = UnifiedLLM(1000)
    engine = Scheduler(model, max_rows=3, chunk_tokens=4)
    finish(engine, [request(engine, [1] * n, 3) for n in (2, 7, 3)])
    # The first is read and decodes from then on; the others share what is left of 4 prompt tokens in a step.
    assert model.batches == [[2, 2], [1, 4], [1, 1, 3], [1, 1], [1, 1]]


def test_no_more_rows_run_than_are_allowed():
    model = UnifiedLLM(1000)
    engine = Scheduler(model, max_rows=2, chunk_tokens=50)
    finish(engine, [request(engine, [1, 2], 5) for _ in range(5)])
    assert max(map(len, model.batches)) == 2


def test_a_request_joins_while_others_run():
    model = UnifiedLLM(1000)
    engine = Scheduler(model, max_rows=2, chunk_tokens=50)
    first, second = request(engine, [1, 2], 4), request(engine, [3], 2)
    engine.submit(first)
    engine.step()
    finish(engine, [second])
    assert model.batches == [[2], [1, 1], [1, 1]]
    assert not first.is_done


def test_the_request_that_joined_last_gives_way_and_is_read_anew():
    model = UnifiedLLM(10)
    engine = Scheduler(model, max_rows=2, chunk_tokens=50)
    old, young = request(engine, [1] * 4, 5), request(engine, [2] * 4, 3)
    finish(engine, [old, young])
    # 4 + 4, 5 + 5, then there is no room for two more: the older goes on alone, the younger reads its 6 again.
    assert model.batches == [[4, 4], [1, 1], [1], [1], [1], [6]]
    assert old.output().token_ids == answer(model, [1] * 4, 5)
    assert young.output().token_ids == answer(model, [2] * 4, 3)


def test_who_gave_way_comes_before_those_who_wait_and_then_all_places_are_filled_again():
    model = UnifiedLLM(10)
    engine = Scheduler(model, max_rows=2, chunk_tokens=50)
    old, young = request(engine, [1] * 4, 5), request(engine, [2] * 4, 3)
    finish(engine, [old, young, request(engine, [3], 2), request(engine, [4], 2)])
    # As above; when the older has ended, the younger is read again beside the third, and then the fourth joins.
    assert model.batches == [[4, 4], [1, 1], [1], [1], [1], [6, 1], [1, 1], [1]]


def test_a_short_kv_refuses_few_batches_however_many_rows_there_are():
    """A refused batch computes nothing, so rows are found by halving and doubling, not by one try for each of them."""
    refused = []

    class Refusing(UnifiedLLM):
        def unified_forward(self, items: Sequence[UnifiedRow]) -> list[Logits | None]:
            try:
                return super().unified_forward(items)
            except ResourceExhaustedError:
                refused.append(len(items))
                raise

    model = Refusing(200, max_seqs=200)
    engine = Scheduler(model, max_rows=100, chunk_tokens=1000)
    requests = [request(engine, [at % 20] * 8, 6) for at in range(100)]  # of 13 positions each: 15 fit at a time
    finish(engine, requests)
    assert len(refused) < 0.6 * len(requests)
    assert sum(len(one) for one in model.batches) > 10 * len(model.batches)
    for at, one in enumerate(requests):
        assert one.output().token_ids == answer(model, [at % 20] * 8, 6)


def test_who_waits_begins_by_priority_and_takes_no_row_of_one_that_runs():
    model = UnifiedLLM(1000)
    engine = Scheduler(model, max_rows=1, chunk_tokens=50)
    ended: list[int] = []
    for at, priority in enumerate([5, 0, 3, -1, 0]):
        one = request(engine, [1] * (at + 1), 2, priority=priority)
        one.notify = lambda one: ended.append(len(one.prompt) - 1) if one.is_done else None
        engine.submit(one)
        if at == 0:
            engine.step()
    finish(engine, [])
    while engine.has_work:
        engine.step()
    assert ended == [0, 3, 1, 4, 2]


def test_the_least_urgent_request_gives_way_whoever_joined_last():
    model = UnifiedLLM(10)
    engine = Scheduler(model, max_rows=2, chunk_tokens=50)
    old, young = request(engine, [1] * 4, 3, priority=1), request(engine, [2] * 4, 5)
    finish(engine, [old, young])
    assert (old.preemptions, young.preemptions) == (1, 0)
    assert model.batches == [[4, 4], [1, 1], [1], [1], [1], [6]]
    assert old.output().token_ids == answer(model, [1] * 4, 3)


def test_urgent_prompts_are_read_first():
    model = UnifiedLLM(1000)
    engine = Scheduler(model, max_rows=3, chunk_tokens=5)
    finish(engine, [request(engine, [1] * n, 1, priority=priority) for n, priority in ((7, 2), (5, 1), (3, 0))])
    # The shortest is the most urgent, and the others share what it leaves.
    assert model.batches == [[3, 2], [3, 2], [5]]


@pytest.mark.parametrize("kind", [PooledLLM, UnifiedLLM])
def test_a_request_that_can_never_fit_fails_alone(kind: type[PooledLLM]):
    model = kind(9)
    engine = Scheduler(model, max_rows=3, chunk_tokens=4)
    small, large, last = request(engine, [1, 2], 3), request(engine, [3] * 12, 2), request(engine, [4] * 5, 4)
    finish(engine, [small, large, last], most=100)
    for one, prompt, count in ((small, [1, 2], 3), (last, [4] * 5, 4)):
        assert one.output().token_ids == answer(model, prompt, count)
    with pytest.raises(ResourceExhaustedError, match="no room"):
        large.output()
    assert model.lengths == {}


def test_a_request_that_outgrows_the_pool_fails_rather_than_going_on_for_ever():
    model = UnifiedLLM(9)
    engine = Scheduler(model, max_rows=3, chunk_tokens=4)
    endless = request(engine, [1, 2], 50)
    finish(engine, [endless], most=100)
    assert len(endless.answer) == 8
    with pytest.raises(ResourceExhaustedError):
        endless.output()
    assert model.lengths == {}


def test_a_request_without_a_slot_of_its_own_fails_where_others_hold_them():
    model = CountingLLM(max_seqs=1)
    model.prefill("somebody else's", [1])
    engine = Scheduler(model, max_rows=2, chunk_tokens=4)
    one = request(engine, [1, 2], 3)
    finish(engine, [one], most=10)
    with pytest.raises(ResourceExhaustedError):
        one.output()
    assert model.lengths == {"somebody else's": 1}


class BreakingLLM(CountingLLM):
    """Fails from the given call of `prefill` on; `is_dead` makes it refuse to release, as a lost device does."""

    def __init__(self, at: int, problem: BaseException, *, is_dead: bool = False):
        super().__init__()
        self.calls, self.at, self.problem, self.is_dead = 0, at, problem, is_dead

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        self.calls += 1
        if self.calls >= self.at:
            raise self.problem
        return super().prefill(cache_id, tokens)

    def release(self, cache_id: str) -> None:
        if self.is_dead and self.calls >= self.at:
            raise DeviceError("only reset() helps")
        super().release(cache_id)


@pytest.mark.parametrize("is_dead", [False, True])
def test_an_error_of_the_model_reaches_every_owner_it_concerns(is_dead: bool):
    model = BreakingLLM(4, ModelError("broken"), is_dead=is_dead)
    engine = Scheduler(model, max_rows=2, chunk_tokens=40)
    running = [request(engine, [1], 5), request(engine, [2], 5)]
    waiting = request(engine, [3], 1)
    for one in (*running, waiting):
        engine.submit(one)
    for _ in range(2):
        engine.step()
    for one in running:
        with pytest.raises(ModelError, match="broken"):
            one.output()
    assert not waiting.is_done
    model.at = 1000
    engine.step()
    assert waiting.output().token_ids == answer(model, [3], 1)
    assert is_dead or model.lengths == {}


def test_an_aborted_request_frees_what_it_holds_and_leaves_the_others_alone():
    model = CountingLLM()
    engine = Scheduler(model, max_rows=2, chunk_tokens=40)
    kept, dropped, waiting = request(engine, [1, 2], 4), request(engine, [3], 9), request(engine, [4], 9)
    for one in (kept, dropped, waiting):
        engine.submit(one)
    engine.step()
    assert set(model.lengths) == {kept.cache_id, dropped.cache_id}
    for one in (dropped, waiting, waiting):
        engine.abort(one)
    assert set(model.lengths) == {kept.cache_id}
    for _ in range(3):
        engine.step()
    engine.abort(kept)
    assert kept.output().token_ids == answer(model, [1, 2], 4)
    assert (dropped.is_done, waiting.answer, model.lengths) == (False, [], {})


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("gone", [(0,), (1,), (0, 1), (1, 0), (2, 0), (0, 1, 2)])
def test_answers_of_one_prompt_go_on_without_others(gone: tuple[int, ...], together: bool, steps: int):
    model = CountingLLM()
    llm = LLM.from_model(model)
    engine = Scheduler(model, max_rows=4, chunk_tokens=2)
    group = llm.group([1, 2, 3], SamplingParams(n=3, temperature=1.0, seed=0, max_tokens=3))
    engine.submit(group[0])
    for _ in range(steps):
        engine.step()
    for some in [gone] if together else [(at,) for at in gone]:
        for at in some:
            group[at].error = CancelledError("as a cancellation does")
        engine.abort(*(group[at] for at in some))
    while engine.has_work:
        engine.step()
    assert [len(one.answer) for one in group] == [0 if at in gone else 3 for at in range(3)]
    assert model.lengths == {}


@pytest.mark.parametrize("error", [CancelledError, SystemExit, RuntimeError])
def test_an_engine_may_be_closed_by_a_handler_of_a_signal_that_comes_while_its_thread_starts(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    llm, start = LLM.from_model(CountingLLM()), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "ferrum-engine":
            llm.engine.close()  # as a handler would, in this thread
            if error is not CancelledError:
                raise error("of the handler")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(error):
            llm.generate([[1, 2]], SamplingParams(max_tokens=4))
    llm.engine.close()
    assert "ferrum-engine" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(CancelledError, match="this LLM is closed"):
        llm.generate([[1, 2]], SamplingParams(max_tokens=4))
    llm.engine.abort()
    llm.engine.settle()  # a caller that has an error of its own gets that


@pytest.mark.parametrize("is_begun", [True, False])
def test_an_interrupt_while_the_thread_starts_ends_one_call_alone(is_begun: bool, monkeypatch: pytest.MonkeyPatch):
    model, start = CountingLLM(), threading.Thread.start
    llm, params = LLM.from_model(model), SamplingParams(max_tokens=4)

    def interrupted(thread: threading.Thread) -> None:
        if is_begun:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2]], params)
    assert llm.generate([[1, 2]], params)[0].token_ids == answer(model, [1, 2], 4)
    assert [thread.name for thread in threading.enumerate()].count("ferrum-engine") == 1
    llm.close()


def test_giving_up_on_a_dead_model_hides_no_other_error():
    model = BreakingLLM(2, KeyboardInterrupt(), is_dead=True)
    engine = Scheduler(model, max_rows=1, chunk_tokens=4)
    one = request(engine, [1, 2], 3)
    engine.submit(one)
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort(one)  # refused by the model, and no error
    engine.step()


def test_a_step_with_nothing_to_do_does_nothing():
    engine = Scheduler(BreakingLLM(0, ModelError("must not be called")), max_rows=1, chunk_tokens=4)
    engine.step()


def test_no_two_requests_or_engines_share_a_cache_id():
    model = CountingLLM()
    engines = [Scheduler(model, max_rows=1, chunk_tokens=4) for _ in range(2)]
    ids = [engine.new_cache_id() for engine in engines for _ in range(50)]
    assert len(set(ids)) == 100


class PickyLLM(CountingLLM):
    """Refuses every call with the token 13 in it before anything changes, as a model does that checks more."""

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        if 13 in tokens:
            raise RequestValidationError(f"{cache_id!r} holds a 13")
        return super().prefill(cache_id, tokens)


class PickyUnifiedLLM(PickyLLM):
    """The same with a unified forward, all or nothing."""

    def unified_forward(self, items: Sequence[UnifiedRow]) -> list[Logits | None]:
        if any(13 in tokens for _, tokens, _, _ in items):
            raise RequestValidationError("a row holds a 13")
        for cache_id, _, offset, _ in items:
            assert offset == self.lengths.get(cache_id, 0)
        rows = [self.prefill(cache_id, tokens) for cache_id, tokens, _, _ in items]
        return [row if item[3] else None for row, item in zip(rows, items, strict=True)]


@pytest.mark.parametrize("kind", [PickyLLM, PickyUnifiedLLM])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("chunk", [4, 1])
def test_a_request_that_the_model_refuses_fails_alone(kind: type[PickyLLM], at: int, chunk: int):
    model = kind()
    engine = Scheduler(model, max_rows=3, chunk_tokens=chunk)
    prompts = [[1, 2], [3, 4, 5], [6] * 9]
    prompts[at] = [2] * 6 + [13]  # refused once the others are half-way
    requests = [request(engine, prompt, 5) for prompt in prompts]
    finish(engine, requests, most=100)
    for i, prompt in enumerate(prompts):
        if i != at:
            assert requests[i].output().token_ids == answer(model, prompt, 5)
    with pytest.raises(RequestValidationError, match="13"):
        requests[at].output()
    assert model.lengths == {}


@settings(max_examples=100, deadline=None)
@given(work=PROMPTS, unified=st.booleans(), max_rows=st.integers(1, 5), chunk=st.integers(1, 9))
def test_refused_requests_never_change_the_answers_of_others(
    work: list[tuple[list[int], int, int]], unified: bool, max_rows: int, chunk: int
):
    model = PickyUnifiedLLM() if unified else PickyLLM()
    engine = Scheduler(model, max_rows=max_rows, chunk_tokens=chunk)
    requests = [request(engine, prompt, count, priority=priority) for prompt, count, priority in work]
    finish(engine, requests)
    for one, (prompt, count, _) in zip(requests, work, strict=True):
        expected = answer(model, prompt, count)
        if 13 in [*prompt, *expected[:-1]]:  # the last is never read
            with pytest.raises(RequestValidationError):
                one.output()
        else:
            assert one.output().token_ids == expected
    assert model.lengths == {}


def test_after_a_reset_running_requests_are_read_anew():
    model = UnifiedLLM(pool=100)
    engine = Scheduler(model, max_rows=2, chunk_tokens=8)
    one = request(engine, [1, 2, 3], 4)
    engine.submit(one)
    engine.step()
    engine.step()
    model.prefill("somebody else's", [1])
    model.reset = model.lengths.clear
    engine.reset()
    assert model.lengths == {}
    finish(engine, [request(engine, [4], 2)])
    assert one.output().token_ids == answer(model, [1, 2, 3], 4)
    assert model.batches[2] == [5, 1]


def test_a_thread_that_cannot_be_started_is_an_error_and_the_next_call_works(monkeypatch: pytest.MonkeyPatch):
    model = CountingLLM()
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "ferrum-engine":
            raise RuntimeError("can't start new thread")
        start(thread)

    llm, params, done = LLM.from_model(model), SamplingParams(max_tokens=4), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(ResourceExhaustedError, match="can't start new thread"):
            llm.generate([[1, 2]], params)
        with pytest.raises(ResourceExhaustedError, match="can't start new thread"):
            llm.engine.call(lambda: done.append(1))
    assert llm.generate([[1, 2]], params)[0].token_ids == answer(model, [1, 2], 4)
    assert done == []  # what was refused is not done later


def test_the_time_to_a_first_token_counts_from_the_submission():
    model = SummingLLM()
    llm = LLM.from_model(model, max_rows=4)
    model.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(llm.generate, [[1]], SamplingParams(max_tokens=2))
        model.entered.wait()
        second = pool.submit(llm.generate, [[2]], SamplingParams(max_tokens=2))
        time.sleep(0.5)
        model.gate.set()
        assert second.result()[0].time_to_first_token > 0.1
        first.result()
    drawn = SamplingParams(max_tokens=2, temperature=1.0, n=3, seed=0)
    llm.generate([[1, 2]], drawn)  # compiles
    answers = llm.as_completed([[1, 2]], drawn)
    time.sleep(0.5)
    assert all(out.time_to_first_token < 0.5 for _, out in answers)

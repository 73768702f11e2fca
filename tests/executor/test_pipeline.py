"""`execute`: rows of any output in one batch, and steps that are begun before the last ones are read."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.compile.sampler import SlotSettings, VerifyKey
from ferrum_jax.compile.step import StepKey
from ferrum_jax.contract import DecodeRun, Sampling
from ferrum_jax.contract.errors import CancelledError, DeviceError, RequestValidationError, ResourceExhaustedError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.batch import (
    ALL_LOGITS,
    LAST_LOGITS,
    NO_OUTPUT,
    Distributions,
    Output,
    SampledToken,
    ScheduledRow,
    Scores,
    TargetScores,
    TokenChoice,
    VerifiedTokens,
    WithCaptures,
)
from ferrum_jax.models.hooks import Point
from ferrum_jax.models.specs import ParamTree
from scripts.call_stack import frames_of
from tests.executor.conftest import CAPACITY, DEVICE, REUSING, Oracle, emptied, make_runner

TOLERANCE = 1e-4  # float32 sums in another order; logits are of order 10
TEXT = [(5 * at + 3) % 37 for at in range(CAPACITY)]
HELD = {"a": TEXT[:9], "b": [7, 7], "c": TEXT[3:20]}
GREEDY = SlotSettings()
WARM = SlotSettings(temperature=1.3, top_k=9, seed=5, num_logprobs=2)
PENALISED = SlotSettings(repetition_penalty=1.4, frequency_penalty=0.8, num_logprobs=0, seen=np.array(TEXT[:9]))


@pytest.fixture
def runner(reusing: ModelRunner) -> ModelRunner:
    return reusing


def row(key: str, tokens: list[int] | None, start: int, output: Output = LAST_LOGITS) -> ScheduledRow:
    return ScheduledRow(key, None if tokens is None else np.array(tokens, np.int32), start, output)


def test_alternatives_come_beside_rows_that_want_none(runner: ModelRunner, oracle: Oracle):
    size, begun = 2 * runner.plan.buckets.block_tokens, set()
    before = runner._programs.get
    wanted = [TargetScores(np.array(TEXT[at : at + size], np.int32), with_alternatives=at == 1) for at in (1, 2, 3)]
    rows = [row(key, TEXT[at : at + size], 0, one) for at, (key, one) in enumerate(zip("xyz", wanted, strict=True))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._programs, "get", lambda key: begun.add(getattr(key, "outputs", None)) or before(key))
        found = runner.execute(rows).result()
    assert "scores" in begun
    assert [one.top_ids is None for one in found] == [False, True, True]
    for at, one in enumerate(found):
        logits = oracle(TEXT[at : at + size]).astype(np.float64)
        expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        own = expected[np.arange(size), TEXT[at + 1 : at + 1 + size]]
        np.testing.assert_allclose(one.logprobs, own, rtol=0, atol=TOLERANCE)
        if at == 0:
            best = -np.sort(-expected, axis=1)[:, : one.top_logprobs.shape[1]]
            np.testing.assert_allclose(one.top_logprobs, best, rtol=0, atol=TOLERANCE)


def hold(runner: ModelRunner) -> None:
    for key, tokens in HELD.items():
        runner.prefill(key, tokens)


def same(found: Any, expected: Any) -> None:
    """Fails unless two answers are equal, but for rounding."""
    assert type(found) is type(expected)
    if isinstance(found, TokenChoice):
        assert found.token_id == expected.token_id
        np.testing.assert_allclose(found[1:3], expected[1:3], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(
            np.array(found.alternatives), np.array(expected.alternatives), atol=TOLERANCE, rtol=0
        )
    elif isinstance(found, Scores):
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)
        np.testing.assert_array_equal(found.greedy_ids, expected.greedy_ids)
        assert (found.top_ids is None) == (expected.top_ids is None)
    elif isinstance(found, list):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif found is not None:
        np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


OUTPUTS: list[Output] = [
    NO_OUTPUT,
    LAST_LOGITS,
    ALL_LOGITS,
    SampledToken(GREEDY),
    SampledToken(WARM),
    SampledToken(PENALISED),
    VerifiedTokens(WARM),
    Distributions(WARM),
    TargetScores(np.array([4, 5, 6], np.int32)),
    TargetScores(np.array([4, 5, 6], np.int32), with_alternatives=True),
]


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_different_outputs_in_one_batch_answer_as_alone(seed: int, runner: ModelRunner):
    draw = random.Random(seed)
    outputs = draw.sample(OUTPUTS, 3)
    counts = [3 if isinstance(one, TargetScores) else draw.choice([1, 2, 3, 4]) for one in outputs]
    starts = {key: len(tokens) for key, tokens in HELD.items()}
    batch = [
        row(key, TEXT[20 : 20 + count], starts[key], one) for key, count, one in zip(HELD, counts, outputs, strict=True)
    ]
    hold(runner)
    together = runner.execute(batch).result()
    runner.reset()
    hold(runner)
    alone = [runner.execute([one]).result()[0] for one in batch]
    same(together, alone)


def test_a_verification_counts_nothing_for_the_distributions_beside_it(runner: ModelRunner):
    settings = SlotSettings(temperature=1.0, presence_penalty=50.0)
    found = []
    for others in ([], [row("b", [7, 8], 2, VerifiedTokens(GREEDY))]):
        hold(runner)
        steps = [row("a", TEXT[at : at + 1], at, Distributions(settings)) for at in (9, 10)]
        first = runner.execute([steps[0], *others]).result()[0]
        found.append([first, runner.execute(steps[1:]).result()[0]])
        runner.reset()
    same(*found)


def test_only_what_a_step_wants_follows_on_it(runner: ModelRunner):
    keys: set[Any] = set()
    long = row("b", TEXT[:16], 2, ALL_LOGITS)
    hold(runner)
    with pytest.MonkeyPatch.context() as patch:
        get = runner._programs.get
        patch.setattr(runner._programs, "get", lambda key: keys.add(key) or get(key))
        runner.execute([row("a", TEXT[9:11], 9, VerifiedTokens(GREEDY)), long]).result()
    steps = {(key.blocks, key.block_tokens) for key in keys if isinstance(key, StepKey)}
    verified = {(key.blocks, key.block_tokens) for key in keys if isinstance(key, VerifyKey)}
    assert len(steps) == 2
    assert len(verified) == 1


POINTS = Point("pattern", 0), Point("resid_post", 0), Point("z", 1)
LONG = TEXT[20:39]  # two blocks, and three tokens more
TARGETS = np.array(TEXT[21:40], np.int32)


@pytest.fixture(scope="module")
def two_blocks(reusing_runner: ModelRunner, params: ParamTree) -> Iterator[ModelRunner]:
    """A runner whose steps of all logits may have two blocks."""
    plan = replace(reusing_runner.plan, buckets=replace(reusing_runner.plan.buckets, logit_blocks=2))
    with ModelRunner(params, reusing_runner.model_config, plan, device=DEVICE) as runner:
        yield runner


@pytest.mark.parametrize(
    "output",
    [ALL_LOGITS, Distributions(WARM), TargetScores(TARGETS, True, WARM), TargetScores(TARGETS, True, PENALISED)],
    ids=lambda output: type(output).__name__,
)
def test_two_blocks_of_a_long_row_in_one_step_answer_as_one_after_the_other(
    output: Any, runner: ModelRunner, two_blocks: ModelRunner, monkeypatch: pytest.MonkeyPatch
):
    begun: list[Any] = []
    get = two_blocks._programs.get
    monkeypatch.setattr(two_blocks._programs, "get", lambda key: begun.append(key) or get(key))
    for points in ((), (Point("resid_post", 0),)):
        found = []
        for one in (runner, two_blocks):
            one.reset()
            hold(one)
            found += one.execute([row("a", LONG, len(HELD["a"]), output)._replace(capture=points)]).result()
        pairs = []
        if points:
            pairs, found = [[one.points[points[0]] for one in found]], [one.answer for one in found]
        same(*found)
        if isinstance(output, TargetScores):
            pairs.append([one.processed for one in found])
        for one, other in pairs:
            np.testing.assert_allclose(one, other, atol=TOLERANCE, rtol=0)
    assert (2, 8, "all") in {(key.blocks, key.block_tokens, key.outputs) for key in begun if isinstance(key, StepKey)}


def test_a_long_row_under_penalties_has_no_distributions(runner: ModelRunner):
    hold(runner)
    most = runner.plan.buckets.verify_tokens
    with pytest.raises(RequestValidationError, match=f"{most + 1} tokens to verify, at most {most} go"):
        runner.execute([row("a", LONG[: most + 1], len(HELD["a"]), Distributions(PENALISED))])
    runner.execute([row("a", LONG[:most], len(HELD["a"]), Distributions(PENALISED))]).result()


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_any_output_capture_what_is_captured_alone(seed: int, runner: ModelRunner):
    """Of decode rows, chunks and prompts of several blocks, beside rows that capture nothing."""
    draw = random.Random(seed)
    batch = []
    for key, tokens in HELD.items():
        output = draw.choice(OUTPUTS)
        count = 3 if isinstance(output, TargetScores) else draw.choice([1, 1, 2, 4])
        if not isinstance(output, (VerifiedTokens, Distributions, TargetScores)):
            count = draw.choice([count, 21])
        points = tuple(sorted(draw.sample(POINTS, draw.randint(0, 3))))
        new = [draw.randrange(37) for _ in range(count)]
        batch.append(row(key, new, len(tokens), output)._replace(capture=points))
    hold(runner)
    together = runner.execute(batch).result()
    runner.reset()
    hold(runner)
    plain = runner.execute([one._replace(capture=()) for one in batch]).result()
    for one, answer, alone in zip(batch, together, plain, strict=True):
        if one.capture:
            assert isinstance(answer, WithCaptures)
            assert sorted(answer.points) == list(one.capture)
            runner.truncate_kv(one.cache_id, one.start)
            expected = runner.capture(one.cache_id, one.tokens.tolist(), points=one.capture).points
            for point in one.capture:
                same(answer.points[point], expected[point])
            answer = answer.answer
        same(answer, alone)


def test_a_row_captures_of_the_token_that_only_the_device_knows_and_of_a_known_prefix(runner: ModelRunner):
    settings = SampledToken(WARM)
    begun = [row("a", TEXT[:9], 0, settings), *(row("a", None, 9 + at, settings) for at in range(3))]
    steps = [runner.execute([one._replace(capture=POINTS)]) for one in begun]
    found = [step.result()[0] for step in steps]
    ids = [answer.answer.token_id for answer in found]
    runner.release("a")
    runner.prefill("a", TEXT[:9])  # which are a known prefix when they are read again
    runner.release("a")
    again = runner.execute([row("a", TEXT[:9], 0, settings)._replace(capture=POINTS)]).result()[0]
    assert again.answer.token_id == ids[0]
    runner.release("a")
    expected = runner.capture("a", [*TEXT[:9], *ids[:3]], points=POINTS).points
    for point in POINTS[1:]:
        same(np.concatenate([answer.points[point] for answer in found]), expected[point])
        same(again.points[point], expected[point][:9])
    same(found[2].points[POINTS[0]][:, 0], expected[POINTS[0]][:, 10, :11])


def one_by_one(runner: ModelRunner, keys: str, settings: dict[str, SlotSettings], count: int) -> dict[str, list[int]]:
    """Samples tokens, each of which is read before the next step begins."""
    hold(runner)
    found: dict[str, list[int]] = {key: [] for key in keys}
    for at in range(count):
        batch = [
            row(key, [found[key][-1] if at else 4], len(HELD[key]) + at, SampledToken(settings[key])) for key in keys
        ]
        for key, choice in zip(keys, runner.execute(batch).result(), strict=True):
            found[key].append(choice.token_id)
    return found


@pytest.mark.parametrize(
    "order", ["as begun", "backwards", "last alone", pytest.param("shuffled", marks=pytest.mark.slow)]
)
def test_steps_begun_before_the_last_is_read_sample_as_token_by_token(order: str, runner: ModelRunner):
    settings = {"a": PENALISED, "b": WARM, "c": GREEDY}
    expected = one_by_one(runner, "abc", settings, 7)
    runner.reset()
    hold(runner)
    steps = []
    for at in range(7):
        batch = [row(key, None if at else [4], len(HELD[key]) + at, SampledToken(settings[key])) for key in "abc"]
        steps.append(runner.execute(batch))
    reading = list(steps)
    if order == "backwards":
        reading.reverse()
    if order == "shuffled":
        random.Random(3).shuffle(reading)
    for step in reading[-1:] if order == "last alone" else reading:
        step.result()
    for key, tokens in zip("abc", zip(*[[c.token_id for c in step.result()] for step in steps], strict=True),
                           strict=True):  # fmt: skip
        assert list(tokens) == expected[key]
    for key in "abc":  # and what is cached is what was chosen
        text = [*HELD[key], 4, *expected[key]]
        live = runner._pipeline.table.live.get(key)
        assert live is not None
        assert live.tokens.tolist() == text[:-1]
        wanted = runner.execute([row(key, None, len(text) - 1)]).result()[0]
        runner.release(key)
        np.testing.assert_allclose(wanted, runner.prefill(key, text), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("output", [NO_OUTPUT, LAST_LOGITS, ALL_LOGITS, TargetScores(np.array([3], np.int32))])
def test_a_row_of_any_output_takes_the_token_that_is_not_read_yet(output: Output, runner: ModelRunner, oracle: Oracle):
    hold(runner)
    first = runner.execute([row("a", [4], 9, SampledToken(GREEDY)), row("b", [1], 2, LAST_LOGITS)])
    (answer,) = runner.execute([row("a", None, 10, output)]).result()
    text = [*HELD["a"], 4, first.result()[0].token_id]
    logits = oracle(text)[-1]
    assert text[-1] == int(oracle(text[:-1])[-1].argmax())
    if isinstance(output, TargetScores):
        np.testing.assert_allclose(answer.logprobs, [logits[3] - np.logaddexp.reduce(logits)], atol=TOLERANCE, rtol=0)
    elif output is not NO_OUTPUT:
        np.testing.assert_allclose(np.atleast_2d(answer)[-1], logits, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(runner.decode("a", 8, 11), oracle([*text, 8])[-1], atol=TOLERANCE, rtol=0)


def test_only_a_token_that_was_sampled_for_its_place_is_taken(runner: ModelRunner, oracle: Oracle):
    hold(runner)

    def refused(key: str, start: int) -> None:
        with pytest.raises(RequestValidationError, match="no token was sampled"):
            runner.execute([row(key, None, start)])

    refused("a", 9)
    refused("unknown", 0)
    runner.execute([row("a", [4], 9, SampledToken(GREEDY))])
    runner.fork("a", "twin")
    refused("twin", 10)
    runner.execute([row("a", [5], 10, NO_OUTPUT)])  # another one in its place
    refused("a", 11)
    runner.truncate_kv("a", 10)
    np.testing.assert_allclose(
        runner.execute([row("a", None, 10)]).result()[0],
        oracle([*HELD["a"], 4, int(oracle([*HELD["a"], 4])[-1].argmax())])[-1],
        atol=TOLERANCE,
        rtol=0,
    )
    runner.truncate_kv("a", 9)
    runner.decode("a", 6, 9)
    refused("a", 10)
    runner.execute([row("b", [4], 2, SampledToken(GREEDY))])
    runner.release("b")
    runner.prefill("b", [1, 2, 3])
    refused("b", 3)


def begin_two(runner: ModelRunner) -> tuple[Any, Any]:
    """Begins two steps of "a" and "b", the second of which takes the tokens of the first."""
    hold(runner)
    settings = SampledToken(GREEDY)
    return (
        runner.execute([row("a", [4], 9, settings), row("b", [4], 2, settings)]),
        runner.execute([row("a", None, 10, settings), row("b", None, 3, settings)]),
    )


def test_truncate_while_a_step_is_in_flight(runner: ModelRunner, oracle: Oracle):
    first, second = begin_two(runner)
    runner.truncate_kv("a", 10)
    for answer, text in zip(first.result(), ([*HELD["a"], 4], [*HELD["b"], 4]), strict=True):
        assert answer.token_id == int(oracle(text)[-1].argmax())
    np.testing.assert_allclose(runner.decode("a", 8, 10), oracle([*HELD["a"], 4, 8])[-1], atol=TOLERANCE, rtol=0)
    text = [*HELD["b"], 4, first.result()[1].token_id]
    assert second.result()[1].token_id == int(oracle(text)[-1].argmax())


def test_fork_while_a_step_is_in_flight(runner: ModelRunner, oracle: Oracle):
    first, second = begin_two(runner)
    runner.fork("a", "twin")
    text = [*HELD["a"], 4, first.result()[0].token_id]
    third = runner.execute([row("a", None, 11, SampledToken(GREEDY)), row("twin", [8], 11)])
    np.testing.assert_allclose(third.result()[1], oracle([*text, 8])[-1], atol=TOLERANCE, rtol=0)
    assert third.result()[0].token_id == int(oracle([*text, second.result()[0].token_id])[-1].argmax())


def test_release_while_a_step_is_in_flight(runner: ModelRunner, oracle: Oracle):
    first, second = begin_two(runner)
    runner.release("a")
    np.testing.assert_allclose(runner.prefill("a", TEXT[:30]), oracle(TEXT[:30])[-1], atol=TOLERANCE, rtol=0)
    for at, key in enumerate("ab"):
        text = [*HELD[key], 4, first.result()[at].token_id]
        assert second.result()[at].token_id == int(oracle(text)[-1].argmax())
    assert runner.kv_len("a") == 30
    np.testing.assert_allclose(runner.decode("a", 1, 30), oracle([*TEXT[:30], 1])[-1], atol=TOLERANCE, rtol=0)


def test_reset_while_a_step_is_in_flight(runner: ModelRunner, oracle: Oracle):
    _, second = begin_two(runner)
    runner.reset()
    assert runner.kv_slot_capacity_snapshot().free_blocks == 18
    np.testing.assert_allclose(runner.prefill("a", TEXT[:9]), oracle(TEXT[:9])[-1], atol=TOLERANCE, rtol=0)
    text = [*HELD["a"], 4]
    text.append(int(oracle(text)[-1].argmax()))
    assert second.result()[0].token_id == int(oracle(text)[-1].argmax())
    np.testing.assert_allclose(runner.decode("a", 4, 9), oracle([*TEXT[:9], 4])[-1], atol=TOLERANCE, rtol=0)


def test_multi_step_decoding_while_a_step_is_in_flight_penalises_what_was_chosen_in_it(runner: ModelRunner):
    how = Sampling(repetition_penalty=3.0)
    answers = []
    for reads in (False, True):
        runner.reset()
        first, second = begin_two(runner)
        if reads:
            first.result()
            second.result()
        answers.append(runner.decode_n([DecodeRun(cache_id="a", token=8, pos=11, max_tokens=6, sampling=how)]))
    assert answers[0][0].token_ids == answers[1][0].token_ids


def test_a_refused_batch_changes_nothing(runner: ModelRunner, oracle: Oracle):
    hold(runner)
    before = [runner.kv_len(key) for key in "abcd"], runner.kv_slot_capacity_snapshot(), runner.cache_metrics_snapshot()
    good = row("a", [4], 9, SampledToken(GREEDY))
    bad: list[tuple[Any, type[Exception]]] = [
        (row("b", [4], 3), RequestValidationError),
        (row("a", [4], 9), RequestValidationError),
        (row("b", [37], 2), RequestValidationError),
        (row("b", [], 2), RequestValidationError),
        (ScheduledRow("b", np.array([1.0]), 2), RequestValidationError),
        (row("b", None, 2), RequestValidationError),
        (row("b", [4] * 7, 2, VerifiedTokens(GREEDY)), RequestValidationError),
        (row("b", [4, 5], 2, TargetScores(np.array([1], np.int32))), RequestValidationError),
        (row("b", [1] * CAPACITY, 2), RequestValidationError),
        (("b", [4], 2), RequestValidationError),
        (row("b", [4], 2, None), RequestValidationError),  # pyright: ignore[reportArgumentType]
        (row("b", [4], 2, type(LAST_LOGITS)), RequestValidationError),  # pyright: ignore[reportArgumentType]
        (row("b", [4], "2"), RequestValidationError),  # pyright: ignore[reportArgumentType]
        (row("b", [4, 5], 2, TargetScores(np.array([1, 37], np.int32))), RequestValidationError),
        (row("b", [4, 5], 2, VerifiedTokens(GREEDY, np.zeros((1, 2), np.int32))), RequestValidationError),
        (row("b", [4, 5], 2, VerifiedTokens(GREEDY, np.zeros((2, 1), np.int32))), RequestValidationError),
    ]
    for one, kind in bad:
        with pytest.raises(kind):
            runner.execute([good, one])
    with pytest.raises(ResourceExhaustedError, match="slots"):
        runner.execute([good, row("d", [1], 0), row("e", [1], 0)])
    with pytest.raises(ResourceExhaustedError, match="blocks"):
        runner.execute(
            [row(key, [1] * (40 - len(HELD[key])), len(HELD[key])) for key in "abc"] + [row("d", [1] * 30, 0)]
        )
    after = [runner.kv_len(key) for key in "abcd"], runner.kv_slot_capacity_snapshot(), runner.cache_metrics_snapshot()
    assert after == before
    assert runner.execute([]).result() == []
    assert runner.execute([good]).result()[0].token_id == int(oracle([*HELD["a"], 4])[-1].argmax())


def test_rows_may_come_from_an_iterator_with_positions_and_tokens_in_numbers_of_any_kind(
    runner: ModelRunner, oracle: Oracle
):
    hold(runner)
    seen: Any = tuple(HELD["a"])
    start: Any = np.uint8(9)
    rows: Any = iter([row("a", [4], start, SampledToken(SlotSettings(repetition_penalty=1e6, seen=seen)))])
    (found,) = runner.execute(rows).result()
    wanted = oracle([*HELD["a"], 4])[-1].copy()
    held = sorted({*seen, 4})
    wanted[held] = np.where(wanted[held] > 0, wanted[held] / 1e6, wanted[held] * 1e6)
    assert found.token_id == int(wanted.argmax())


def test_a_block_that_was_filled_while_its_tokens_were_on_the_device_is_entered_once_they_are_read(
    runner: ModelRunner, oracle: Oracle
):
    runner.prefill("a", TEXT[:5])
    steps = [runner.execute([row("a", [4], 5, SampledToken(GREEDY))])]
    while (runner.kv_len("a") or 0) < 18:
        steps.append(runner.execute([row("a", None, runner.kv_len("a") or 0, SampledToken(GREEDY))]))
    text = [*TEXT[:5], 4]
    while len(text) < 19:
        text.append(int(oracle(text)[-1].argmax()))
    for step in steps:
        step.result()
    assert runner.cache_metrics_snapshot()["entries"] == 2
    assert [step.result()[0].token_id for step in steps] == text[6:]
    saved = runner.cache_metrics_snapshot()["saved_prefill_tokens"]
    np.testing.assert_allclose(runner.prefill("b", text[:18]), oracle(text[:18])[-1], atol=TOLERANCE, rtol=0)
    assert runner.cache_metrics_snapshot()["saved_prefill_tokens"] == saved + 16


def test_a_token_that_the_host_knows_already_is_written_as_any_other(runner: ModelRunner, oracle: Oracle):
    runner.prefill("a", TEXT[:6])
    chosen = runner.execute([row("a", [4], 6, SampledToken(GREEDY))])
    runner.prefill("b", [1, 2, 3])
    runner.fork("b", "c")  # which needs every token, and reads the step
    runner.execute([row("a", None, 7, NO_OUTPUT)])
    live = runner._pipeline.table.live.get("a")
    assert live is not None
    assert live.tokens.tolist() == [*TEXT[:6], 4, chosen.result()[0].token_id]
    assert runner.cache_metrics_snapshot()["entries"] == 1


def test_sequences_whose_window_was_evicted_are_recomputed_with_tokens_sampled_in_flight(
    shared_runner: ModelRunner, oracle: Oracle
):
    windowed = emptied(shared_runner)
    windowed.prefill("a", TEXT[:30])
    steps = [windowed.execute([row("a", [4], 30, SampledToken(GREEDY))])]
    steps += [windowed.execute([row("a", None, 31 + at, SampledToken(GREEDY))]) for at in range(4)]
    windowed.truncate_kv("a", 33)
    windowed.fork("a", "twin")  # whose own cache is empty
    text = [*TEXT[:30], 4, *(step.result()[0].token_id for step in steps)][:33]
    first = windowed.execute([row("twin", [8], 33, SampledToken(GREEDY))])
    windowed.fork("a", "third")
    second = windowed.execute([row("twin", None, 34, LAST_LOGITS), row("third", [9], 33, LAST_LOGITS)])
    sampled = first.result()[0].token_id
    wanted = [oracle([*text, 8, sampled])[-1], oracle([*text, 9])[-1]]
    np.testing.assert_allclose(second.result(), wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_more_rows_than_one_step_has_room_for_sample_in_several(narrow: ModelRunner, oracle: Oracle):
    settings = SampledToken(GREEDY)
    steps = [narrow.execute([row(key, [at, 4], 0, settings) for at, key in enumerate("abcd")])]
    steps += [narrow.execute([row(key, None, 2 + at, settings) for key in "abcd"]) for at in range(3)]
    found = [[choice.token_id for choice in step.result()] for step in steps]
    for at, tokens in enumerate(zip(*found, strict=True)):
        text = [at, 4]
        for token in tokens:
            assert token == int(oracle(text)[-1].argmax())
            text.append(token)


def test_a_failure_while_a_step_is_read_is_an_error_until_reset_and_what_was_begun_before_is_lost(
    runner: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    first, second = begin_two(runner)

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: injected")

    with monkeypatch.context() as patched:
        patched.setattr("ferrum_jax.executor.device.np.asarray", fail)
        with pytest.raises(DeviceError, match="injected"):
            first.result()
    assert runner.state is ExecutorState.Error
    for step in (first, second):
        with pytest.raises(DeviceError, match="reset"):
            step.result()
    runner.reset()
    hold(runner)
    for step in (first, second):
        with pytest.raises(DeviceError, match="before a failure"):
            step.result()
    assert runner.state is ExecutorState.Ready
    np.testing.assert_allclose(runner.decode("a", 8, 9), oracle([*HELD["a"], 8])[-1], atol=TOLERANCE, rtol=0)


def test_the_call_in_which_the_kv_is_lost_is_a_device_error_too(runner: ModelRunner):
    runner.prefill("a", [1, 2])
    for leaf in jax.tree.leaves(runner._device.kv):
        leaf.delete()
    for _ in range(2):
        with pytest.raises(DeviceError, match="only reset"):
            runner.decode("a", 3, 2)
    runner.reset()
    assert runner.state is ExecutorState.Ready


def test_a_step_cannot_be_read_after_close(params: ParamTree, reusing_runner: ModelRunner):
    with make_runner(params, REUSING) as closing:
        closing._programs._steps.update(reusing_runner._programs._steps)
        step = closing.execute([row("a", [4], 0, SampledToken(GREEDY))])
    with pytest.raises(CancelledError, match="closed"):
        step.result()


def test_at_most_five_frames_of_the_package_lead_to_an_executable(runner: ModelRunner):
    runner.prefill("a", TEXT[:3])
    assert 2 <= len(frames_of(lambda: runner.decode("a", 1, 3))) <= 5
    runner.release("a")
    llm = LLM.from_model(runner, max_rows=1)
    params = SamplingParams(max_tokens=3, presence_penalty=0.5)  # which no multi-step program has
    assert 2 <= len(frames_of(lambda: llm.generate([TEXT[:3]], params))) <= 5

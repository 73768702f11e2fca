"""`decode_n`: what multi-step programs choose is what decoding step by step and sampling choose."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ferrum_jax import errors
from ferrum_jax.compile.multi_step import MultiStepKey
from ferrum_jax.contract import (
    ActiveLoraAdapter,
    DecodedRun,
    DecodeRun,
    ExecutorState,
    InvalidParameterError,
    KvSlotRequest,
    ResourceExhaustedError,
    Sampling,
    UnsupportedError,
)
from ferrum_jax.contract.errors import RequestValidationError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops.sampling import SampleInputs, sample
from tests.executor.conftest import CAPACITY, CFG, REUSING, Oracle, late_compiles, make_runner
from tests.fake import SummingLLM

PROMPTS = {"a": [3, 1, 4], "b": [1, 5, 9, 2, 6, 5, 3, 5], "c": [8], "d": [2, 7, 1, 8, 2, 8, 1]}


@pytest.fixture
def runner(reusing: ModelRunner) -> ModelRunner:
    return reusing


CHOOSE = jax.jit(sample)


def step_by_step(runner: ModelRunner, run: DecodeRun, tokens: Sequence[int]) -> DecodedRun:
    """Does what `decode_n` promises with `decode` and `sample`; `tokens` are the sequence's, the newest included."""
    tokens, found = list(tokens), DecodedRun([], [])
    how, one = run.sampling, np.ones(1, np.float32)
    for _ in range(run.max_tokens):
        logits = runner.decode(run.cache_id, tokens[-1], len(tokens) - 1)
        inputs = SampleInputs(
            temperature=one * how.temperature,
            top_k=np.array([min(how.top_k, CFG.vocab_size)], np.int32),
            top_p=one * how.top_p,
            min_p=one * how.min_p,
            repetition_penalty=one * how.repetition_penalty,
            seed=np.array([run.seed], np.uint32),
            position=np.array([len(tokens)], np.int32),
            seen=np.isin(np.arange(CFG.vocab_size), tokens)[None],
        )
        choice = CHOOSE(logits[None], inputs)
        tokens.append(int(choice.token_ids[0]))
        found.token_ids.append(tokens[-1])
        found.logprobs.append(float(choice.logprobs[0]))
        if tokens[-1] in run.stop_ids:
            break
    return found


def same(found: Sequence[DecodedRun], expected: Sequence[DecodedRun]) -> None:
    assert [run.token_ids for run in found] == [run.token_ids for run in expected]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.4]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.7, 0.6]),
)
RUNS = st.tuples(
    SAMPLINGS, st.integers(1, 14), st.lists(st.integers(0, CFG.vocab_size - 1), max_size=4), st.integers(0, 2**32 - 1)
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=st.lists(RUNS, min_size=1, max_size=4))
def test_multi_step_decoding_equals_decoding_step_by_step(runner: ModelRunner, asked: list[tuple[Any, ...]]):
    answers, before = [], late_compiles(runner)
    for at_once in (True, False):
        runner.reset()
        runs = []
        for (key, tokens), (how, count, stops, seed) in zip(PROMPTS.items(), asked, strict=False):
            runner.prefill(key, tokens)
            runs.append(
                DecodeRun(
                    cache_id=key, token=7, pos=len(tokens), max_tokens=count, stop_ids=stops, sampling=how, seed=seed
                )
            )
        if at_once:
            answers.append(runner.decode_n(runs))
        else:
            answers.append([step_by_step(runner, run, [*PROMPTS[run.cache_id], 7]) for run in runs])
        lengths = [(run, runner.kv_len(run.cache_id)) for run in runs]
        for (run, length), answer in zip(lengths, answers[-1], strict=True):
            assert length == run.pos + len(answer.token_ids)
    same(*answers)
    assert late_compiles(runner) == before


def test_a_sequence_goes_on_from_where_multi_step_decoding_left_it(runner: ModelRunner):
    runner.prefill("a", PROMPTS["a"])
    runner.prefill("b", PROMPTS["a"])
    run = DecodeRun(cache_id="a", token=7, pos=3, max_tokens=11)
    (found,) = runner.decode_n([run])
    tokens = [*PROMPTS["a"], 7, *found.token_ids]
    expected = runner.prefill("c", tokens)
    np.testing.assert_allclose(runner.decode("a", tokens[-1], len(tokens) - 1), expected, atol=1e-4)
    runner.truncate_kv("a", 6)
    np.testing.assert_allclose(runner.decode("a", 9, 6), runner.prefill("b", [*tokens[3:6], 9]), atol=1e-4)


def test_only_the_blocks_of_what_was_decoded_are_kept(runner: ModelRunner):
    runner.prefill("a", PROMPTS["a"])
    before = runner.kv_slot_capacity_snapshot().free_blocks
    run = DecodeRun(cache_id="a", token=7, pos=3, max_tokens=40)
    first = step_by_step(runner, replace(run, max_tokens=3), [*PROMPTS["a"], 7]).token_ids
    assert first[1] not in first[:1]
    runner.truncate_kv("a", 3)
    (found,) = runner.decode_n([replace(run, stop_ids=[first[1]])])
    assert found.token_ids == first[:2]
    assert runner.kv_slot_capacity_snapshot().free_blocks == before
    runner.reserve_kv_slots([KvSlotRequest(cache_id="a", target_len=30)])
    reserved = runner.kv_slot_capacity_snapshot().free_blocks
    runner.decode_n([DecodeRun(cache_id="a", token=7, pos=5, max_tokens=20)])
    assert runner.kv_slot_capacity_snapshot().free_blocks == reserved
    runner.release("a")
    assert runner.kv_slot_capacity_snapshot().free_blocks == 18


def test_a_fork_that_decodes_leaves_the_other_alone(runner: ModelRunner):
    expected = runner.prefill("a", PROMPTS["b"][:-1])
    runner.fork("a", "twin")
    runs = [DecodeRun(cache_id=key, token=5, pos=7, max_tokens=6, seed=s) for s, key in enumerate(("a", "twin"))]
    warm = [replace(run, sampling=Sampling(temperature=2.0)) for run in runs]
    first, second = runner.decode_n(warm)
    assert first.token_ids != second.token_ids
    runner.reset()
    np.testing.assert_allclose(runner.prefill("a", PROMPTS["b"][:-1]), expected, atol=1e-4)
    same([first], runner.decode_n(warm[:1]))


def test_with_until_one_ends_all_end_with_the_first(runner: ModelRunner):
    for key in "ab":
        runner.prefill(key, PROMPTS[key])
    runs = [DecodeRun(cache_id=key, token=7, pos=len(PROMPTS[key]), max_tokens=n) for key, n in (("a", 8), ("b", 2))]
    found = runner.decode_n(runs, until_one_ends=True)
    assert [len(run.token_ids) for run in found] == [2, 2]
    assert runner.kv_len("a") == 5


def test_rows_with_adapters_decode_with_them(runner: ModelRunner, adapter_folders: dict[str, str]):
    runner.load_lora("one", adapter_folders["one"])
    alone = []
    for key in ("a", "b"):
        if key == "b":
            adapter = ActiveLoraAdapter(name="one", path=adapter_folders["one"])
            runner.set_lora_adapter_for_cache(key, adapter)
        runner.prefill(key, PROMPTS[key])
        run = DecodeRun(cache_id=key, token=7, pos=len(PROMPTS[key]), max_tokens=9)
        alone.append(step_by_step(runner, run, [*PROMPTS[key], 7]))
        runner.truncate_kv(key, len(PROMPTS[key]))
    runs = [DecodeRun(cache_id=key, token=7, pos=len(PROMPTS[key]), max_tokens=9) for key in ("a", "b")]
    same(runner.decode_n(runs), alone)


def test_a_prefix_that_multi_step_decoding_filled_is_reused(runner: ModelRunner):
    runner.prefill("a", PROMPTS["a"])
    (found,) = runner.decode_n([DecodeRun(cache_id="a", token=7, pos=3, max_tokens=20)])
    runner.release("a")
    tokens = [*PROMPTS["a"], 7, *found.token_ids]
    before = runner.cache_metrics_snapshot()["saved_prefill_tokens"]
    reused = runner.prefill("b", tokens)
    assert runner.cache_metrics_snapshot()["saved_prefill_tokens"] - before == 16
    runner.reset()
    np.testing.assert_allclose(reused, runner.prefill("b", tokens), atol=1e-4)


GOOD: dict[str, Any] = {"cache_id": "a", "token": 7, "pos": 3, "max_tokens": 4}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pos": 2}, "pos"),
        ({"cache_id": "unknown", "pos": 0}, "unknown"),
        ({"cache_id": 3}, "cache id"),
        ({"token": CFG.vocab_size}, "ids go from 0"),
        ({"token": True}, "expected an integer id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": CAPACITY}, "KV capacity"),
        ({"stop_ids": range(17)}, "at most 16"),
        ({"stop_ids": "stop"}, "stop_ids"),
        ({"stop_ids": 5}, "stop_ids"),
        ({"stop_ids": np.array(5)}, "stop_ids"),
        ({"stop_ids": [1, -1]}, r"stop_ids\[1\] is -1"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"sampling": None}, "sampling"),
    ],
)
def test_a_run_that_cannot_be_is_refused_and_changes_nothing(runner: ModelRunner, wrong: dict[str, Any], said: str):
    runner.prefill("a", PROMPTS["a"])
    runner.prefill("b", PROMPTS["b"])
    before = runner.kv_slot_capacity_snapshot()
    good = DecodeRun(cache_id="b", token=1, pos=8, max_tokens=2)
    with pytest.raises(RequestValidationError, match=said):
        runner.decode_n([good, DecodeRun(**GOOD | wrong)])
    with pytest.raises(RequestValidationError, match="twice"):
        runner.decode_n([good, good])
    with pytest.raises(RequestValidationError, match="DecodeRun"):
        runner.decode_n([("a", 7, 3, 4)])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidParameterError, match="temperature"):
        Sampling(temperature=-1.0)
    assert (runner.kv_len("a"), runner.kv_len("b")) == (3, 8)
    assert runner.kv_slot_capacity_snapshot() == before
    assert runner.decode_n([]) == []


def test_a_stop_id_that_no_token_has_stops_nothing(runner: ModelRunner):
    runner.prefill("a", PROMPTS["a"])
    run = DecodeRun(**GOOD)
    plain = runner.decode_n([run])
    runner.truncate_kv("a", 3)
    same(runner.decode_n([replace(run, stop_ids=[2**31, CFG.vocab_size])]), plain)


def test_runs_that_cannot_be_listed_are_refused(runner: ModelRunner):
    gone = jnp.zeros(3)
    gone.delete()
    for runs in (gone, 5, "runs"):
        with pytest.raises(RequestValidationError, match="runs"):
            runner.decode_n(runs)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_more_rows_than_the_largest_program_run_in_several(narrow: ModelRunner, runner: ModelRunner):
    runs = [DecodeRun(cache_id=key, token=7, pos=len(PROMPTS[key]), max_tokens=7) for key in PROMPTS]
    for key, tokens in PROMPTS.items():
        runner.prefill(key, tokens)
        narrow.prefill(key, tokens)
    same(narrow.decode_n(runs), runner.decode_n(runs))


def test_a_pool_too_small_for_the_whole_run_refuses_it(runner: ModelRunner):
    for key in PROMPTS:
        runner.prefill(key, PROMPTS[key])
    before = runner.kv_slot_capacity_snapshot()
    runs = [DecodeRun(cache_id=key, token=7, pos=len(PROMPTS[key]), max_tokens=36) for key in PROMPTS]
    with pytest.raises(ResourceExhaustedError, match="blocks"):
        runner.decode_n(runs)
    assert runner.kv_slot_capacity_snapshot() == before


def test_a_model_without_multi_step_programs_says_so(params: ParamTree):
    with make_runner(params) as plain:
        assert plain.loop_tokens == 0
        with pytest.raises(UnsupportedError, match="multi_step_tokens"):
            plain.decode_n([])
    model = SummingLLM()
    assert model.loop_tokens == 0
    with pytest.raises(UnsupportedError):
        model.decode_n([])


def test_a_failure_on_the_device_leaves_the_state_error(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    runner.prefill("a", PROMPTS["a"])
    run = DecodeRun(**GOOD)
    expected = runner.decode_n([run])
    runner.truncate_kv("a", 3)
    programs = runner._programs._steps
    key = next(key for key in programs if isinstance(key, MultiStepKey) and not key.adapters)

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("injected")

    with monkeypatch.context() as patched:
        patched.setitem(programs, key, fail)
        with pytest.raises(errors.DeviceError, match="injected"):
            runner.decode_n([run])
    assert runner.state is ExecutorState.Error
    runner.reset()
    runner.prefill("a", PROMPTS["a"])
    same(runner.decode_n([run]), expected)


def test_the_kv_is_written_in_place(runner: ModelRunner):
    for key, executable in runner._programs._steps.items():
        if isinstance(key, MultiStepKey):
            memory = executable.memory_analysis()
            assert memory is not None
            assert memory.alias_size_in_bytes >= runner.plan.cache.num_bytes


@pytest.mark.slow
def test_nothing_of_the_size_of_a_large_kv_is_copied(params: ParamTree):
    with make_runner(params, replace(REUSING, kv_blocks=300, decode_rows=(4,))) as large:
        for key in large.plan.buckets.multi_steps(adapters=True):
            memory = large._programs.get(key).memory_analysis()
            assert memory is not None
            assert memory.alias_size_in_bytes >= large.plan.cache.num_bytes
            assert memory.temp_size_in_bytes < large.plan.cache.num_bytes / 4


def test_processed_log_probabilities_are_those_after_the_temperature(runner: ModelRunner, oracle: Oracle):
    runner.reset()
    runner.prefill("a", [1, 2, 3])
    run = DecodeRun(cache_id="a", token=4, pos=3, max_tokens=4, sampling=Sampling(temperature=0.5), seed=3)
    (found,) = runner.decode_n([run])
    assert found.processed_logprobs is not None
    logits = oracle([1, 2, 3, 4, *found.token_ids])[3:-1].astype(np.float64)
    for scale, told in ((1.0, found.logprobs), (2.0, found.processed_logprobs)):
        logprobs = scale * logits - np.logaddexp.reduce(scale * logits, axis=1, keepdims=True)
        np.testing.assert_allclose(told, logprobs[np.arange(4), found.token_ids], rtol=0, atol=2e-5)

"""Every method of `LlmExecutor` over the real runner, against the forward that keeps no cache."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import (
    ExecutorState,
    FullLogits,
    GreedyArgmax,
    GreedyRepetitionPenalty,
    KvSlotAllocation,
    KvSlotRequest,
    PrefillInput,
    TokenSelectionMask,
)
from ferrum_jax.contract.errors import RequestValidationError, ResourceExhaustedError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.llm_executor.handle import live_sequence
from ferrum_jax.executor.llm_executor.sequences import UndoLog
from ferrum_jax.models import Edit
from ferrum_jax.models.specs import ParamTree
from tests.executor.asking import batch, item, prompt, run, token
from tests.executor.conftest import CAPACITY, ENGINE, Oracle, make_runner

ATOL = 1e-4  # float32 sums in another order
FIRST, SECOND = [3, 1, 4, 1, 5], [9, 2, 6]


@pytest.fixture
def executor(runner: ModelRunner) -> LlmExecutor:
    return LlmExecutor(runner)


def test_ids_are_counted_and_never_reused(executor: LlmExecutor):
    first = run(executor.prefill(prompt(FIRST))).kv_cache
    executor.release_cache(first.cache_id)
    second = run(executor.prefill(prompt(FIRST))).kv_cache
    assert (first.cache_id, second.cache_id) == ("llm-cache-0", "llm-cache-1")


def test_two_executors_of_one_model_do_not_share_an_id(executor: LlmExecutor, runner: ModelRunner):
    first = run(executor.prefill(prompt(FIRST))).kv_cache
    other = LlmExecutor(runner)
    assert run(other.prefill(prompt(SECOND))).kv_cache.cache_id != first.cache_id
    assert runner.kv_len(first.cache_id) == 5


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, jnp.int32])
def test_a_prompt_returns_the_last_tokens_logits(executor: LlmExecutor, oracle: Oracle, kind: type):
    make = jnp.asarray if kind is jnp.int32 else np.asarray
    out = run(executor.prefill(PrefillInput(input_ids=make([FIRST], kind))))
    assert out.logits.shape == (1, 1, 37)
    assert out.logits.dtype == np.float32
    np.testing.assert_allclose(out.last_token_logits()[0], oracle(FIRST)[-1], atol=ATOL)
    assert out.kv_cache.num_tokens == 5
    assert (out.hidden_states, out.attention_weights) == (None, None)


def test_a_prompt_in_chunks_is_the_prompt_at_once(executor: LlmExecutor, oracle: Oracle):
    handle = run(executor.prefill(prompt(FIRST))).kv_cache
    positions, mask = np.array([[5, 6, 7]]), np.ones((1, 3))
    out = run(executor.prefill(prompt(SECOND, handle, position_ids=positions, attention_mask=mask)))
    np.testing.assert_allclose(out.logits[0, 0], oracle(FIRST + SECOND)[-1], atol=ATOL)
    assert (out.kv_cache.cache_id, out.kv_cache.num_tokens) == (handle.cache_id, 8)


def test_all_positions_logits_are_given_where_asked_for(executor: LlmExecutor, oracle: Oracle):
    asked = {"ferrum_require_full_logits": True, "mine": "ignored"}
    out = run(executor.prefill(prompt(FIRST, metadata=asked)))
    assert out.logits.shape == (1, 5, 37)
    np.testing.assert_allclose(out.logits[0], oracle(FIRST), atol=ATOL)
    both = run(executor.batch_prefill([prompt(SECOND), prompt(FIRST, metadata=asked), prompt(FIRST)]))
    assert [out.logits.shape for out in both] == [(1, 1, 37), (1, 5, 37), (1, 1, 37)]
    np.testing.assert_allclose(both[0].logits[0, 0], oracle(SECOND)[-1], atol=ATOL)
    np.testing.assert_allclose(both[1].logits[0], oracle(FIRST), atol=ATOL)


def test_a_cohort_of_prompts_is_each_alone(executor: LlmExecutor, oracle: Oracle):
    begun = run(executor.prefill(prompt(FIRST))).kv_cache
    outs = run(executor.batch_prefill([prompt(SECOND), prompt(SECOND, begun), prompt([7])]))
    for out, tokens in zip(outs, (SECOND, FIRST + SECOND, [7]), strict=True):
        np.testing.assert_allclose(out.logits[0, 0], oracle(tokens)[-1], atol=ATOL)
        assert out.kv_cache.is_valid()
        assert out.kv_cache.num_tokens == len(tokens)
    assert run(executor.batch_prefill([])) == []


def test_a_cohort_that_does_not_fit_leaves_nothing(executor: LlmExecutor, runner: ModelRunner):
    before = runner.kv_slot_capacity_snapshot()
    with pytest.raises(ResourceExhaustedError) as caught:
        run(executor.batch_prefill([prompt(FIRST)] * 5))
    assert (caught.value.needed, caught.value.free) == (5, 4)
    assert runner.kv_slot_capacity_snapshot() == before
    assert executor.status().prefill_operations == 0


def test_decoding_goes_on_from_the_handle(executor: LlmExecutor, oracle: Oracle):
    handle = run(executor.prefill(prompt(FIRST))).kv_cache
    out = run(executor.decode(token(9, handle, position_ids=np.array([[5]]))))
    assert out.logits.shape == (1, 37)
    np.testing.assert_allclose(out.logits[0], oracle([*FIRST, 9])[-1], atol=ATOL)
    assert (handle.num_tokens, out.kv_cache.num_tokens) == (5, 6)
    assert not handle.is_valid()
    assert handle.block_table.sequence_length == 5


def test_a_batch_answers_in_order_and_as_its_policies_ask(executor: LlmExecutor, oracle: Oracle):
    one, two, three = (
        out.kv_cache for out in run(executor.batch_prefill([prompt(FIRST), prompt(SECOND), prompt([7])]))
    )
    expected = oracle([*SECOND, 8])[-1]
    mask = np.ones(37, np.int8)
    mask[int(np.argmax(expected))] = 0
    allowed = TokenSelectionMask(fingerprint=1, valid_token_mask=mask)
    penalty = GreedyRepetitionPenalty(penalty=2.0, token_ids=[1, 2, 3])
    outs = run(
        executor.batch_decode(
            [
                token(6, three, logits_policy=GreedyArgmax(repetition_penalty=penalty)),
                token(8, two, logits_policy=GreedyArgmax(token_mask=allowed)),
                token(9, one),
            ]
        )
    )
    penalised = oracle([7, 6])[-1].copy()
    penalised[[1, 2, 3]] *= np.where(penalised[[1, 2, 3]] > 0, 0.5, 2.0)
    assert outs[0].logits.tolist() == [[int(np.argmax(penalised))]]
    assert outs[1].logits.tolist() == [[int(np.argmax(np.where(mask, expected, -np.inf)))]]
    assert outs[1].logits.dtype == np.int32
    np.testing.assert_allclose(outs[2].logits[0], oracle([*FIRST, 9])[-1], atol=ATOL)
    assert [out.kv_cache.num_tokens for out in outs] == [2, 4, 6]
    assert run(executor.batch_decode([])) == []


def test_full_logits_of_a_decode_are_counted_as_forced(executor: LlmExecutor, runner: ModelRunner):
    handle = run(executor.prefill(prompt(FIRST))).kv_cache
    before = runner.cache_metrics_snapshot()["decode_batch"]["force_full_logits_calls"]
    run(executor.decode(token(9, handle, metadata={"ferrum_require_full_logits": True})))
    assert runner.cache_metrics_snapshot()["decode_batch"]["force_full_logits_calls"] == before + 1


def test_a_mixed_batch_is_its_rows_alone(executor: LlmExecutor, oracle: Oracle):
    handle = run(executor.prefill(prompt(FIRST))).kv_cache
    answers = run(
        executor.unified_decode(
            batch(
                item("mine", [9], 5, kv_cache=handle),
                item("b", SECOND, 0, final=False),
                item("c", SECOND, 0, logits_policy=GreedyArgmax()),
            )
        )
    )
    np.testing.assert_allclose(answers[0], oracle([*FIRST, 9])[-1], atol=ATOL)
    assert answers[1:] == [None, int(np.argmax(oracle(SECOND)[-1]))]
    assert executor.handle("b").num_tokens == 3
    (last,) = run(executor.unified_decode(batch(item("b", FIRST, 3))))
    np.testing.assert_allclose(last, oracle(SECOND + FIRST)[-1], atol=ATOL)
    on = run(executor.decode(token(2, handle.with_sequence_length(6))))
    np.testing.assert_allclose(on.logits[0], oracle([*FIRST, 9, 2])[-1], atol=ATOL)
    executor.release_cache("b")
    with pytest.raises(RequestValidationError, match="'b' is no live sequence"):
        executor.handle("b")
    assert run(executor.unified_decode(batch())) == []


def test_verifying_returns_every_position_and_its_handle(executor: LlmExecutor, oracle: Oracle):
    handle = run(executor.prefill(prompt(FIRST))).kv_cache
    policies = [FullLogits(), GreedyArgmax(), FullLogits()]
    outs = run(
        executor.forward_verify([token(t, handle, logits_policy=p) for t, p in zip(SECOND, policies, strict=True)])
    )
    expected = oracle(FIRST + SECOND)[5:]
    np.testing.assert_allclose(outs[0].logits[0], expected[0], atol=ATOL)
    assert outs[1].logits.tolist() == [[int(np.argmax(expected[1]))]]
    np.testing.assert_allclose(outs[2].logits[0], expected[2], atol=ATOL)
    assert [out.kv_cache.num_tokens for out in outs] == [6, 7, 8]
    assert [out.kv_cache.is_valid() for out in outs] == [False, False, True]
    run(executor.truncate_kv(handle, 6))
    assert outs[0].kv_cache.is_valid()
    short = outs[0].kv_cache
    again = run(
        executor.forward_verify([token(SECOND[1], short), token(SECOND[2], short, position_ids=np.array([[7]]))])
    )
    np.testing.assert_allclose(np.concatenate([out.logits for out in again]), expected[1:], atol=ATOL)
    run(executor.truncate_kv(handle, 6))
    on = run(executor.decode(token(8, outs[0].kv_cache)))
    np.testing.assert_allclose(on.logits[0], oracle([*FIRST, SECOND[0], 8])[-1], atol=ATOL)


def test_truncating_takes_any_handle_of_a_live_sequence(executor: LlmExecutor, oracle: Oracle):
    old = run(executor.prefill(prompt(FIRST))).kv_cache
    run(executor.decode(token(9, old)))
    run(executor.truncate_kv(old, 100))
    assert executor.handle(old.cache_id).num_tokens == 6
    run(executor.truncate_kv(old, 2))
    executor.truncate_kv_for_cache_id(old.cache_id, 50)
    executor.truncate_kv_for_cache_id("unknown", 0)
    out = run(executor.decode(token(7, old.with_sequence_length(2))))
    np.testing.assert_allclose(out.logits[0], oracle([*FIRST[:2], 7])[-1], atol=ATOL)
    executor.truncate_kv_for_cache_id(old.cache_id, 1)
    assert executor.handle(old.cache_id).num_tokens == 1


@pytest.mark.parametrize("taken", [0, 3])
def test_a_forward_without_a_cache_keeps_nothing(
    executor: LlmExecutor, runner: ModelRunner, oracle: Oracle, taken: int
):
    for at in range(taken):
        runner.prefill(f"other-{at}", [1])
    before = runner.kv_slot_capacity_snapshot()
    rows = np.array([FIRST, FIRST[::-1]])
    logits = run(executor.forward(rows))
    assert logits.shape == (2, 5, 37)
    for row, expected in zip(logits, rows.tolist(), strict=True):
        np.testing.assert_allclose(row, oracle(expected), atol=ATOL)
    assert runner.kv_slot_capacity_snapshot() == before
    assert run(executor.prefill(prompt(FIRST))).kv_cache.cache_id == "llm-cache-0"


def test_warming_up_is_the_models_own_or_what_was_passed(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    warmed: list[Any] = []
    monkeypatch.setattr(ModelRunner, "warmup", lambda _, **settings: warmed.append(settings))
    run(LlmExecutor(runner).warmup())
    run(LlmExecutor(runner, warm=lambda: warmed.append("mine")).warmup())
    assert warmed == [{"progress": False}, "mine"]


@pytest.mark.slow
def test_warming_up_compiles_every_declared_step_and_leaves_no_trace(params: ParamTree):
    small = replace(ENGINE, decode_rows=(1,), query_blocks=(1,), block_tokens=4, verify_tokens=4)
    with make_runner(params, small) as runner:
        before = runner.kv_slot_capacity_snapshot(), runner.cache_metrics_snapshot()
        run(LlmExecutor(runner).warmup())
        assert (runner.kv_slot_capacity_snapshot(), runner.cache_metrics_snapshot()) == before
        assert runner.compile_stats()["compiled"] == len(runner.plan.declared())


def test_shutting_down_releases_what_was_begun_here_and_nothing_else(runner: ModelRunner):
    closed = []
    executor = LlmExecutor(runner, close=lambda: closed.append(True))
    runner.prefill("theirs", [1])
    run(executor.prefill(prompt(FIRST)))
    run(executor.shutdown())
    run(executor.shutdown())
    assert closed == [True]
    assert runner.kv_slot_capacity_snapshot().free_blocks == 17
    assert runner.kv_len("theirs") == 1
    assert executor.status().state is ExecutorState.Shutdown


def test_blocks_are_reserved_and_counted_through_the_executor(executor: LlmExecutor):
    pool = executor.kv_slot_capacity_snapshot()
    assert pool is not None
    assert (pool.block_size, pool.free_blocks) == (8, 18)
    reservation = executor.reserve_kv_slots([KvSlotRequest(cache_id="a", target_len=9)])
    assert reservation is not None
    assert (reservation.free_blocks_before, reservation.free_blocks_after) == (18, 16)
    taken = KvSlotAllocation(cache_id="a", blocks_before=0, blocks_after=2, new_blocks=2)
    assert reservation.allocations == (taken,)
    run(executor.unified_decode(batch(item("a", FIRST, 0))))
    assert executor.handle("a").num_tokens == 5
    executor.release_cache("a")
    assert executor.kv_slot_capacity_snapshot() == pool
    assert executor.kv_capacity() == CAPACITY


def test_admission_is_checked_before_a_prompt_is_read(executor: LlmExecutor, runner: ModelRunner):
    out = run(executor.prefill(prompt(FIRST, metadata={"ferrum_kv_admission_target_len": 40})))
    assert out.kv_cache.stats()["num_blocks"] == 1
    hint = {"ferrum_kv_capacity_hint": CAPACITY + 1}
    with pytest.raises(RequestValidationError, match="45 positions"):
        run(executor.prefill(prompt(SECOND, metadata=hint)))
    others = [run(executor.prefill(prompt([first, *range(29)]))).kv_cache for first in (30, 31, 32)]
    free = runner.kv_slot_capacity_snapshot().free_blocks
    assert free == 5
    whole = {"ferrum_kv_admission_target_len": 44}
    cohort = [prompt([1] * 9, handle, metadata=whole) for handle in (out.kv_cache, *others[:2])]
    with pytest.raises(ResourceExhaustedError):
        run(executor.batch_prefill(cohort))
    assert runner.kv_slot_capacity_snapshot().free_blocks == free
    assert all(handle.is_valid() for handle in [out.kv_cache, *others])


def test_a_refused_call_leaves_what_was_reserved_before(executor: LlmExecutor, runner: ModelRunner):
    handle = run(executor.prefill(prompt(FIRST))).kv_cache
    executor.reserve_kv_slots([KvSlotRequest(cache_id=handle.cache_id, target_len=24)])
    reserved = runner.kv_slot_capacity_snapshot()
    for options in ({"ferrum_kv_capacity_hint": 10**6}, {"ferrum_kv_admission_target_len": CAPACITY + 1}):
        with pytest.raises(RequestValidationError, match="positions"):
            run(executor.prefill(prompt(SECOND, handle, metadata=options)))
        assert runner.kv_slot_capacity_snapshot() == reserved
    for at in range(3):
        runner.prefill(f"x{at}", [1 + at] * 40)
    reserved = runner.kv_slot_capacity_snapshot()
    with pytest.raises(ResourceExhaustedError, match="KV blocks"):
        run(executor.prefill(prompt([1] * (CAPACITY - len(FIRST)), handle)))
    assert runner.kv_slot_capacity_snapshot() == reserved
    assert handle.is_valid()


def test_a_call_that_is_undone_leaves_what_was_reserved_before(executor: LlmExecutor, runner: ModelRunner):
    handle = run(executor.prefill(prompt(FIRST))).kv_cache
    executor.reserve_kv_slots([KvSlotRequest(cache_id=handle.cache_id, target_len=24)])
    reserved = runner.kv_slot_capacity_snapshot()
    table = executor._table
    sequence = live_sequence(handle, table)
    for count in (1, 30):
        log = UndoLog(table)
        log.record(sequence)
        runner.prefill(handle.cache_id, [3] * count)
        log.undo()
        assert runner.kv_len(handle.cache_id) == len(FIRST)
        assert runner.kv_slot_capacity_snapshot() == reserved
    run(executor.truncate_kv(handle, 2))  # the caller's own, which gives them back
    log = UndoLog(table)
    log.record(live_sequence(handle, table))
    runner.prefill(handle.cache_id, [3])
    log.undo()
    now = runner.kv_slot_capacity_snapshot()
    assert now.free_blocks > reserved.free_blocks


def test_a_refused_call_does_not_reserve_again_what_was_freed(executor: LlmExecutor, runner: ModelRunner):
    """A block that a fork shares by now is not copied; one that a direct truncation has freed is not taken again."""
    handle = run(executor.prefill(prompt(FIRST))).kv_cache
    executor.reserve_kv_slots([KvSlotRequest(cache_id=handle.cache_id, target_len=len(FIRST))])
    fork = handle.clone_handle()
    refused = {"metadata": {"ferrum_kv_capacity_hint": 10**6}}
    for at, target in enumerate((None, 24)):
        if target is not None:
            executor.release_cache(fork.cache_id)
            executor.reserve_kv_slots([KvSlotRequest(cache_id=handle.cache_id, target_len=target)])
            runner.truncate_kv(handle.cache_id, 2)
            handle = handle.with_sequence_length(2)
        before = runner.kv_slot_capacity_snapshot(), handle.block_table
        with pytest.raises(RequestValidationError, match="positions"):
            run(executor.prefill(prompt(SECOND, handle, **refused)))
        assert (runner.kv_slot_capacity_snapshot(), handle.block_table) == before, at


def test_a_refused_call_leaves_what_is_bound_to_an_id_that_it_was_to_begin(executor: LlmExecutor, runner: ModelRunner):
    runner.set_interventions("x", {("resid_post", 0): Edit(scale=np.float32(0))})
    bound = runner._pipeline.interventions.of("x")
    others = [run(executor.prefill(prompt(FIRST))).kv_cache for _ in range(4)]
    assert all(handle.is_valid() for handle in others)
    with pytest.raises(ResourceExhaustedError):
        run(executor.unified_decode(batch(item("x", SECOND, 0))))
    assert bound is not None
    assert runner._pipeline.interventions.of("x") is bound


def test_two_executors_of_one_model_never_have_the_same_id(executor: LlmExecutor, runner: ModelRunner):
    handle = run(executor.prefill(prompt(FIRST))).kv_cache
    run(executor.truncate_kv(handle, 0))
    other = LlmExecutor(runner)
    assert run(other.prefill(prompt(SECOND))).kv_cache.cache_id != handle.cache_id


def test_a_refused_call_leaves_a_prepared_id_its_slot(executor: LlmExecutor, runner: ModelRunner):
    runner.prepare("y", 8)
    with pytest.raises(ResourceExhaustedError):
        run(executor.unified_decode(batch(item("y", FIRST, 0), *(item(f"z{at}", SECOND, 0) for at in range(4)))))
    assert runner.kv_len("y") == 0


def test_metrics_of_the_cache_count_waits_for_the_model(executor: LlmExecutor):
    run(executor.prefill(prompt(FIRST)))
    metrics = executor.cache_metrics_snapshot()
    lock = metrics["executor_model_lock"]
    assert lock["schema_version"] == 1
    assert lock["samples"] == 2  # the prompt and this question
    assert lock["total_wait_time_us"] >= 0
    executor.optimal_batch_size()
    assert executor.cache_metrics_snapshot()["executor_model_lock"]["samples"] == 4  # one more question each
    assert lock["avg_wait_time_ms"] == pytest.approx(lock["total_wait_time_us"] / 2000, abs=1e-3)
    assert metrics["position"] == "real-kv-reuse"
    assert metrics["decode_batch"]["unsupported_fallback_calls"] == 0
    lora = executor.lora_metrics_snapshot()
    assert lora is not None
    assert lora["position"] == "real-inference"


def test_the_best_size_of_a_batch_is_what_lives_and_what_could_begin(executor: LlmExecutor, runner: ModelRunner):
    for at in range(2):
        runner.prefill(f"another's {at}", [at] * CAPACITY)  # six blocks of eighteen
    assert executor.optimal_batch_size() == 4
    run(executor.prefill(prompt([2] * 40)))
    assert runner.kv_slot_capacity_snapshot().free_blocks == 1
    assert executor.optimal_batch_size() == 1 + 1
    run(executor.prefill(prompt([3] * 8)))
    assert executor.optimal_batch_size() == 2


def test_the_executor_reports_what_the_model_is_and_can(executor: LlmExecutor, runner: ModelRunner):
    assert executor.info() == runner.model_info()
    assert executor.capabilities() == runner.capabilities()
    assert executor.supports_native_unified_decode()
    assert executor.optimal_batch_size() == 4
    sizes = (1, 4, 5, 0)
    assert [executor.supports_batch_size(size) for size in sizes] == [True, True, False, False]
    given = executor.info()
    assert LlmExecutor(runner, given).info() is given
    wrong: Any = 3
    with pytest.raises(RequestValidationError, match="int, expected a DecoderOnlyLLM"):
        LlmExecutor(wrong)

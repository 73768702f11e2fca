"""A model of the four required methods alone works through every method of an executor."""

import asyncio
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import CoroutineType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ferrum_jax import LLM, LlmExecutor, SamplingParams
from ferrum_jax.contract import BlockTable, DataType, FullLogits, GreedyArgmax, KvSlotRequest
from ferrum_jax.contract.errors import ModelError, RequestValidationError, UnsupportedError
from tests.executor.asking import batch, item, prompt, run, token
from tests.fake import CountingLLM, SummingLLM


@pytest.fixture
def model() -> CountingLLM:
    return CountingLLM()


@pytest.fixture
def executor(model: CountingLLM) -> LlmExecutor:
    return LlmExecutor(model)


def test_prompts_and_tokens_follow_each_other(executor: LlmExecutor, model: CountingLLM):
    out = run(executor.prefill(prompt([1, 2, 3])))
    assert np.argmax(out.logits) == model.next_token(3, 2)
    out = run(executor.prefill(prompt([4, 5], out.kv_cache)))
    assert np.argmax(out.logits) == model.next_token(5, 4)
    step = run(executor.decode(token(6, out.kv_cache, logits_policy=GreedyArgmax())))
    assert step.logits.tolist() == [[model.next_token(6, 5)]]
    assert step.kv_cache.num_tokens == 6
    assert step.kv_cache.is_valid()
    assert not out.kv_cache.is_valid()


def test_batches_and_mixed_batches_fall_back_to_single_calls(executor: LlmExecutor, model: CountingLLM):
    a, b = (out.kv_cache for out in run(executor.batch_prefill([prompt([1, 2]), prompt([3])])))
    outs = run(executor.batch_decode([token(4, b), token(5, a)]))
    assert [int(np.argmax(out.logits)) for out in outs] == [model.next_token(4, 1), model.next_token(5, 2)]
    answers = run(
        executor.unified_decode(
            batch(
                item("", [6], 2, kv_cache=outs[0].kv_cache),
                item("c", [7, 8], 0, final=False),
                item("d", [9], 0, logits_policy=GreedyArgmax()),
                item("", [10], 3, kv_cache=outs[1].kv_cache, logits_policy=GreedyArgmax()),
            )
        )
    )
    assert int(np.argmax(answers[0])) == model.next_token(6, 2)
    assert answers[1:] == [None, model.next_token(9, 0), model.next_token(10, 3)]
    assert model.lengths == {"llm-cache-0": 4, "llm-cache-1": 3, "c": 2, "d": 1}
    assert executor.cache_metrics_snapshot()["decode_batch"]["unsupported_fallback_calls"] == 2
    assert not executor.supports_native_unified_decode()


def test_a_batch_that_fails_half_way_leaves_as_much_as_it_can(executor: LlmExecutor, model: CountingLLM):
    kept, lost, third = (
        out.kv_cache for out in run(executor.batch_prefill([prompt([1, 2]), prompt([3]), prompt([4])]))
    )
    model.lengths[lost.cache_id] = 7  # the model will refuse the position
    with pytest.raises(RequestValidationError, match="pos 1, length 7"):
        run(executor.batch_decode([token(4, lost), token(5, kept)]))
    assert kept.is_valid()
    with pytest.raises(RequestValidationError, match="pos 1, length 7"):
        run(executor.batch_decode([token(5, kept), token(4, lost), token(6, third)]))
    assert not kept.is_valid()  # it was advanced, and the model cannot take that back
    assert third.is_valid()
    assert kept.cache_id not in model.lengths


def test_a_model_that_can_truncate_takes_back_what_it_cannot_count():
    class Truncating(CountingLLM):
        def truncate_kv(self, cache_id: str, new_len: int) -> None:
            self.lengths[cache_id] = min(self.lengths[cache_id], new_len)

    model = Truncating()
    executor = LlmExecutor(model)
    one, two = (out.kv_cache for out in run(executor.batch_prefill([prompt([1, 2]), prompt([3])])))
    model.lengths[two.cache_id] = 7  # the model will refuse the position
    with pytest.raises(RequestValidationError, match="pos 1, length 7"):
        run(executor.batch_decode([token(5, one), token(4, two)]))
    assert model.lengths[one.cache_id] == 2
    assert one.is_valid()
    assert run(executor.decode(token(5, one))).kv_cache.num_tokens == 3


def test_all_logits_come_token_by_token(executor: LlmExecutor, model: CountingLLM):
    logits = run(executor.forward(np.array([[1, 2, 3], [4, 5, 6]])))
    assert np.argmax(logits, axis=-1).tolist() == [[1, 3, 5], [4, 6, 8]]
    assert model.lengths == {}
    out = run(executor.prefill(prompt([1, 2, 3], metadata={"ferrum_require_full_logits": True})))
    assert np.argmax(out.logits, axis=-1).tolist() == [[1, 3, 5]]
    outs = run(executor.forward_verify([token(4, out.kv_cache), token(5, out.kv_cache)]))
    assert [int(np.argmax(out.logits)) for out in outs] == [model.next_token(4, 3), model.next_token(5, 4)]
    assert outs[1].kv_cache.is_valid()


def test_speculation_stops_at_the_first_token_that_is_not_accepted(executor: LlmExecutor, model: CountingLLM):
    handle = run(executor.prefill(prompt([1, 2, 3]))).kv_cache
    good = [model.next_token(5, 3)]
    good.append(model.next_token(good[0], 4))
    out = run(executor.speculative_decode(token(5, handle), [*good, 0, 0], 1.0))
    assert (list(out.accepted_tokens), out.acceptance_count) == (good, 2)
    assert model.lengths == {"llm-cache-0": 6}
    assert out.kv_cache.is_valid()
    assert np.argmax(out.next_logits) == model.next_token(good[1], 5)
    all_of_them = run(executor.speculative_decode(token(int(np.argmax(out.next_logits)), out.kv_cache), [0, 0], 0.0))
    assert all_of_them.acceptance_count == 2
    assert model.lengths == {"llm-cache-0": 9}


def test_what_it_cannot_do_is_refused_and_what_it_does_not_know_is_none(executor: LlmExecutor, model: CountingLLM):
    handle = run(executor.prefill(prompt([1, 2, 3]))).kv_cache
    with pytest.raises(UnsupportedError, match="roll"):
        run(executor.truncate_kv(handle, 1))
    with pytest.raises(UnsupportedError, match="roll"):
        executor.truncate_kv_for_cache_id(handle.cache_id, 1)
    run(executor.truncate_kv(handle, 3))  # nothing to do
    with pytest.raises(UnsupportedError, match="fork"):
        handle.clone_handle()
    with pytest.raises(UnsupportedError, match="KV"):
        handle.key_cache(0)
    adapter = {"ferrum_lora_adapter": "x", "ferrum_lora_path": "y"}
    with pytest.raises(UnsupportedError, match="LoRA"):
        run(executor.prefill(prompt([1], metadata=adapter)))
    assert model.lengths == {"llm-cache-0": 3}
    assert handle.is_valid()
    assert executor.reserve_kv_slots([KvSlotRequest(cache_id="a", target_len=3)]) is None
    assert executor.kv_slot_capacity_snapshot() is None
    assert executor.lora_metrics_snapshot() is None
    assert executor.cache_metrics_snapshot().keys() == {"decode_batch", "executor_model_lock"}
    assert executor.optimal_batch_size() == 1
    run(executor.warmup())


def test_a_model_that_reports_nothing_is_described_by_its_sizes(executor: LlmExecutor):
    info, can = executor.info(), executor.capabilities()
    assert (info.model_id, info.num_parameters, info.num_heads, info.vocab_size) == ("CountingLLM", 0, 0, 23)
    assert (info.dtype, str(info.device), info.estimated_size()) == (DataType.FP32, "cpu", 0)
    assert "num_parameters" in info.metadata["not_told"]
    assert (can.max_batch_size, can.max_sequence_length, can.attention_mechanisms) == (1, 64, ())
    assert not can.supports_dynamic_batching
    assert not can.supports_continuous_batching
    assert can.supports_speculative_decoding  # as the test of speculation above shows
    assert can.memory_requirements.kv_cache_memory_per_token == 2 * 1 * 2 * 4


FULL_LOGITS = {"ferrum_require_full_logits": True}
CALLS = [
    lambda e, h: e.prefill(prompt([4])),
    lambda e, h: e.prefill(prompt([4], h, metadata=FULL_LOGITS)),
    lambda e, h: e.batch_prefill([prompt([4]), prompt([5], h)]),
    lambda e, h: e.decode(token(4, h)),
    lambda e, h: e.batch_decode([token(4, h)]),
    lambda e, h: e.unified_decode(batch(item("a", [4, 5], 0), item("", [5], 3, kv_cache=h))),
    lambda e, h: e.forward_verify([token(4, h), token(5, h)]),
    lambda e, h: e.speculative_decode(token(4, h), [5], 0.0),
    lambda e, h: e.forward(np.array([[1, 2]])),
]


@pytest.mark.parametrize("kind", [CountingLLM, SummingLLM])
@pytest.mark.parametrize("call", CALLS)
def test_few_frames_lie_between_a_call_and_the_model(kind: type, call: Callable[[LlmExecutor, Any], Any]):
    depths: list[int] = []

    def inside(frames: Iterable[Any]) -> int:
        return sum("/ferrum_jax/executor/" in frame.f_code.co_filename for frame in frames)

    class Tracing(kind):
        def __getattribute__(self, name: str) -> Any:
            if name in ("prefill", "decode", "decode_batch", "forward_verify", "unified_forward"):
                depths.append(inside(frame for frame, _ in traceback.walk_stack(sys._getframe(1))))
            return super().__getattribute__(name)

    async def scenario() -> None:
        executor = LlmExecutor(Tracing())
        handle = (await executor.prefill(prompt([1, 2, 3]))).kv_cache
        depths.clear()
        task = asyncio.create_task(call(executor, handle))
        await asyncio.sleep(0)
        waiting, coroutine = 0, task.get_coro()
        while isinstance(coroutine, CoroutineType):
            waiting += inside([coroutine.cr_frame])
            coroutine = coroutine.cr_await
        await task
        assert waiting + max(depths) <= 5

    run(scenario())


def test_its_handles_know_positions_and_no_blocks(executor: LlmExecutor):
    handle = run(executor.prefill(prompt([1, 2, 3]))).kv_cache
    table = handle.block_table
    assert (table.physical_blocks, table.sequence_length, table.block_size) == ((), 3, 0)
    assert (handle.num_layers, handle.num_heads, handle.head_dim, str(handle.device)) == (1, 1, 2, "cpu")
    assert handle.stats() == {
        "cache_id": "llm-cache-0", "num_tokens": 3, "num_blocks": 0, "block_size": 0, "bytes": 3 * 16,
    }  # fmt: skip


def test_a_sequence_does_not_grow_past_the_capacity(executor: LlmExecutor, model: CountingLLM):
    handle = run(executor.prefill(prompt([1] * 64))).kv_cache
    for call in (executor.decode(token(1, handle)), executor.prefill(prompt([1, 2], handle))):
        with pytest.raises(RequestValidationError, match=r"6[56] positions, the KV capacity of a sequence is 64"):
            run(call)
    with pytest.raises(RequestValidationError, match="65 positions"):
        run(executor.forward(np.ones((1, 65), np.int32)))
    assert model.lengths == {"llm-cache-0": 64}


def test_a_model_that_answers_nonsense_is_a_model_error(
    executor: LlmExecutor, model: CountingLLM, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model, "_logits", lambda *_: np.zeros(5, np.float32))
    with pytest.raises(ModelError, match=r"shape \[5\], expected \[23\]"):
        run(executor.prefill(prompt([1])))
    assert model.lengths == {}


def test_a_model_that_answers_for_too_few_rows_is_a_model_error_whatever_is_asked(
    model: CountingLLM, monkeypatch: pytest.MonkeyPatch
):
    model.prefill("a", [1])
    for name in ("decode_batch", "unified_forward", "forward_verify_batch"):
        monkeypatch.setattr(model, name, lambda *_: [])
    for policy in (FullLogits(), GreedyArgmax()):
        with pytest.raises(ModelError, match="returned 0 answers for 1 rows"):
            model.decode_batch_with_logits_policy([("a", 1, 1)], [policy])
    with pytest.raises(ModelError, match="returned 0 answers for 1 rows"):
        model.unified_forward_with_logits_policy([("a", [1], 0, True)], [GreedyArgmax()])
    with pytest.raises(ModelError, match="returned 0 answers for 1 rows"):
        model.score_batch([("a", [1], [2])])


class OneBuffer(CountingLLM):
    """Writes the logits of every call to one place, as models in other languages do."""

    def _logits(self, last: int, position: int) -> NDArray[np.float32]:
        self.buffer = getattr(self, "buffer", np.zeros(self.config.vocab_size, np.float32))
        self.buffer[:] = super()._logits(last, position)
        return self.buffer


def test_a_model_may_write_all_its_logits_to_one_place():
    one, many = OneBuffer(), CountingLLM()
    executors = LlmExecutor(one), LlmExecutor(many)
    tokens = np.array([[1, 2, 3]], np.int32)
    mine, theirs = (run(executor.forward(tokens)) for executor in executors)
    np.testing.assert_array_equal(mine, theirs)
    answers = []
    for model, executor in zip((one, many), executors, strict=True):
        outs = run(executor.batch_prefill([prompt([1]), prompt([2, 2]), prompt([5])]))
        steps = run(executor.batch_decode([token(3, outs[0].kv_cache), token(7, outs[1].kv_cache)]))
        for key in "ab":
            model.prefill(key, [4])
        direct = model.decode_batch([("a", 5, 1), ("b", 9, 1)])
        answers.append([*(out.logits for out in [*outs, *steps]), *direct])
    for mine, theirs in zip(*answers, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    texts = [LLM.from_model(model).generate([[1], [2, 3]], SamplingParams(max_tokens=4)) for model in (one, many)]
    assert [out.token_ids for out in texts[0]] == [out.token_ids for out in texts[1]]


def test_a_model_may_say_that_it_has_no_blocks(
    executor: LlmExecutor, model: CountingLLM, monkeypatch: pytest.MonkeyPatch
):
    none = BlockTable(physical_blocks=(), sequence_length=3, block_size=0)
    monkeypatch.setattr(model, "kv_block_table", lambda _: none)
    handle = run(executor.prefill(prompt([1, 2, 3]))).kv_cache
    assert handle.block_table == none
    assert handle.stats()["num_blocks"] == 0


def test_a_model_that_takes_no_rows_is_a_model_error(model: CountingLLM, monkeypatch: pytest.MonkeyPatch):
    built = replace(LlmExecutor(model).capabilities(), max_batch_size=0)
    monkeypatch.setattr(model, "capabilities", lambda: built)
    with pytest.raises(ModelError, match="max_batch_size 0, expected at least 1"):
        LlmExecutor(model)


def test_handles_that_are_arrays_are_refused_by_name(executor: LlmExecutor):
    foreign: Any = np.zeros(3)
    with pytest.raises(RequestValidationError):
        run(executor.forward_verify([token(1, foreign), token(2, foreign.copy())]))

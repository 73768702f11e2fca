"""Models of other authors, which keep to the contract in their own way, and sequences that their callers began."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import ActiveLoraAdapter, ExecutorState, FullLogits, GreedyArgmax, KvSlotRequest
from ferrum_jax.contract.errors import (
    ModelError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
)
from ferrum_jax.executor import ModelRunner
from tests.executor.asking import batch, item, prompt, run, token
from tests.executor.conftest import Oracle
from tests.fake import CountingLLM, SummingLLM

FIRST, SECOND = [3, 1, 4, 1, 5], [9, 2, 6]
ATOL = 1e-4  # float32 sums in another order


class OwnNames(CountingLLM):
    """Uses names that the contract does not have, and warms up in silence."""

    def __init__(self):
        super().__init__()
        self.state: Any = {}
        self.loop_tokens: Any = None
        self.is_warm = False

    def warmup(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.is_warm = True


class ZeroForUnknown(CountingLLM):
    """Says 0, not None, of an id that it does not know."""

    def kv_len(self, cache_id: str) -> int:
        return self.lengths.get(cache_id, 0)


def test_a_model_may_use_the_names_that_the_contract_does_not_have():
    model = OwnNames()
    executor = LlmExecutor(model)
    run(executor.warmup())
    assert model.is_warm
    assert run(executor.prefill(prompt([1, 2]))).kv_cache.is_valid()
    assert (executor.status().state, executor.kv_capacity()) == (ExecutorState.Ready, 64)


def test_a_model_that_says_0_of_an_unknown_id_is_served():
    model = ZeroForUnknown()
    executor = LlmExecutor(model)
    handles = [run(executor.prefill(prompt([1, 2]))).kv_cache for _ in range(2)]
    assert [handle.cache_id for handle in handles] == ["llm-cache-0", "llm-cache-1"]
    assert run(executor.forward(np.array([[1, 2], [3, 4]]))).shape == (2, 2, 23)
    answers = run(executor.unified_decode(batch(item("a", [5], 0), item("", [6], 2, kv_cache=handles[0]))))
    assert [int(np.argmax(one)) for one in answers] == [5, 8]
    run(executor.shutdown())
    assert model.lengths == {}  # "a" was begun here


@pytest.mark.parametrize("tells_none", [True, False])
def test_verifying_begins_a_new_sequence_where_lengths_are_known(tells_none: bool):
    class Knowing(CountingLLM):
        def kv_len(self, cache_id: str) -> int | None:
            return self.lengths.get(cache_id, None if tells_none else 0)

    model = Knowing()
    assert np.argmax(model.forward_verify("a", [3, 4, 5]), axis=1).tolist() == [3, 5, 7]
    assert np.argmax(model.forward_verify("a", [6]), axis=1).tolist() == [9]
    assert model.lengths == {"a": 4}


def test_a_unified_forward_that_turns_out_unsupported_is_not_reported_any_more():
    model = SummingLLM()
    executor = LlmExecutor(model)
    assert executor.supports_native_unified_decode()
    model.failures["unified_forward"] = RequestValidationError("not this one")
    with pytest.raises(RequestValidationError):
        run(executor.unified_decode(batch(item("a", [1], 0))))
    assert executor.supports_native_unified_decode()
    model.failures["unified_forward"] = UnsupportedError("after all")
    (row,) = run(executor.unified_decode(batch(item("a", [1], 0))))
    assert np.argmax(row) == 1
    assert not executor.supports_native_unified_decode()


@pytest.mark.parametrize("takes_slot", [True, False])
def test_an_id_that_was_prepared_is_begun_by_a_mixed_batch(takes_slot: bool, runner: ModelRunner, oracle: Oracle):
    executor = LlmExecutor(runner)
    if takes_slot:
        runner.prepare("y", 8)
        assert runner.kv_len("y") == 0
    (row,) = run(executor.unified_decode(batch(item("y", FIRST, 0))))
    np.testing.assert_allclose(row, oracle(FIRST)[-1], atol=ATOL)
    assert executor.handle("y").num_tokens == 5


def test_a_refused_call_leaves_the_slot_that_its_caller_has_taken(runner: ModelRunner):
    executor = LlmExecutor(runner)
    runner.prepare("y", 8)
    hint = {"ferrum_kv_capacity_hint": runner.kv_capacity() + 1}
    with pytest.raises(RequestValidationError, match="capacity"):
        run(executor.unified_decode(batch(item("y", FIRST, 0, metadata=hint))))
    assert runner.kv_len("y") == 0


def test_a_sequence_of_the_model_goes_on_in_a_mixed_batch_and_stays_its_callers(runner: ModelRunner, oracle: Oracle):
    executor = LlmExecutor(runner)
    runner.prefill("theirs", FIRST)
    with pytest.raises(RequestValidationError, match="pos_offset is 0, the cache holds 5"):
        run(executor.unified_decode(batch(item("theirs", SECOND, 0))))
    hint = {"ferrum_kv_capacity_hint": runner.kv_capacity() + 1}
    with pytest.raises(RequestValidationError, match="capacity"):
        run(executor.unified_decode(batch(item("theirs", SECOND, 5, metadata=hint))))
    assert runner.kv_len("theirs") == 5
    (row,) = run(executor.unified_decode(batch(item("theirs", SECOND, 5))))
    np.testing.assert_allclose(row, oracle(FIRST + SECOND)[-1], atol=ATOL)
    done = executor.reserve_kv_slots([KvSlotRequest(cache_id="theirs", target_len=20)])
    assert done is not None
    run(executor.decode(token(7, executor.handle("theirs"))))
    run(executor.shutdown())
    assert runner.kv_len("theirs") == 9


def test_a_sequence_of_the_model_is_truncated_by_its_id(runner: ModelRunner):
    executor = LlmExecutor(runner)
    runner.prefill("theirs", FIRST)
    executor.truncate_kv_for_cache_id("theirs", 2)
    assert runner.kv_len("theirs") == 2
    executor.truncate_kv_for_cache_id("nobody", 0)
    assert runner.kv_len("nobody") is None
    model = ZeroForUnknown()
    executor = LlmExecutor(model)
    executor.truncate_kv_for_cache_id("nobody", 0)
    model.prefill("theirs", FIRST)
    executor.truncate_kv_for_cache_id("theirs", 5)
    with pytest.raises(UnsupportedError, match="roll"):
        executor.truncate_kv_for_cache_id("theirs", 2)


def test_resetting_drops_what_a_model_without_reset_would_keep():
    model = ZeroForUnknown()
    executor = LlmExecutor(model)
    model.prefill("theirs", FIRST)
    run(executor.unified_decode(batch(item("theirs", [1], 5), item("ours", [1], 0))))
    run(executor.reset())
    assert model.lengths == {}


def test_a_batch_size_below_1_is_not_supported():
    executor = LlmExecutor(SummingLLM())
    assert not executor.supports_batch_size(0)
    assert not executor.supports_batch_size(-1)
    with pytest.raises(RequestValidationError, match="batch_size is '1'"):
        executor.supports_batch_size("1")  # type: ignore[arg-type]


def test_the_classes_of_policies_stand_for_their_instances(runner: ModelRunner, oracle: Oracle):
    policies: Sequence[Any] = [FullLogits, GreedyArgmax]
    executor, fake = LlmExecutor(runner), CountingLLM()
    for model, expected in ((runner, oracle(FIRST)), (fake, None)):
        model.prefill("a", FIRST[:-1])
        model.prefill("b", FIRST[:-1])
        full, greedy = model.decode_batch_with_logits_policy([("a", 5, 4), ("b", 5, 4)], policies)
        assert greedy == np.argmax(full)
        if expected is not None:
            np.testing.assert_allclose(full, expected[-1], atol=ATOL)
    handle = run(executor.prefill(prompt(FIRST[:-1]))).kv_cache
    out = run(executor.decode(token(5, handle, logits_policy=policies[0])))
    np.testing.assert_allclose(out.logits[0], oracle(FIRST)[-1], atol=ATOL)


def test_the_path_of_an_adapter_may_be_a_path():
    model = SummingLLM()
    asked = {"ferrum_lora_adapter": "one", "ferrum_lora_path": Path("/adapters/one")}
    handle = run(LlmExecutor(model).prefill(prompt(FIRST, metadata=asked))).kv_cache
    assert model.adapters[handle.cache_id].path == "/adapters/one"


def test_the_models_own_length_is_in_its_info_and_what_is_served_in_its_capabilities(runner: ModelRunner):
    executor = LlmExecutor(runner)
    assert executor.info().max_sequence_length == runner.config.max_seq_len > runner.kv_capacity()
    assert executor.capabilities().max_sequence_length == runner.kv_capacity()


class OneBuffer(CountingLLM):
    """Writes the logits of every call to one place."""

    def __init__(self):
        super().__init__()
        self.buffer = np.zeros((8, 23), np.float32)

    def _written(self, rows: Sequence[Any]) -> Any:
        for at, row in enumerate(rows):
            self.buffer[at] = row
        return self.buffer[: len(rows)]

    def decode_batch(self, batch: Sequence[Any]) -> list[Any]:
        return list(self._written([self.decode(*row) for row in batch]))

    def unified_forward(self, items: Sequence[Any]) -> list[Any]:
        rows = self._written([self.prefill(cache_id, tokens) for cache_id, tokens, _, _ in items])
        return [row if item[3] else None for row, item in zip(rows, items, strict=True)]

    def forward_verify(self, cache_id: str, tokens: Sequence[int]) -> Any:
        return self._written([self.prefill(cache_id, [token]) for token in tokens])


def test_answers_stay_as_they_are_where_a_model_writes_all_its_logits_to_one_place():
    model = OneBuffer()
    executor = LlmExecutor(model)
    full = {"ferrum_require_full_logits": True}
    outputs: list[Any] = [*run(executor.batch_prefill([prompt([1, 2]), prompt([3, 4])]))]
    outputs.append(run(executor.prefill(prompt([5, 6], metadata=full))))
    for value in (5, 9):
        outputs.append(run(executor.decode(token(value, outputs[0].kv_cache if value == 5 else outputs[-1].kv_cache))))
    outputs += run(executor.forward_verify([token(7, outputs[1].kv_cache), token(8, outputs[1].kv_cache)]))
    found = [np.argmax(out.logits, axis=-1).ravel().tolist() for out in outputs]
    assert found == [[3], [5], [5, 7], [7], [12], [9], [11]]
    rows = model.forward_verify_batch([("a", [1, 2]), ("b", [7, 8])])
    assert [np.argmax(row, axis=1).tolist() for row in rows] == [[1, 3], [7, 9]]
    scores = model.score_batch([("c", [1, 2], [1, 1]), ("d", [7, 8], [1, 1])])
    assert [one.greedy_ids.tolist() for one in scores] == [[1, 3], [7, 9]]


class Silent(CountingLLM):
    """Does not know how long a sequence is, as a model that passes calls on to another may not."""

    is_failing = False

    def kv_len(self, cache_id: str) -> int | None:
        return None

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Any:
        logits = super().prefill(cache_id, tokens)
        if self.is_failing:
            raise ModelError("after the tokens were appended")
        return logits


def test_a_sequence_that_a_failed_call_began_is_released_where_the_model_tells_no_lengths():
    model = Silent()
    executor = LlmExecutor(model)
    run(executor.prefill(prompt([7])))  # which shows that it tells none
    executor.release_cache("llm-cache-0")
    model.is_failing = True
    with pytest.raises(ModelError):
        run(executor.unified_decode(batch(item("x", [1, 2, 3], 0))))
    assert model.lengths == {}
    model.is_failing = False
    (row,) = run(executor.unified_decode(batch(item("x", [1, 2, 3], 0))))
    assert np.argmax(row) == model.next_token(3, 2)


def test_a_first_call_that_is_refused_keeps_what_its_caller_has_bound():
    model = SummingLLM()
    adapter = ActiveLoraAdapter(name="a", path="/a")
    model.set_lora_adapter_for_cache("x", adapter)
    model.failures["unified_forward"] = ResourceExhaustedError("no slot")
    with pytest.raises(ResourceExhaustedError):
        run(LlmExecutor(model).unified_decode(batch(item("x", [1, 2], 0))))
    assert model.adapters == {"x": adapter}


@pytest.mark.parametrize("kind", [CountingLLM, Silent])
def test_two_executors_of_a_model_without_lengths_do_not_share_an_id(kind: type[CountingLLM]):
    model = kind()
    first, second = (run(LlmExecutor(model).prefill(prompt([1, 2, 3]))) for _ in range(2))
    assert first.kv_cache.cache_id != second.kv_cache.cache_id
    np.testing.assert_array_equal(first.logits, second.logits)
    assert sorted(model.lengths.values()) == [3, 3]


class OwnPolicies(CountingLLM):
    """Has a batch of its own for policies alone."""

    full: str | None = None

    def decode(self, cache_id: str, token: int, pos: int) -> Any:
        if cache_id == self.full:
            raise ResourceExhaustedError("no block", needed=1, free=0)
        return super().decode(cache_id, token, pos)

    def decode_batch_with_logits_policy(self, batch: Sequence[Any], policies: Sequence[Any]) -> list[Any]:
        return super().decode_batch_with_logits_policy(batch, policies)


def test_rows_of_a_batch_that_the_contract_runs_one_by_one_are_counted():
    model = OwnPolicies()
    executor = LlmExecutor(model)
    first, second = (run(executor.prefill(prompt(text))).kv_cache for text in ([1, 2], [3, 4]))
    model.full = second.cache_id
    with pytest.raises(ResourceExhaustedError):
        run(executor.batch_decode([token(5, first), token(6, second)]))
    model.full = None
    assert not first.is_valid()  # it cannot be rolled back, so it was released
    assert model.lengths == {second.cache_id: 2}
    assert np.argmax(run(executor.decode(token(6, second))).logits) == 8


def test_several_rows_go_one_by_one_where_they_cannot_be_verified_together():
    class Passing(CountingLLM):
        def forward_verify_batch(self, rows: Sequence[Any]) -> Any:
            return super().forward_verify_batch(rows)  # Unsupported

    model = Passing()
    found = run(LlmExecutor(model).forward([[1, 2], [3, 4]]))
    assert np.argmax(found, axis=-1).tolist() == [[1, 3], [3, 5]]
    assert model.lengths == {}


@pytest.mark.parametrize("own", [[1], {"lora_fallback_calls": "x"}])
def test_counters_that_are_none_are_an_error_of_the_model(own: Any):
    model = CountingLLM()
    model.cache_metrics_snapshot = lambda: {"decode_batch": own}
    with pytest.raises(ModelError, match="cache_metrics_snapshot returned"):
        LlmExecutor(model).cache_metrics_snapshot()
    for count, told in ((None, 0), (np.int64(3), 3)):
        model.cache_metrics_snapshot = lambda count=count: {"decode_batch": {"lora_fallback_calls": count}}
        assert LlmExecutor(model).cache_metrics_snapshot()["decode_batch"]["lora_fallback_calls"] == told


def test_a_shutdown_ends_although_the_model_cannot_release():
    class Strict(CountingLLM):
        def release(self, cache_id: str) -> None:
            del self.lengths[cache_id]

    model, closed = Strict(), []
    executor = LlmExecutor(model, close=lambda: closed.append(True))
    for _ in range(2):
        run(executor.prefill(prompt([1, 2])))
    del model.lengths["llm-cache-0"]
    run(executor.shutdown())
    assert closed == [True]
    assert model.lengths == {}

"""Models of other authors, which keep to the contract in their own way, and sequences that their callers began."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import ExecutorState, FullLogits, GreedyArgmax, KvSlotRequest
from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError
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

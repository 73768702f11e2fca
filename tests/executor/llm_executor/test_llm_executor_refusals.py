"""What an executor refuses, and that a refused call changes nothing."""

import threading
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import create_autospec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import (
    DecodeInput,
    FerrumError,
    GreedyArgmax,
    KvCacheHandle,
    KvSlotRequest,
    PrefillInput,
    TokenSelectionMask,
    UnifiedBatch,
)
from ferrum_jax.contract.errors import (
    CancelledError,
    ModelError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
)
from tests.executor.asking import batch, item, prompt, run, token
from tests.fake import CountingLLM, SummingLLM

Call = Callable[[LlmExecutor, KvCacheHandle], Any]
NOTHING: Any = None
NONE_ALLOWED = GreedyArgmax(token_mask=TokenSelectionMask(fingerprint=0, valid_token_mask=np.zeros(23, np.int8)))


@pytest.fixture
def model() -> SummingLLM:
    return SummingLLM()


@pytest.fixture
def executor(model: SummingLLM) -> LlmExecutor:
    return LlmExecutor(model)


@pytest.fixture
def handle(executor: LlmExecutor) -> KvCacheHandle:
    return run(executor.prefill(prompt([1, 2, 3]))).kv_cache


def _refuse(call: Coroutine[Any, Any, Any], kind: type[FerrumError], match: str) -> None:
    with pytest.raises(kind, match=match):
        run(call)


def _check_decode(executor: LlmExecutor, model: SummingLLM, handle: KvCacheHandle, held: list[int]) -> None:
    """The next correct call answers as if nothing had been refused."""
    out = run(executor.decode(token(4, handle)))
    assert int(np.argmax(out.logits)) == model.best([*held, 4])
    assert model.tokens[handle.cache_id] == [*held, 4]
    assert out.kv_cache.num_tokens == len(held) + 1


async def _awaited(call: Call, executor: LlmExecutor, handle: KvCacheHandle) -> None:
    await call(executor, handle)  # a plain method has raised before there is anything to wait for


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (np.array([1, 2]), r"shape \[2\], expected \[batch, seq\]"),
        (np.zeros((1, 2, 2), np.int32), r"expected \[batch, seq\]"),
        (np.zeros((2, 3), np.int32), "2 rows, expected 1"),
        (np.zeros((0, 3), np.int32), "0 rows, expected 1"),
        (np.zeros((1, 0), np.int32), "at least one token"),
        (np.zeros((1, 2), np.float32), "position 0 is"),
        (jnp.zeros((1, 2), jnp.float32), "position 0 is"),
        (np.zeros((1, 2), np.bool_), "expected an integer"),
        ([[1, True]], "position 1 is True"),
        ([[1, 2], [3]], "no array"),
        (np.array([[1, 23]]), "position 1 is 23, ids go from 0 to 22"),
        (np.array([[-1]]), "position 0 is -1"),
        (np.array([[2**63]], np.uint64), "position 0 is 9223372036854775808"),
        (None, r"expected \[batch, seq\]"),
        ("text", r"expected \[batch, seq\]"),
        ({"a": 1}, r"expected \[batch, seq\]"),
    ],
)
def test_malformed_ids_are_refused_everywhere(
    executor: LlmExecutor, model: SummingLLM, handle: KvCacheHandle, ids: Any, match: str
):
    before = {key: list(held) for key, held in model.tokens.items()}
    _refuse(executor.prefill(PrefillInput(input_ids=ids)), RequestValidationError, match)
    _refuse(executor.batch_prefill([prompt([1]), PrefillInput(input_ids=ids)]), RequestValidationError, match)
    _refuse(executor.decode(DecodeInput(input_ids=ids, kv_cache=handle)), RequestValidationError, match)
    if np.shape(ids if not isinstance(ids, list) else []) not in ((2, 3), (0, 3)):
        _refuse(executor.forward(ids), RequestValidationError, match)
    assert model.tokens == before
    assert handle.is_valid()
    _check_decode(executor, model, handle, [1, 2, 3])
    assert run(executor.prefill(prompt([1]))).kv_cache.cache_id == "llm-cache-1"


def test_a_deleted_array_is_refused(executor: LlmExecutor):
    array = jnp.array([[1, 2]])
    array.delete()
    _refuse(executor.prefill(PrefillInput(input_ids=array)), RequestValidationError, "no array")
    _refuse(executor.forward(array), RequestValidationError, "no array")
    assert isinstance(array, jax.Array)


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda e, h: e.prefill(None), RequestValidationError, r"inputs\[0\] is a NoneType, expected a PrefillInput"),
        (lambda e, h: e.batch_prefill(3), RequestValidationError, "inputs is a int"),
        (lambda e, h: e.batch_prefill([token(1, h)]), RequestValidationError, "DecodeInput, expected a PrefillInput"),
        (lambda e, h: e.decode(prompt([1])), RequestValidationError, "expected a DecodeInput"),
        (lambda e, h: e.unified_decode([item("a", [1], 0)]), RequestValidationError, "list, expected a UnifiedBatch"),
        (lambda e, h: e.unified_decode(UnifiedBatch(NOTHING)), RequestValidationError, "items is a NoneType"),
        (lambda e, h: e.reserve_kv_slots([("a", 3)]), RequestValidationError, "expected a KvSlotRequest"),
        (lambda e, h: e.release_cache(3), RequestValidationError, "expected a string"),
        (lambda e, h: e.handle(3), RequestValidationError, "expected a string"),
        (lambda e, h: e.truncate_kv(h, -1), RequestValidationError, "new_len is -1"),
        (lambda e, h: e.truncate_kv(h, 1.5), RequestValidationError, "new_len is 1.5"),
        (lambda e, h: e.truncate_kv_for_cache_id("a", -1), RequestValidationError, "new_len is -1"),
        (lambda e, h: e.truncate_kv(None, 1), RequestValidationError, "NoneType, expected one of this executor"),
        (lambda e, h: e.forward_verify([]), RequestValidationError, "at least one token"),
        (lambda e, h: e.decode(token(1, None)), RequestValidationError, "needs a handle"),
        (lambda e, h: e.decode(token(1, "a")), RequestValidationError, "str, expected one of this executor"),
        (lambda e, h: e.decode(DecodeInput(input_ids=np.array([[1, 2]]), kv_cache=h)), RequestValidationError,
         r"shape \[1, 2\], expected \[1, 1\]"),
        (lambda e, h: e.decode(token(1, h, logits_policy=NONE_ALLOWED)), RequestValidationError, "allows none of 23"),
        (lambda e, h: e.decode(token(1, h, logits_policy=None)), RequestValidationError, "logits policy None"),
        (lambda e, h: e.decode(token(1, h, logits_policy=GreedyArgmax(),
                                     metadata={"ferrum_require_full_logits": True})),
         RequestValidationError, "contradicts the policy GreedyArgmax"),
        (lambda e, h: e.batch_decode([token(1, h), token(2, h)]), RequestValidationError, "occurs twice"),
        (lambda e, h: e.batch_prefill([prompt([1], h), prompt([2], h)]), RequestValidationError, "occurs twice"),
        (lambda e, h: e.decode(token(1, h, position_ids=np.array([[4]]))), UnsupportedError, "the cache's end, 3"),
        (lambda e, h: e.decode(token(1, h, position_ids=np.array([3]))), RequestValidationError, r"shape \[1, 1\]"),
        (lambda e, h: e.prefill(prompt([1, 2], h, position_ids=np.array([[3, 5]]))), UnsupportedError, "consecutive"),
        (lambda e, h: e.prefill(prompt([1, 2], position_ids=np.array([[0.0, 1.0]]))), RequestValidationError, "float"),
        (lambda e, h: e.prefill(prompt([1, 2], attention_mask=np.array([[0, 1]]))), UnsupportedError, "hides 1 of 2"),
        (lambda e, h: e.prefill(prompt([1, 2], attention_mask=np.ones((2, 2)))), RequestValidationError, r"\[1, 2\]"),
        (lambda e, h: e.prefill(prompt([1, 2], attention_mask=np.array([["a", "b"]]))), RequestValidationError, "numb"),
        (lambda e, h: e.unified_decode(batch(item("a", [1], 2))), RequestValidationError, "pos_offset is 2.* 0 pos"),
        (lambda e, h: e.unified_decode(batch(item("", [1], 2, kv_cache=h))), RequestValidationError, "holds 3"),
        (lambda e, h: e.unified_decode(batch(item("a", [], 0))), RequestValidationError, "at least one token"),
        (lambda e, h: e.unified_decode(batch(item("a", [1], "0"))), RequestValidationError, "pos_offset"),
        (lambda e, h: e.unified_decode(batch(item("a", [1], 0, final=1))), RequestValidationError, "is_final_chunk"),
        (lambda e, h: e.unified_decode(batch(item(7, [1], 0))), RequestValidationError, "expected a string"),
        (lambda e, h: e.unified_decode(batch(item("llm-cache-9", [1], 0))), RequestValidationError, "never reused"),
        (lambda e, h: e.reserve_kv_slots([KvSlotRequest(cache_id="llm-cache-9", target_len=1)]),
         RequestValidationError, "never reused"),
        (lambda e, h: e.unified_decode(batch(item("a", [1], 0), item("a", [2], 0))), RequestValidationError, "twice"),
        (lambda e, h: e.unified_decode(batch(item("theirs", [1], 0))), RequestValidationError, "pos_offset is 0"),
        (lambda e, h: e.forward_verify([token(1, h), token(1, h.with_sequence_length(4))]), RequestValidationError,
         "share one"),
        (lambda e, h: e.forward_verify([token(1, h), token(1, h, position_ids=np.array([[5]]))]),
         UnsupportedError, "only consecutive ones from the cache's end"),
        (lambda e, h: e.forward_verify([token(1, h, position_ids=np.array([[2**64 - 1]], np.uint64))]),
         UnsupportedError, "only consecutive ones from the cache's end"),
        (lambda e, h: e.forward_verify([token(1, h, position_ids=np.array([[at]])) for at in (3, 5)]),
         UnsupportedError, r"position_ids \[3, 5\], only consecutive"),
        (lambda e, h: e.forward_verify([token(1, h), token(1, h, metadata={"ferrum_kv_capacity_hint": 9})]),
         RequestValidationError, "different options"),
        (lambda e, h: e.speculative_decode(token(1, h), [2], 1.5), RequestValidationError, "from 0 to 1"),
        (lambda e, h: e.speculative_decode(token(1, h), [2], float("nan")), RequestValidationError, "from 0 to 1"),
        (lambda e, h: e.speculative_decode(token(1, h), [2], "1"), RequestValidationError, "from 0 to 1"),
        (lambda e, h: e.speculative_decode(token(1, h), [2], True), RequestValidationError, "from 0 to 1"),
        (lambda e, h: e.speculative_decode(token(1, h), [99], 1.0), RequestValidationError, "position 0 is 99"),
        (lambda e, h: e.speculative_decode(token(1, h), None, 1.0), RequestValidationError, "are a NoneType"),
        (lambda e, h: e.speculative_decode(token(1, h), [1] * 61, 1.0), RequestValidationError, "65 positions"),
        (lambda e, h: e.speculative_decode(token(1, h, logits_policy=GreedyArgmax()), [2], 1.0), UnsupportedError,
         "full logits only"),
        (lambda e, h: h.with_sequence_length(-1), RequestValidationError, "length is -1"),
        (lambda e, h: h.key_cache(2), RequestValidationError, "layer is 2, the model has 2"),
        (lambda e, h: h.value_cache("0"), RequestValidationError, "layer is '0'"),
        (lambda e, h: e.prefill(prompt([1], metadata=[("a", 1)])), RequestValidationError, "expected a mapping"),
        (lambda e, h: e.prefill(prompt([1], metadata={"ferrum_typo": 1})), RequestValidationError, "ferrum_typo"),
        (lambda e, h: e.prefill(prompt([1], metadata={"ferrum_lora_path": "x"})), RequestValidationError, "neither"),
        (lambda e, h: e.prefill(prompt([1], metadata={"ferrum_lora_adapter": "x"})), RequestValidationError, "neither"),
        (lambda e, h: e.prefill(prompt([1], metadata={"ferrum_require_full_logits": 1})), RequestValidationError,
         "is 1"),
        (lambda e, h: e.prefill(prompt([1], metadata={"ferrum_kv_capacity_hint": -1})), RequestValidationError, "-1"),
        (lambda e, h: e.prefill(prompt([1], metadata={"ferrum_kv_admission_target_len": "9"})), RequestValidationError,
         "'9'"),
        (lambda e, h: e.decode(token(1, h, metadata={"ferrum_lora_adapter": "x", "ferrum_lora_path": "y"})),
         RequestValidationError, "is not empty"),
    ],
)  # fmt: skip
def test_a_refused_call_changes_nothing(
    executor: LlmExecutor, model: SummingLLM, handle: KvCacheHandle, call: Call, kind: type[FerrumError], match: str
):
    model.prefill("theirs", [5])
    before = {key: list(held) for key, held in model.tokens.items()}
    with pytest.raises(kind, match=match):
        run(_awaited(call, executor, handle))
    assert model.tokens == before
    assert model.adapters == {}
    _check_decode(executor, model, handle, [1, 2, 3])


def _uses(handle: Any) -> list[Call]:
    return [
        lambda e, h: e.prefill(prompt([1], handle)),
        lambda e, h: e.batch_prefill([prompt([1]), prompt([1], handle)]),
        lambda e, h: e.decode(token(1, handle)),
        lambda e, h: e.batch_decode([token(1, h), token(1, handle)]),
        lambda e, h: e.unified_decode(batch(item("a", [1], handle.num_tokens, kv_cache=handle))),
        lambda e, h: e.forward_verify([token(1, handle)]),
        lambda e, h: e.speculative_decode(token(1, handle), [1], 1.0),
    ]


def test_a_stale_handle_is_an_error_everywhere(executor: LlmExecutor, model: SummingLLM, handle: KvCacheHandle):
    live = run(executor.decode(token(4, handle))).kv_cache
    longer = live.with_sequence_length(5)
    before = {key: list(held) for key, held in model.tokens.items()}
    for stale in (handle, longer):
        for use in _uses(stale):
            _refuse(use(executor, live), RequestValidationError, f"it has {stale.num_tokens} positions and the cache 4")
        for use in (stale.clone_handle, lambda stale=stale: stale.key_cache(0), lambda s=stale: s.value_cache(0)):
            with pytest.raises(RequestValidationError, match="stale"):
                use()
        assert not stale.is_valid()
    assert handle.stats()["num_tokens"] == 3  # its positions are still there
    with pytest.raises(RequestValidationError, match="stale"):
        longer.stats()
    assert model.tokens == before
    _check_decode(executor, model, live, [1, 2, 3, 4])


def test_a_released_handle_is_an_error_everywhere(executor: LlmExecutor, model: SummingLLM, handle: KvCacheHandle):
    live = run(executor.prefill(prompt([9]))).kv_cache
    executor.release_cache(handle.cache_id)
    executor.release_cache(handle.cache_id)
    for use in (*_uses(handle), lambda e, h: e.truncate_kv(handle, 0)):
        _refuse(use(executor, live), RequestValidationError, "was released")
    for use in (handle.clone_handle, lambda: handle.key_cache(0), lambda: handle.block_table, handle.stats):
        with pytest.raises(RequestValidationError, match="was released"):
            use()
    assert not handle.is_valid()
    assert handle.num_tokens == 3
    _check_decode(executor, model, live, [9])


def test_a_sequence_that_the_model_dropped_is_released(executor: LlmExecutor, model: SummingLLM, handle: KvCacheHandle):
    model.reset()
    assert not handle.is_valid()
    _refuse(executor.decode(token(1, handle)), RequestValidationError, "was released")
    assert run(executor.prefill(prompt([1]))).kv_cache.cache_id == "llm-cache-1"


@pytest.mark.parametrize("kind", [SummingLLM, CountingLLM])
def test_a_reset_drops_every_sequence_and_makes_its_handles_stale(kind: type):
    model = kind()
    executor = LlmExecutor(model)
    held = [out.kv_cache for out in run(executor.batch_prefill([prompt([1]), prompt([2, 3])]))]
    run(executor.reset())
    assert getattr(model, "tokens", {}) == getattr(model, "lengths", {}) == {}
    for handle in held:
        assert not handle.is_valid()
        for use in _uses(handle):
            _refuse(use(executor, handle), RequestValidationError, "was released")
    assert run(executor.prefill(prompt([1]))).kv_cache.cache_id == "llm-cache-2"


def test_a_foreign_handle_is_an_error_everywhere(executor: LlmExecutor, model: SummingLLM, handle: KvCacheHandle):
    other = run(LlmExecutor(SummingLLM()).prefill(prompt([1, 2, 3]))).kv_cache
    strange = create_autospec(KvCacheHandle, instance=True, cache_id=handle.cache_id, num_tokens=3)
    for foreign, match in ((other, "another executor"), (strange, "expected one of this executor")):
        for use in (*_uses(foreign), lambda e, h, foreign=foreign: e.truncate_kv(foreign, 0)):
            _refuse(use(executor, handle), RequestValidationError, match)
    assert model.tokens == {"llm-cache-0": [1, 2, 3]}
    _check_decode(executor, model, handle, [1, 2, 3])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("prefill", lambda e, h: e.prefill(prompt([4]))),
        ("prefill", lambda e, h: e.prefill(prompt([4], h))),
        ("unified_forward", lambda e, h: e.batch_prefill([prompt([4]), prompt([5], h)])),
        ("unified_forward", lambda e, h: e.unified_decode(batch(item("a", [4], 0), item("", [5], 3, kv_cache=h)))),
        ("decode_batch", lambda e, h: e.decode(token(4, h))),
        ("forward_verify", lambda e, h: e.forward_verify([token(4, h), token(5, h)])),
        ("forward_verify", lambda e, h: e.speculative_decode(token(4, h), [5], 1.0)),
        ("forward_verify", lambda e, h: e.forward(np.array([[1, 2]]))),
    ],
)
def test_a_failure_of_the_model_is_undone(
    executor: LlmExecutor, model: SummingLLM, handle: KvCacheHandle, method: str, call: Call, late: bool
):
    failures = model.late_failures if late else model.failures
    failures[method] = ModelError("injected")
    with pytest.raises(ModelError, match="injected"):
        run(call(executor, handle))
    assert model.tokens == {"llm-cache-0": [1, 2, 3]}
    assert handle.is_valid()
    assert executor.status().decode_operations == 0
    _check_decode(executor, model, handle, [1, 2, 3])


def test_a_unified_forward_that_is_unsupported_falls_back_and_other_errors_do_not(
    executor: LlmExecutor, model: SummingLLM, handle: KvCacheHandle
):
    model.failures["unified_forward"] = UnsupportedError("not this time")
    rows = batch(item("a", [4, 5], 0), item("", [6], 3, kv_cache=handle), item("b", [7], 0))
    answers = run(executor.unified_decode(rows))
    assert [int(np.argmax(answer)) for answer in answers] == [9, 12, 7]
    assert model.calls[-3:] == ["prefill", "prefill", "decode_batch"]  # what begins is never decoded
    assert executor.cache_metrics_snapshot()["decode_batch"]["unsupported_fallback_calls"] == 1
    model.failures["unified_forward"] = ResourceExhaustedError("no blocks", needed=2, free=1)
    with pytest.raises(ResourceExhaustedError):
        run(executor.unified_decode(batch(item("a", [4, 5], 2))))
    assert model.tokens["a"] == [4, 5]


def test_a_fallback_that_fails_half_way_is_undone(executor: LlmExecutor, model: SummingLLM, handle: KvCacheHandle):
    model.failures = {"unified_forward": UnsupportedError("no"), "decode_batch": ModelError("injected")}
    with pytest.raises(ModelError):
        run(executor.unified_decode(batch(item("a", [4, 5], 0), item("", [6], 3, kv_cache=handle))))
    assert model.tokens == {"llm-cache-0": [1, 2, 3]}


def test_an_adapter_is_bound_before_the_first_token_and_unbound_on_failure(executor: LlmExecutor, model: SummingLLM):
    asked = {"ferrum_lora_adapter": "x", "ferrum_lora_path": "y"}
    model.failures["prefill"] = ModelError("injected")
    with pytest.raises(ModelError):
        run(executor.prefill(prompt([1], metadata=asked)))
    assert model.adapters == {}
    handle = run(executor.prefill(prompt([1], metadata=asked))).kv_cache
    assert model.adapters[handle.cache_id].name == "x"
    assert run(executor.decode(token(2, handle, metadata=asked))).kv_cache.num_tokens == 2  # the same one again


def test_an_adapter_bound_to_an_emptied_sequence_is_unbound_on_failure(
    executor: LlmExecutor, model: SummingLLM, handle: KvCacheHandle
):
    run(executor.truncate_kv(handle, 0))
    empty = handle.with_sequence_length(0)
    model.failures["prefill"] = ModelError("injected")
    asked = {"ferrum_lora_adapter": "x", "ferrum_lora_path": "y"}
    with pytest.raises(ModelError):
        run(executor.prefill(prompt([1], empty, metadata=asked)))
    assert model.adapters == {}
    run(executor.prefill(prompt([1], empty, metadata=asked)))
    assert model.adapters[handle.cache_id].name == "x"


def test_after_a_fork_calls_and_shutdown_say_so(executor: LlmExecutor, handle: KvCacheHandle):
    executor._table.pid -= 1  # as a child sees it
    for call in (executor.prefill(prompt([1])), executor.decode(token(1, handle)), executor.shutdown()):
        with pytest.raises(UnsupportedError, match="this executor was made before the process forked"):
            run(call)
    executor._table.pid += 1
    run(executor.decode(token(1, handle)))


def test_without_another_thread_no_executor_is_made(model: SummingLLM, monkeypatch: pytest.MonkeyPatch):
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(ResourceExhaustedError, match="can't start new thread"):
            LlmExecutor(model)


def test_after_shutdown_every_call_says_so(executor: LlmExecutor, handle: KvCacheHandle):
    run(executor.shutdown())
    calls: list[Call] = [
        *_uses(handle),
        lambda e, h: e.batch_prefill([]),
        lambda e, h: e.batch_decode([]),
        lambda e, h: e.forward_verify([]),
        lambda e, h: e.unified_decode(batch()),
        lambda e, h: e.unified_decode(NOTHING),
        lambda e, h: e.forward(np.array([[1]])),
        lambda e, h: e.prefill(prompt([-1])),
        lambda e, h: e.batch_prefill([NOTHING]),
        lambda e, h: e.decode(NOTHING),
        lambda e, h: e.batch_decode([NOTHING]),
        lambda e, h: e.forward(NOTHING),
        lambda e, h: e.speculative_decode(NOTHING, [], 1.0),
        lambda e, h: e.truncate_kv(handle, 0),
        lambda e, h: e.truncate_kv(handle, -1),
        lambda e, h: e.warmup(),
        lambda e, h: e.reset(),
    ]
    for call in calls:
        _refuse(call(executor, handle), CancelledError, "shut down")
    plain: list[Callable[[], Any]] = [
        executor.kv_capacity,
        lambda: executor.reserve_kv_slots([]),
        executor.kv_slot_capacity_snapshot,
        lambda: executor.release_cache("a"),
        lambda: executor.truncate_kv_for_cache_id("a", 0),
        executor.cache_metrics_snapshot,
        executor.lora_metrics_snapshot,
        executor.supports_native_unified_decode,
        executor.optimal_batch_size,
        lambda: executor.supports_batch_size(1),
        lambda: executor.handle("a"),
        lambda: handle.block_table,
        lambda: handle.key_cache(0),
        handle.clone_handle,
    ]
    for call in plain:
        with pytest.raises(CancelledError, match="shut down"):
            call()
    assert not handle.is_valid()
    assert (executor.info().vocab_size, executor.capabilities().max_sequence_length) == (23, 64)
    assert executor.metrics().prefill_operations == 1

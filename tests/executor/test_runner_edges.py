"""Each row of the contract's table of edge cases; a refused call changes nothing."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract import (
    ActiveLoraAdapter,
    DecodeRun,
    FullLogits,
    GreedyArgmax,
    KvSlotRequest,
    TokenSelectionMask,
)
from ferrum_jax.contract.errors import (
    CancelledError,
    FerrumError,
    NotFoundError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
)
from ferrum_jax.contract.execution import AttentionType
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.batch import Distributions, SampledToken, ScheduledRow, VerifiedTokens
from ferrum_jax.executor.counters import DecodeBatchCounters
from ferrum_jax.executor.rows import decode_rows
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CAPACITY, CFG, ENGINE, Oracle, make_runner

HELD = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]  # "a" holds these before every case


def wrong(value: Any) -> Any:
    """What the signature forbids but a caller may pass."""
    return value


@dataclass(frozen=True)
class Refusal:
    """A call that must be refused, and what the error must be and say."""

    call: Callable[[ModelRunner], Any]
    kind: type[FerrumError]
    says: str


def sampled(says: str, output: Any = SampledToken, **settings: Any) -> Refusal:
    """Rows of which one is sampled in a way that cannot be."""
    rows = [("b", 2, SampledToken(SlotSettings())), ("a", 10, output(SlotSettings(**settings)))]
    batch = [ScheduledRow(key, np.array([1], np.int32), start, how) for key, start, how in rows]
    return Refusal(lambda r: r.execute(batch).result(), RequestValidationError, says)


REFUSALS = {
    "empty tokens": Refusal(lambda r: r.prefill("a", []), RequestValidationError, "at least one token"),
    "empty tokens of an unknown id": Refusal(
        lambda r: r.prefill("n", []), RequestValidationError, "at least one token"
    ),
    "empty verify": Refusal(lambda r: r.forward_verify("a", []), RequestValidationError, "at least one token"),
    "empty chunk": Refusal(lambda r: r.unified_forward([("a", [], 10, True)]), RequestValidationError, "at least one"),
    "negative token": Refusal(lambda r: r.prefill("a", [1, -2]), RequestValidationError, "position 1 is -2"),
    "token past the vocabulary": Refusal(lambda r: r.prefill("a", [37]), RequestValidationError, "position 0 is 37"),
    "huge token": Refusal(lambda r: r.decode("a", 2**70, 10), RequestValidationError, str(2**70)),
    "token that is no integer": Refusal(
        lambda r: r.prefill("a", [1, wrong(2.0)]), RequestValidationError, "position 1 is 2.0"
    ),
    "token that is a bool": Refusal(lambda r: r.prefill("a", [True]), RequestValidationError, "position 0 is True"),
    "a bool among tokens": Refusal(lambda r: r.prefill("a", [5, True]), RequestValidationError, "position 1 is True"),
    "a bool in an array among tokens": Refusal(
        lambda r: r.prefill("a", wrong([5, jnp.array(True)])), RequestValidationError, "position 1 is"
    ),
    "a bool among tokens of another sequence": Refusal(
        lambda r: r.prefill("a", wrong(deque([5, True]))), RequestValidationError, "position 1 is True"
    ),
    "a duration among tokens": Refusal(
        lambda r: r.prefill("a", wrong([5, np.timedelta64(3, "s")])), RequestValidationError, "position 1 is"
    ),
    "a list among tokens": Refusal(
        lambda r: r.prefill("a", wrong([1, [2]])), RequestValidationError, "position 1 is [2]"
    ),
    "no tokens at all": Refusal(
        lambda r: r.prefill("a", wrong(None)),
        RequestValidationError,
        "tokens are a NoneType, expected a sequence of ids",
    ),
    "a negative pos": Refusal(lambda r: r.decode("a", 1, -1), RequestValidationError, "pos is -1, the cache holds 10"),
    "tokens that are text": Refusal(lambda r: r.prefill("a", wrong("hello")), RequestValidationError, "text"),
    "tokens of rank 2": Refusal(
        lambda r: r.prefill("a", wrong(np.ones((2, 2), int))), RequestValidationError, "one dimension"
    ),
    "decode token wrong": Refusal(lambda r: r.decode("a", 99, 10), RequestValidationError, "99"),
    "verify token wrong": Refusal(lambda r: r.forward_verify("a", [0, 99]), RequestValidationError, "position 1 is 99"),
    "pos behind": Refusal(lambda r: r.decode("a", 1, 9), RequestValidationError, "pos is 9, the cache holds 10"),
    "pos ahead": Refusal(lambda r: r.decode("a", 1, 11), RequestValidationError, "pos is 11, the cache holds 10"),
    "pos that is no integer": Refusal(
        lambda r: r.decode("a", 1, wrong("10")),
        RequestValidationError,
        "expected an integer, the cache holds 10 positions",
    ),
    "pos_offset ahead": Refusal(
        lambda r: r.unified_forward([("a", [1], 12, True)]),
        RequestValidationError,
        "pos_offset is 12, the cache holds 10",
    ),
    "decode of an unknown id past 0": Refusal(lambda r: r.decode("n", 1, 3), RequestValidationError, "holds 0"),
    "an id twice in a decode batch": Refusal(
        lambda r: r.decode_batch([("a", 1, 10), ("b", 1, 2), ("a", 1, 10)]), RequestValidationError, "'a' occurs twice"
    ),
    "an id twice in a unified batch": Refusal(
        lambda r: r.unified_forward([("n", [1], 0, True), ("n", [1], 0, True)]),
        RequestValidationError,
        "'n' occurs twice",
    ),
    "a bad row beside good ones": Refusal(
        lambda r: r.decode_batch([("b", 1, 2), ("a", 1, 3)]), RequestValidationError, "holds 10"
    ),
    "past the capacity": Refusal(
        lambda r: r.prefill("a", [1] * 35), RequestValidationError, f"needs 45 positions, its KV capacity is {CAPACITY}"
    ),
    "verify past the capacity": Refusal(lambda r: r.forward_verify("n", [1] * 45), RequestValidationError, "45"),
    "no free slot": Refusal(
        lambda r: r.unified_forward([("n", [1], 0, True), ("m", [1], 0, True), ("o", [1], 0, True)]),
        ResourceExhaustedError,
        "need 3 slots for new sequences, 2 of 4 are free",
    ),
    "no free block": Refusal(
        lambda r: r.unified_forward([(key, [1] * 44, 0, True) for key in "no"] + [("a", [1] * 34, 10, True)]),
        ResourceExhaustedError,
        "need 16 KV blocks for 3 sequences, 15 of 18 are free",
    ),
    "negative new_len": Refusal(lambda r: r.truncate_kv("a", -1), RequestValidationError, "new_len is -1"),
    "negative new_len of an unknown id": Refusal(lambda r: r.truncate_kv("n", -1), RequestValidationError, "new_len"),
    "new_len that is no integer": Refusal(lambda r: r.truncate_kv("a", wrong(1.5)), RequestValidationError, "1.5"),
    "an id that is no string": Refusal(
        lambda r: r.prefill(wrong(7), [1]), RequestValidationError, "cache id 7 is a int"
    ),
    "prepare past the capacity": Refusal(lambda r: r.prepare("n", 45), RequestValidationError, "45 positions"),
    "prepare for nothing": Refusal(lambda r: r.prepare("n", 0), RequestValidationError, "max_tokens is 0"),
    "a hint past the capacity": Refusal(
        lambda r: r.prepare_kv_capacity("n", 45), RequestValidationError, "45 positions"
    ),
    "policies of another number": Refusal(
        lambda r: r.decode_batch_with_logits_policy([("a", 1, 10)], []), RequestValidationError, "1 rows need"
    ),
    "no policies": Refusal(
        lambda r: r.decode_batch_with_logits_policy([("a", 1, 10)], wrong(None)),
        RequestValidationError,
        "are a NoneType",
    ),
    "no policies of items": Refusal(
        lambda r: r.unified_forward_with_logits_policy([("a", [1], 10, True)], wrong(None)),
        RequestValidationError,
        "policies are a NoneType",
    ),
    "a row of another width": Refusal(
        lambda r: r.decode_batch([("b", 1, 2), wrong(("a", 1))]), RequestValidationError, "row 1 of batch"
    ),
    "a row that is None": Refusal(lambda r: r.unified_forward([wrong(None)]), RequestValidationError, "row 0 of items"),
    "items that are no sequence": Refusal(lambda r: r.unified_forward(wrong(3)), RequestValidationError, "is a int"),
    "policies that are no sequence": Refusal(
        lambda r: r.decode_batch_with_logits_policy([("a", 1, 10)], wrong(3)), RequestValidationError, "are a int"
    ),
    "a mask of text": Refusal(
        lambda r: r.decode_batch_with_logits_policy(
            [("a", 1, 10)],
            [GreedyArgmax(token_mask=TokenSelectionMask(fingerprint="m", valid_token_mask=["x"]))],
        ),
        RequestValidationError,
        "mask 'm'",
    ),
    "an adapter": Refusal(
        lambda r: r.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="x", path="y")), UnsupportedError, "'x'"
    ),
    "loading an adapter": Refusal(lambda r: r.load_lora("x", "y"), UnsupportedError, "'x'"),
    "dropping an adapter": Refusal(lambda r: r.unload_lora("x"), NotFoundError, "'x'"),
    "a reservation past the capacity": Refusal(
        lambda r: r.reserve_kv_slots([KvSlotRequest(cache_id="a", target_len=45)]),
        RequestValidationError,
        "45 positions",
    ),
    "an admission past the capacity": Refusal(
        lambda r: r.reserve_kv_slots([KvSlotRequest(cache_id="a", target_len=4, admission_target_len=45)]),
        RequestValidationError,
        "45 positions",
    ),
    "a reservation of more blocks than are free": Refusal(
        lambda r: r.reserve_kv_slots([KvSlotRequest(cache_id=key, target_len=44) for key in "abno"]),
        ResourceExhaustedError,
        "need 21 KV blocks for 4 sequences, 15 of 18 are free",
    ),
    "an admission that does not fit": Refusal(
        lambda r: r.reserve_kv_slots(
            [KvSlotRequest(cache_id=key, target_len=1, admission_target_len=44) for key in "abno"]
        ),
        ResourceExhaustedError,
        "need 21 KV blocks for 4 sequences, 15 of 18 are free",
    ),
    "a reservation for more slots than are free": Refusal(
        lambda r: r.reserve_kv_slots([KvSlotRequest(cache_id=key, target_len=1) for key in "nmo"]),
        ResourceExhaustedError,
        "need 3 slots",
    ),
    "a reservation that is none": Refusal(
        lambda r: r.reserve_kv_slots([wrong(("a", 3))]),
        RequestValidationError,
        "requests[0] is a tuple, expected a KvSlotRequest",
    ),
    "a fork of an unknown id": Refusal(lambda r: r.fork("n", "m"), RequestValidationError, "'n' is unknown"),
    "a fork onto a live id": Refusal(lambda r: r.fork("a", "b"), RequestValidationError, "'b' is a live sequence"),
    "a KV of an unknown id": Refusal(lambda r: r.kv_cache("n", 1), RequestValidationError, "'n' is unknown"),
    "a KV of a layer that is not there": Refusal(lambda r: r.kv_cache("a", 2), RequestValidationError, "layer is 2"),
    "verifying an id twice": Refusal(
        lambda r: r.forward_verify_batch([("a", [1]), ("a", [2])]), RequestValidationError, "'a' occurs twice"
    ),
    "prepare past the capacity of a live sequence": Refusal(
        lambda r: r.prepare("a", 35), RequestValidationError, "needs 45 positions"
    ),
    "a mask that allows nothing": Refusal(
        lambda r: r.decode_batch_with_logits_policy(
            [("a", 1, 10)],
            [GreedyArgmax(token_mask=TokenSelectionMask(fingerprint="m", valid_token_mask=np.zeros(37, np.int8)))],
        ),
        RequestValidationError,
        "allows none of 37",
    ),
    "more biases than a slot holds": sampled(
        "expected a dict of at most 512 tokens", bias=dict.fromkeys(range(513), 1.0)
    ),
    "more stop ids than a slot holds": sampled("expected a tuple of at most 16 tokens", stop_ids=tuple(range(17))),
    "a bias of NaN": sampled("the bias of 1 is nan", bias={1: float("nan")}),
    "a bias of infinity": sampled("the bias of 1 is inf", VerifiedTokens, bias={1: float("inf")}),
    "a bias past float32": sampled("the bias of 1 is -1e+39", bias={1: -1e39}),
    "a bias that is text": sampled("the bias of 1 is 'x'", bias={1: "x"}),
    "a bias of no token": sampled("bias has the token 37, ids go from 0 to 36", bias={37: 1.0}),
    "a stop id past the vocabulary": sampled("'a: stop_ids': the token at position 1 is 37", stop_ids=(36, 37)),
    "an allowed id past the vocabulary": sampled("'a: allowed_ids': the token", Distributions, allowed_ids=(37,)),
    "a mask of another length": sampled("expected bool [37]", allowed=np.ones(36, np.bool_)),
    "a seen token past the vocabulary": sampled("'a: seen': the token", seen=np.array([99]), repetition_penalty=2.0),
    "more generated than there is": sampled(
        f"generated has {CAPACITY + 1} tokens, the capacity is", generated=np.ones(CAPACITY + 1, int)
    ),
    "a mask that is a list": sampled("expected bool [37]", allowed=[True] * 37),
    "biases that are a list": sampled("expected a dict of at most 512 tokens", bias=[1.0]),
    "a stop id alone": sampled("stop_ids is 5, expected a tuple", stop_ids=5),
    "a negative temperature": sampled("temperature is -0.5, expected a number from 0", temperature=-0.5),
    "a top_p of 7": sampled("top_p is 7, expected a number from 0 to 1", top_p=7),
    "a repetition penalty of 0": sampled("repetition_penalty is 0.0", repetition_penalty=0.0),
    "a seed past 32 bits": sampled(f"seed is {2**32}", seed=2**32),
    "a negative seed": sampled("seed is -1", seed=-1),
    "a position past 31 bits": sampled(f"min_position is {2**31}", min_position=2**31),
    "a temperature that is no number": sampled("temperature is nan", temperature=float("nan")),
    "an allowed token that is forbidden": sampled(
        "no token may be chosen at position 11: all 2 that are allowed",
        allowed_ids=(5, 6),
        bias=dict.fromkeys((5, 6), -np.inf),
    ),
    "every token forbidden": sampled("all 37 that are allowed", bias=dict.fromkeys(range(37), -np.inf)),
    "a mask whose token is forbidden": sampled(
        "all 1 that are allowed", VerifiedTokens, allowed=np.arange(37) == 4, bias={4: -np.inf}
    ),
    "a mask of nothing": sampled("all 0 that are allowed", allowed=np.zeros(37, np.bool_)),
    "only stop ids that come too early": sampled(
        "would stop before min_tokens", allowed_ids=(5, 6), bias={5: -np.inf}, stop_ids=(6,), min_position=12
    ),
}


def _state(runner: ModelRunner) -> tuple[object, ...]:
    lengths = tuple(runner.kv_len(key) for key in "abnmo")
    return lengths, runner.kv_slot_capacity_snapshot(), runner.cache_metrics_snapshot()


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_call_says_why_and_changes_nothing(name: str, runner: ModelRunner, oracle: Oracle):
    runner.prefill("a", HELD)
    runner.prefill("b", [7, 7])
    before = _state(runner)
    with pytest.raises(REFUSALS[name].kind) as caught:
        REFUSALS[name].call(runner)
    assert REFUSALS[name].says in str(caught.value)
    assert _state(runner) == before
    after = runner.decode_batch([("b", 8, 2), ("a", 8, 10)])
    np.testing.assert_allclose(after[1], oracle([*HELD, 8])[-1], atol=1e-4)
    np.testing.assert_allclose(after[0], oracle([7, 7, 8])[-1], atol=1e-4)


def test_settings_are_checked_again_where_a_truncation_leaves_no_token_to_choose(runner: ModelRunner):
    settings = SlotSettings(allowed_ids=(5, 6), bias={5: -np.inf}, stop_ids=(6,), min_position=3)
    row = ScheduledRow("a", np.array([1, 2, 3], np.int32), 0, SampledToken(settings))
    runner.execute([row]).result()
    runner.truncate_kv("a", 1)
    with pytest.raises(RequestValidationError, match="no token may be chosen at position 2"):
        runner.execute([ScheduledRow("a", np.array([2], np.int32), 1, SampledToken(settings))])


def test_a_stop_id_may_be_chosen_from_its_position_on(runner: ModelRunner):
    settings = SlotSettings(allowed_ids=(5, 6), bias={5: -np.inf}, stop_ids=(6,), min_position=3)
    row = ScheduledRow("a", np.array([1, 2, 3], np.int32), 0, SampledToken(settings))
    assert runner.execute([row]).result()[0].token_id == 6


def test_exhaustion_names_what_was_needed_and_what_is_free(runner: ModelRunner):
    with pytest.raises(ResourceExhaustedError) as slots:
        runner.decode_batch([(key, 1, 0) for key in "abcde"])
    assert (slots.value.needed, slots.value.free) == (5, 4)
    runner.unified_forward([(key, [1] * 40, 0, False) for key in "abc"])
    with pytest.raises(ResourceExhaustedError) as blocks:
        runner.prefill("d", [1] * 40)
    assert (blocks.value.needed, blocks.value.free) == (5, 3)


@pytest.mark.parametrize("kind", [np.uint8, np.int64, jnp.int32])
def test_positions_of_any_integer_type_are_plain_from_then_on(kind: type):
    (row,) = decode_rows([("a", 1, kind(5))], None, CFG.vocab_size, lambda _: 5)
    assert (type(row.start), row.start) == (int, 5)


def test_prefill_of_an_existing_id_appends(runner: ModelRunner, oracle: Oracle):
    runner.prefill("a", [1, 2, 3])
    np.testing.assert_allclose(runner.prefill("a", [4, 5]), oracle([1, 2, 3, 4, 5])[-1], atol=1e-4)
    assert runner.kv_len("a") == 5


def test_an_empty_batch_gives_nothing_and_counts_nothing(runner: ModelRunner):
    before = runner.cache_metrics_snapshot()
    assert runner.decode_batch([]) == []
    assert runner.decode_batch_with_full_logits([], True) == []
    assert runner.decode_batch_with_logits_policy([], []) == []
    assert runner.unified_forward([]) == []
    assert runner.cache_metrics_snapshot() == before


def test_decode_verify_and_unified_create_an_unknown_id_at_position_0(runner: ModelRunner, oracle: Oracle):
    expected = oracle([5])[-1]
    np.testing.assert_allclose(runner.decode("a", 5, 0), expected, atol=1e-4)
    np.testing.assert_allclose(runner.forward_verify("b", [5])[0], expected, atol=1e-4)
    row = runner.unified_forward([("c", [5], 0, True)])[0]
    assert row is not None
    np.testing.assert_allclose(row, expected, atol=1e-4)


def test_release_and_truncate_of_what_is_not_there_do_nothing(runner: ModelRunner):
    runner.release("never")
    runner.prefill("a", [1, 2])
    runner.truncate_kv("never", 0)
    runner.truncate_kv("a", 9)
    assert runner.kv_len("a") == 2
    runner.release("a")
    runner.release("a")
    assert runner.kv_len("a") is None


def test_truncation_frees_the_blocks_wholly_past_the_new_end(runner: ModelRunner):
    runner.prefill("a", [1] * 40)
    for new_len, free in ((33, 13), (32, 14), (9, 16), (8, 17), (0, 18)):
        runner.truncate_kv("a", new_len)
        assert runner.kv_slot_capacity_snapshot().free_blocks == free
    assert runner.kv_len("a") == 0


def test_prepare_takes_the_slot_and_leaves_no_other_trace(runner: ModelRunner, oracle: Oracle):
    counters = runner.cache_metrics_snapshot()
    for key in "abcd":
        runner.prepare(key, 30)
        assert runner.kv_len(key) == 0
    assert runner.kv_slot_capacity_snapshot().free_blocks == 18
    assert runner.cache_metrics_snapshot() == counters
    with pytest.raises(ResourceExhaustedError, match="need 1 slots"):
        runner.prefill("e", [1])
    np.testing.assert_allclose(runner.prefill("a", [1, 2]), oracle([1, 2])[-1], atol=1e-4)
    runner.prepare_kv_capacity("a", CAPACITY)


@pytest.mark.slow
def test_prepare_compiles_all_that_decoding_with_an_adapter_and_drafts_needs(
    params: ParamTree, adapter_folders: dict[str, str], compiles: list[str]
):
    engine = replace(
        ENGINE, decode_rows=(1,), query_blocks=(1,), max_loras=1, max_lora_rank=4, multi_step_tokens=3, spec_tokens=3
    )
    with make_runner(params, engine) as runner:
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="one", path=adapter_folders["one"]))
        runner.prepare("a", 5)
        compiles.clear()
        settings, start = SlotSettings(temperature=0.5), 0
        for count, output in ((5, SampledToken), (1, SampledToken), (4, VerifiedTokens), (4, Distributions)):
            tokens = np.arange(count, dtype=np.int32)
            runner.execute([ScheduledRow("a", tokens, start, output(settings))]).result()
            start += count
        runner.decode_n([DecodeRun(cache_id="a", token=1, pos=start, max_tokens=5)])
        assert compiles == []


def test_policies_of_full_logits_are_served(runner: ModelRunner, oracle: Oracle):
    row = runner.decode_batch_with_logits_policy([("a", 5, 0)], [FullLogits()])[0]
    assert isinstance(row, np.ndarray)
    np.testing.assert_allclose(row, oracle([5])[-1], atol=1e-4)
    rows = runner.unified_forward_with_logits_policy([("a", [1], 1, False)], [FullLogits()])
    assert rows == [None]
    assert runner.unified_forward_can_return_full_logits()


def test_clearing_a_binding_is_no_error(runner: ModelRunner):
    runner.set_lora_adapter_for_cache("a", None)
    assert runner.lora_metrics_snapshot()["enabled"] is False


def test_logits_belong_to_the_caller(runner: ModelRunner):
    first = runner.prefill("a", [1, 2])
    assert first.dtype == np.float32
    kept = first.copy()
    first[:] = 0.0
    runner.reset()
    np.testing.assert_array_equal(runner.prefill("a", [1, 2]), kept)


def test_reset_drops_every_sequence_and_keeps_the_steps(runner: ModelRunner):
    runner.prefill("a", [1, 2])
    compiled = runner.compile_stats()["compiled"]
    runner.reset()
    assert runner.kv_len("a") is None
    assert runner.kv_slot_capacity_snapshot().free_blocks == 18
    assert runner.compile_stats()["compiled"] == compiled


def test_batches_are_counted_by_size(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "_decode_batches", DecodeBatchCounters())
    runner.decode("a", 1, 0)
    runner.decode_batch([("a", 1, 1), ("b", 1, 0), ("c", 1, 0)])
    runner.decode_batch_with_full_logits([("a", 1, 2), ("b", 1, 1)], True)
    counts = runner.cache_metrics_snapshot()["decode_batch"]
    assert (counts["calls"], counts["total_items"], counts["max_items"], counts["last_items"]) == (2, 5, 3, 2)
    assert counts["avg_items_per_call"] == 2.5
    assert counts["force_full_logits_calls"] == 1
    assert counts["singleton_fast_path_calls"] == 0
    assert {name: n for name, n in counts["bucket_calls"].items() if n} == {"m2": 1, "m3_4": 1}


def test_memory_in_use_is_that_of_weights_adapters_and_the_blocks_and_windows_of_sequences(
    runner: ModelRunner, reusing: ModelRunner
):
    position = 2 * 2 * CFG.head_dim * 4  # bytes in a layer: two heads' keys and values in float32
    empty = reusing.memory_usage()
    assert empty.allocated_bytes - empty.used_bytes == 18 * 8 * 2 * position
    assert empty.peak_bytes >= empty.allocated_bytes
    reusing.prefill("a", [1] * 16)
    usage = reusing.memory_usage()
    assert usage.used_bytes - empty.used_bytes == 2 * 8 * 2 * position
    assert usage.utilization_percent == 100 * usage.used_bytes / usage.allocated_bytes
    reusing.release("a")
    assert reusing.memory_usage().used_bytes == empty.used_bytes  # also with a known prefix
    windowed = runner.memory_usage().used_bytes
    runner.prefill("a", [1] * 16)
    window = runner.plan.cache.window_blocks * 8 * position
    assert runner.memory_usage().used_bytes - windowed == 2 * 8 * position + window > 2 * 8 * position


def test_known_prefixes_are_counted_in_entries_and_bytes(reusing: ModelRunner):
    reusing.prefill("a", [1] * 20)
    reusing.release("a")
    counts = reusing.cache_metrics_snapshot()
    assert (counts["entries"], counts["bytes"]) == (2, 2 * 8 * 2 * 2 * 2 * CFG.head_dim * 4)
    assert counts["kv_dtype"] == "float32"


def test_capabilities_are_those_of_the_model_and_its_plan(reusing: ModelRunner, params: ParamTree):
    found = reusing.capabilities()
    memory, usage, width = found.memory_requirements, reusing.memory_usage(), CFG.head_dim
    assert memory.kv_cache_memory_per_token == 2 * 2 * width * 4
    assert memory.activation_memory_per_token == (2 * 24 + 3 * 40) * 4 + 37 * 4
    ends = 2 * (24 + 6 * width) + 2 * (24 + 2 * width) + 3 * (24 + 40)  # inputs and outputs of a layer's projections
    assert memory.overhead_memory == 2 * ends * 2 * 4 * 4  # of two layers, two adapters of rank 4
    assert memory.parameter_memory + memory.overhead_memory == usage.allocated_bytes - reusing.plan.cache.num_bytes
    assert not found.supports_tensor_parallelism
    assert found.attention_mechanisms == (
        AttentionType.GroupedQuery, AttentionType.Paged, AttentionType.Flash, AttentionType.SlidingWindow
    )  # fmt: skip
    cfg = replace(CFG, layer_windows=(None, None))
    with ModelRunner(params, cfg, reusing.plan, device=reusing.device) as whole:
        mechanisms = whole.capabilities().attention_mechanisms
    assert mechanisms == (AttentionType.GroupedQuery, AttentionType.Paged, AttentionType.Flash)


def test_every_call_after_close_says_so(params: ParamTree):
    runner = make_runner(params)
    runner.close()
    runner.close()
    calls: list[Callable[[], object]] = [
        lambda: runner.prefill("a", [1]),
        lambda: runner.decode("a", 1, 0),
        lambda: runner.decode_batch([]),
        lambda: runner.forward_verify("a", [1]),
        lambda: runner.unified_forward([]),
        lambda: runner.release("a"),
        lambda: runner.truncate_kv("a", 0),
        lambda: runner.kv_len("a"),
        lambda: runner.prepare("a", 1),
        runner.kv_capacity,
        runner.reset,
        runner.warmup,
        runner.kv_slot_capacity_snapshot,
        runner.cache_metrics_snapshot,
        runner.compile_stats,
        runner.unified_forward_can_return_full_logits,
        runner.model_info,
        runner.capabilities,
        runner.memory_usage,
        lambda: runner.fork("a", "b"),
        lambda: runner.kv_block_table("a"),
        lambda: runner.kv_cache("a", 0),
        lambda: runner.reserve_kv_slots([]),
        lambda: runner.forward_verify_batch([]),
        lambda: runner.__enter__(),
    ]
    for call in calls:
        with pytest.raises(CancelledError, match="closed"):
            call()

"""Data parallel: two replicas behind one runner answer as one, take twice as many sequences, and know as much."""

import asyncio
import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import ferrum_jax
from ferrum_jax import LLM, DecodeInput, LlmExecutor, PrefillInput, SamplingParams, Speculation
from ferrum_jax.contract import ActiveLoraAdapter, DecodeRun, GreedyArgmax, KvSlotRequest, Sampling
from ferrum_jax.contract.errors import (
    AlreadyExistsError,
    CancelledError,
    DeviceError,
    InvalidParameterError,
    NotFoundError,
    RequestValidationError,
    ResourceExhaustedError,
)
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.executor.from_params import from_params
from ferrum_jax.executor.replicas import ReplicatedRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CAPACITY, CFG, REUSING, Oracle, adapter_tensors
from tests.long import OPERATIONS, SEED

pytestmark = pytest.mark.devices

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def shared(params: ParamTree) -> Iterator[ReplicatedRunner]:
    with from_params(params, CFG, mesh={"data": 2, "model": 2}, engine=REUSING) as runner:
        assert isinstance(runner, ReplicatedRunner)
        runner.warmup(progress=False)
        yield runner


@pytest.fixture
def two(shared: ReplicatedRunner) -> ReplicatedRunner:
    """Two replicas of four sequences each, on two devices each, with nothing in them."""
    shared.reset()
    return shared


def check(logits: Any, oracle: Oracle, tokens: list[int]) -> None:
    np.testing.assert_allclose(logits, oracle(tokens)[-1], atol=TOLERANCE, rtol=0)


def test_what_replicas_inherit_asks_for_nothing_that_one_device_alone_has():
    inherited = [
        function
        for cls in ReplicatedRunner.__mro__[1:-1]
        for name, function in vars(cls).items()
        if inspect.isfunction(function) and getattr(ReplicatedRunner, name) is function and name[0] != "_"
    ]
    assert len(inherited) > 10
    for function in inherited:
        assert not re.search(r"self\.(_device|_adapters|_programs)\b", inspect.getsource(function)), function.__name__


def test_sequences_are_spread_and_answer_alike(two: ReplicatedRunner, oracle: Oracle):
    prompts = {f"s{at}": [at + 1, 5, 7, at] for at in range(8)}
    items = [(key, tokens, 0, True) for key, tokens in prompts.items()]
    for (key, tokens, _, _), row in zip(items, two.unified_forward(items), strict=True):
        check(row, oracle, tokens)
        assert two.kv_len(key) == 4
    assert two.num_replicas == 2
    assert [two.replica_of(key) for key in prompts].count(0) == 4
    rows = two.decode_batch([(key, 9, 4) for key in prompts])
    for key, row in zip(prompts, rows, strict=True):
        check(row, oracle, [*prompts[key], 9])
    with pytest.raises(ResourceExhaustedError) as caught:
        two.prefill("one too many", [1])
    assert caught.value.free == 0
    assert two.kv_len("one too many") is None
    two.release("s3")
    check(two.prefill("another", [1, 2]), oracle, [1, 2])


def test_a_refused_batch_changes_nothing_on_any_replica(two: ReplicatedRunner, oracle: Oracle):
    for key in "abcd":
        two.prefill(key, [1, 2, 3])
    here = {index: [key for key in "abcd" if two.replica_of(key) == index] for index in (0, 1)}
    first, second = here[0][0], here[1][0]
    before = two.kv_slot_capacity_snapshot()
    for wrong in ([(first, 4, 3), (second, 4, 2)], [(second, 4, 3), (first, 4, 5)], [(first, 4, 3), (first, 4, 3)]):
        with pytest.raises(RequestValidationError):
            two.decode_batch(wrong)
        assert two.kv_len(first) == two.kv_len(second) == 3
    with pytest.raises(RequestValidationError, match="KV capacity is 44"):
        two.unified_forward([(first, [4], 3, True), (second, [5] * 42, 3, True)])
    assert two.kv_len(first) == 3
    assert two.kv_slot_capacity_snapshot() == before
    rows = two.decode_batch([(second, 6, 3), (first, 4, 3)])
    check(rows[0], oracle, [1, 2, 3, 6])
    check(rows[1], oracle, [1, 2, 3, 4])


def test_a_prompt_goes_where_its_beginning_is_known(two: ReplicatedRunner, oracle: Oracle):
    start = list(range(2, 20))
    two.prefill("first", start)
    home = two.replica_of("first")
    two.prefill("elsewhere", [30, 31])
    assert two.replica_of("elsewhere") != home
    hits = two.cache_metrics_snapshot()["hits"]
    for at in range(3):
        check(two.prefill(f"more {at}", [*start, 33 - at]), oracle, [*start, 33 - at])
        assert two.replica_of(f"more {at}") == home
    assert two.cache_metrics_snapshot()["hits"] == hits + 3
    check(two.prefill("full", [*start, 20]), oracle, [*start, 20])  # no slot is left there
    assert two.replica_of("full") != home


def test_forks_reservations_and_truncation_stay_on_their_replica(two: ReplicatedRunner, oracle: Oracle):
    two.prefill("a", [1, 2, 3, 4, 5])
    two.fork("a", "b")
    assert two.replica_of("a") == two.replica_of("b")
    check(two.decode("b", 6, 5), oracle, [1, 2, 3, 4, 5, 6])
    two.truncate_kv("b", 2)
    check(two.prefill("b", [7]), oracle, [1, 2, 7])
    with pytest.raises(RequestValidationError, match="is a live sequence"):
        two.fork("a", "b")
    with pytest.raises(RequestValidationError, match="is unknown"):
        two.fork("nobody", "c")
    wanted = [KvSlotRequest(cache_id=key, target_len=20) for key in ("a", "x", "y")]
    found = two.reserve_kv_slots(wanted)
    assert [one.cache_id for one in found.allocations] == ["a", "x", "y"]
    assert found.total_blocks == 36
    assert found.free_blocks_before - found.free_blocks_after == sum(one.new_blocks for one in found.allocations)
    with pytest.raises(ResourceExhaustedError):
        two.reserve_kv_slots([KvSlotRequest(cache_id=f"z{at}", target_len=40) for at in range(6)])
    assert two.kv_len("z0") is None
    assert two.kv_len("x") == 0
    two.prepare("p", 4)
    assert two.kv_len("p") == 0
    for key in ("a", "b", "x", "y", "p"):
        two.release(key)
    for at in range(4):  # they take a slot and no block yet
        two.prepare(f"prepared {at}", 4)
    assert sorted(str(two.replica_of(f"prepared {at}")) for at in range(4)) == ["0", "0", "1", "1"]
    for at in range(4):
        two.release(f"prepared {at}")
    assert two.kv_slot_capacity_snapshot().free_blocks == 36


def test_adapters_work_wherever_a_sequence_goes(
    two: ReplicatedRunner, oracles: dict[str | None, Oracle], adapter_folders: dict[str, str]
):
    two.load_lora("one", adapter_folders["one"])
    bound = ActiveLoraAdapter(name="one", path=adapter_folders["one"])
    for key in ("a", "b", "c"):
        two.set_lora_adapter_for_cache(key, bound)
    assert two.lora_metrics_snapshot()["active_cache_bindings"] == 3
    items = [(key, [at, 2, 3], 0, True) for at, key in enumerate(("a", "b", "c", "plain"))]
    for (key, tokens, _, _), row in zip(items, two.unified_forward(items), strict=True):
        check(row, oracles["one" if key != "plain" else None], tokens)
    assert {two.replica_of(key) for key in ("a", "b", "c", "plain")} == {0, 1}
    assert two.lora_metrics_snapshot()["active_cache_bindings"] == 3
    with pytest.raises(RequestValidationError, match="in use"):
        two.unload_lora("one")
    for key in ("a", "b", "c"):
        two.release(key)
    two.unload_lora("one")
    assert two.lora_metrics_snapshot()["adapter_count"] == 0


def test_an_adapter_that_one_replica_has_counts(two: ReplicatedRunner, adapter_folders: dict[str, str]):
    bound = ActiveLoraAdapter(name="one", path=adapter_folders["one"])
    for at in (0, 1):
        key = f"on {at}"
        two.prefill(key, [1, 2])
        assert two.replica_of(key) == at
    two.truncate_kv("on 1", 0)
    two.set_lora_adapter_for_cache("on 1", bound)
    assert [[*one._adapters.loaded] for one in two.replicas] == [[], ["one"]]
    counts = two.lora_metrics_snapshot()
    assert (counts["adapter_count"], counts["active_cache_bindings"]) == (1, 1)
    two.release("on 1")
    two.unload_lora("one")


def test_an_adapter_that_only_one_replica_has_is_dropped_there(two: ReplicatedRunner, adapter_folders: dict[str, str]):
    """A sequence there has asked for it, and the other replica has made room for another one."""
    folder = adapter_folders["one"]
    two.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="one", path=folder))
    two.prefill("a", [1, 2])
    home = two.replica_of("a")
    assert home is not None
    other = two.replicas[1 - home]
    if "one" in other._adapters.loaded:
        other.unload_lora("one")
    with pytest.raises(AlreadyExistsError):
        two.load_lora("one", folder)
    assert "one" not in other._adapters.loaded
    with pytest.raises(RequestValidationError, match="in use"):
        two.unload_lora("one")
    two.release("a")
    two.unload_lora("one")
    two.load_lora("one", folder)
    two.unload_lora("one")
    with pytest.raises(NotFoundError):
        two.unload_lora("one")


def test_arrays_that_only_some_replicas_can_take_leave_the_adapter_on_none(
    two: ReplicatedRunner, oracles: dict[str | None, Oracle], monkeypatch: pytest.MonkeyPatch
):
    bound = ActiveLoraAdapter(name="tuned", path="")
    two.set_lora("tuned", adapter_tensors("one"), scale=2.0)
    two.set_lora_adapter_for_cache("a", bound)
    two.prefill("a", [1, 2])
    for at, names in ((0, ["tuned"]), (1, [])):

        def fail(*_: object) -> None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

        with monkeypatch.context() as patch:
            patch.setattr(two.replicas[at]._adapters, "install", fail)
            with pytest.raises(DeviceError, match="injected"):
                two.set_lora("tuned", adapter_tensors("two"), scale=2.0, keep_sequences=True)
        assert [[*one._adapters.loaded] for one in two.replicas] == [names, names]
        if at == 0:  # nothing has changed
            check(two.decode("a", 3, 2), oracles["one"], [1, 2, 3])
    assert two.state is ExecutorState.Error
    two.reset()
    two.set_lora("tuned", adapter_tensors("two"), scale=2.0)
    for key in ("a", "b"):
        two.set_lora_adapter_for_cache(key, bound)
    for row in two.unified_forward([(key, [4, 5], 0, True) for key in ("a", "b")]):
        check(row, oracles["two"], [4, 5])
    assert {two.replica_of("a"), two.replica_of("b")} == {0, 1}
    two.reset()
    two.unload_lora("tuned")


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_leaves_the_arrays_of_an_adapter_on_all_replicas(
    at: int, two: ReplicatedRunner, oracles: dict[str | None, Oracle], monkeypatch: pytest.MonkeyPatch
):
    adapters, calls = two.replicas[at]._adapters, []
    install = adapters.install

    def interrupted(*given: Any) -> None:
        calls.append(0)
        if len(calls) == 1:
            raise KeyboardInterrupt
        install(*given)

    with monkeypatch.context() as patch:
        patch.setattr(adapters, "install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two.set_lora("tuned", adapter_tensors("one"), scale=2.0)
    two.reset()  # an interrupted change may have written half of what it writes
    for key in ("a", "b"):
        two.set_lora_adapter_for_cache(key, ActiveLoraAdapter(name="tuned", path=""))
    for row in two.unified_forward([(key, [4, 5], 0, True) for key in ("a", "b")]):
        check(row, oracles["one"], [4, 5])
    two.reset()
    two.unload_lora("tuned")


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_leaves_an_adapter_on_all_replicas_or_on_none(
    at: int, two: ReplicatedRunner, adapter_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(two.replicas[at]._adapters, "load", interrupt)
        with pytest.raises(KeyboardInterrupt):
            two.load_lora("one", adapter_folders["one"])
    assert two.lora_metrics_snapshot()["adapter_count"] == 0
    two.load_lora("one", adapter_folders["one"])
    unload, calls = two.replicas[at]._adapters.unload, []

    def interrupted(name: str) -> Any:
        calls.append(name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return unload(name)

    with monkeypatch.context() as patch:
        patch.setattr(two.replicas[at]._adapters, "unload", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two.unload_lora("one")
    assert two.lora_metrics_snapshot()["adapter_count"] == 0


def test_many_tokens_are_decoded_on_all_replicas_at_once(two: ReplicatedRunner, oracle: Oracle):
    runs = []
    for at in range(6):
        two.prefill(f"r{at}", [at, 3, 4])
        how = Sampling(temperature=0.7)
        runs.append(DecodeRun(cache_id=f"r{at}", token=5, pos=3, max_tokens=7, sampling=how, seed=at))
    found = two.decode_n(runs)
    again = []
    for run in runs:  # each alone
        two.truncate_kv(run.cache_id, 3)
        again += two.decode_n([run])
    assert [one.token_ids for one in found] == [one.token_ids for one in again]
    with pytest.raises(RequestValidationError):
        two.decode_n([runs[0], DecodeRun(cache_id="r1", token=5, pos=1, max_tokens=2)])
    assert two.kv_len("r0") == 10


def test_weights_are_set_on_every_replica(params: ParamTree, two: ReplicatedRunner, oracle_of: Any):
    other = jax.tree.map(lambda leaf: leaf * 1.25, params)
    two.prefill("a", [1])
    with pytest.raises(RequestValidationError, match="release them before new weights are set"):
        two.set_params(other)
    two.release("a")
    two.set_params(other)
    try:
        expected = oracle_of(other)
        for key, row in zip("abcd", two.unified_forward([(key, [4, 5], 0, True) for key in "abcd"]), strict=True):
            check(row, expected, [4, 5])
            assert two.replica_of(key) is not None
    finally:
        two.reset()
        two.set_params(params)


def test_a_function_makes_the_weights_of_every_replica_of_those_of_the_first(
    params: ParamTree, two: ReplicatedRunner, oracle_of: Any
):
    mine = jax.tree.map(jnp.copy, params)
    two.set_params(mine)
    larger = jax.jit(lambda served: jax.tree.map(lambda leaf: leaf * 1.25, served), donate_argnums=0)
    two.prefill("a", [1])
    with pytest.raises(RequestValidationError, match="release them before new weights are set"):
        two.set_params(larger)
    two.release("a")
    with pytest.raises(InvalidParameterError, match="these weights cannot be set"):
        two.set_params(lambda served: larger(served)["model"])
    for call in (
        lambda: two.unified_forward([(key, [4], 0, True) for key in "abcd"]),
        lambda: two.decode_n([DecodeRun(cache_id=key, token=4, pos=0, max_tokens=2) for key in "abcd"]),
    ):
        with pytest.raises(RequestValidationError, match="call set_params with the new ones"):
            call()
    two.set_params(jax.tree.map(jnp.copy, params))
    two.set_params(larger)
    try:
        expected = oracle_of(jax.tree.map(lambda leaf: leaf * 1.25, params))
        for row in two.unified_forward([(key, [4, 5], 0, True) for key in "abcd"]):
            check(row, expected, [4, 5])
        assert {two.replica_of(key) for key in "abcd"} == {0, 1}
    finally:
        two.reset()
        two.set_params(params)


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_leaves_all_replicas_with_the_same_weights(
    at: int, params: ParamTree, two: ReplicatedRunner, oracle_of: Any, monkeypatch: pytest.MonkeyPatch
):
    device, calls = two.replicas[at]._device, []
    set_params = device.set_params

    def interrupted(own: ParamTree) -> None:
        calls.append(0)
        if len(calls) == 1:
            raise KeyboardInterrupt
        set_params(own)

    monkeypatch.setattr(device, "set_params", interrupted)
    other, version = jax.tree.map(lambda leaf: leaf * 1.25, params), two.params_version
    with pytest.raises(KeyboardInterrupt):
        two.set_params(other)
    try:
        assert two.params_version == version + 1
        for row in two.unified_forward([(key, [4, 5], 0, True) for key in "abcd"]):
            check(row, oracle_of(other), [4, 5])
        assert {two.replica_of(key) for key in "abcd"} == {0, 1}
    finally:
        two.reset()
        two.set_params(params)


def test_a_replica_that_fails_stops_all_until_reset(two: ReplicatedRunner, oracle: Oracle):
    two.prefill("a", [1, 2])
    two.replicas[1]._device.lose()
    two.replicas[1]._life.state = ferrum_jax.contract.ExecutorState.Error
    with pytest.raises(DeviceError):
        two.unified_forward([("b", [3], 0, True), ("c", [3], 0, True)])
    with pytest.raises(DeviceError, match="only reset") as caught:
        two.prefill("a", [3])
    assert str(caught.value).count("only reset") == 1
    two.reset()
    check(two.prefill("a", [1, 2]), oracle, [1, 2])


def test_text_is_the_same_and_twice_as_many_requests_are_served(params: ParamTree, two: ReplicatedRunner):
    wanted = [ferrum_jax.SamplingParams(temperature=0.8, seed=at, max_tokens=6) for at in range(14)]
    prompts = [[at, 7, 9] for at in range(14)]
    with from_params(params, CFG, engine=REUSING) as one:
        llms = [ferrum_jax.LLM.from_model(model) for model in (one, two)]
        texts = [[out.token_ids for out in llm.generate(prompts, wanted)] for llm in llms]
    assert texts[0] == texts[1]
    assert two.plan.max_seqs == 8
    assert two.kv_slot_capacity_snapshot().free_blocks == 36


def test_policies_scores_and_captures_go_where_the_sequence_is(two: ReplicatedRunner, oracle: Oracle):
    for key in "ab":
        two.prefill(key, [1, 2])
    ids = two.decode_batch_with_logits_policy([("a", 3, 2), ("b", 4, 2)], [GreedyArgmax(), GreedyArgmax()])
    assert ids == [int(oracle([1, 2, 3])[-1].argmax()), int(oracle([1, 2, 4])[-1].argmax())]
    logits = two.forward_verify_batch([("a", [5, 6]), ("b", [7])])
    np.testing.assert_allclose(logits[0], oracle([1, 2, 3, 5, 6])[3:], atol=TOLERANCE, rtol=0)
    (scores,) = two.score_batch([("b", [8], [9])])
    row = oracle([1, 2, 4, 7, 8])[-1]
    np.testing.assert_allclose(scores.logprobs, [row[9] - np.log(np.exp(row).sum())], atol=TOLERANCE)
    assert two.capture("a", [1], hidden=(1,)).hidden[1].shape == (1, 24)
    assert two.kv_cache("a", 1)[0].shape == (6, 2, 10)


def test_room_is_counted_for_all_that_join_and_only_where_they_may_go(two: ReplicatedRunner):
    size, free = two.plan.cache.block_size, [one._pipeline.table.pool.num_free for one in two.replicas]
    assert free == [18, 18]
    most = two.kv_capacity()
    assert size * 5 < most < size * 6
    assert two.keep_from((), [most] * 6)
    assert not two.keep_from((), [most] * 7)
    assert two.keep_from((0,), [5 * size, 5 * size, 3 * size, 4 * size])  # and a block more for the last
    assert not two.keep_from((0,), [5 * size, 5 * size, 3 * size, 5 * size])
    assert not two.keep_from((0,), [most] * 4)
    assert two.keep_from((0,), [1] * 4)
    assert not two.keep_from((0,), [1] * 5)  # of four slots
    two.prefill("a", [1])
    assert two.replica_of("a") == 1
    assert not two.keep_from((0,), [1] * 4)
    for key in "bcd":
        two.prefill(key, [1])
    assert {two.replica_of(key) for key in "abcd"} == {1}
    two.prefill("e", [1])  # nowhere else is room
    assert two.replica_of("e") == 0
    two.reset()
    two.prefill("a", [1])
    assert two.replica_of("a") == 0


def count_steps(llm: LLM) -> list[None]:
    """Returns a list that grows with each step; more than a thousand are a failure, as without progress."""
    steps: list[None] = []
    step = llm.engine.scheduler.step

    def counted() -> None:
        steps.append(None)
        assert len(steps) < 1000
        step()

    llm.engine.scheduler.step = counted
    return steps


def test_requests_that_fit_on_no_replica_for_now_keep_none_of_the_others_waiting(params: ParamTree):
    engine = replace(REUSING, max_seqs=3, decode_rows=(3,), kv_blocks=9, prefix_cache=False)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(CFG.vocab_size, size=rng.choice([3, 30])).tolist() for _ in range(40)]
    with from_params(params, CFG, mesh={"data": 3}, engine=engine) as runner:
        llm = LLM.from_model(runner)
        steps = count_steps(llm)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
        assert [len(output.token_ids) for output in outputs] == [6] * 40
        assert len(steps) > 20


def test_answers_of_one_prompt_do_not_return_to_a_replica_that_has_run_short(params: ParamTree):
    engine = replace(REUSING, max_seqs=3, decode_rows=(3,), kv_blocks=9, prefix_cache=False)
    drawn = SamplingParams(n=5, temperature=1.0, seed=1, max_tokens=28, ignore_eos=True)
    with from_params(params, CFG, mesh={"data": 2}, engine=engine) as runner:
        llm = LLM.from_model(runner)
        count_steps(llm)
        outputs = llm.generate([[*range(17)], [*range(1, 18)]], drawn)
        assert [len(output.token_ids) for output in outputs] == [28] * 10
        assert sum(output.preemptions for output in outputs) > 0


def test_a_closed_runner_says_so(params: ParamTree):
    runner = from_params(params, CFG, mesh={"data": 2}, max_seqs=1, kv_capacity=16)
    assert runner.describe()["mesh"] == {"data": 2}
    assert runner.capabilities().max_batch_size == 2
    runner.close()
    runner.close()
    with pytest.raises(CancelledError):
        runner.prefill("a", [1])


def drive(two: ReplicatedRunner, oracle: Oracle, operations: int, seed: int) -> int:
    """Calls methods at random, and compares every logit; returns how many calls were refused for want of room."""
    rng, refused = np.random.default_rng(seed), 0
    sequences: dict[str, list[int]] = {}
    names = [f"s{at}" for at in range(10)]  # more than the slots of both

    def lengths() -> dict[str, int | None]:
        return {one: len(sequences[one]) if one in sequences else None for one in names}

    def attempt(grown: dict[str, list[int]], call: Any) -> Any:
        nonlocal refused
        try:
            found = call()
        except ResourceExhaustedError:
            refused += 1
            return None
        for key, tokens in grown.items():
            sequences[key] = sequences.get(key, []) + tokens
        return found

    for _ in range(operations):
        key = names[rng.integers(len(names))]
        held = sequences.get(key, [])
        room = CAPACITY - len(held)
        tokens = rng.integers(CFG.vocab_size, size=rng.integers(1, 13)).tolist()[: max(room, 1)]
        match int(rng.integers(7)):
            case 0 if room:
                logits = attempt({key: tokens}, partial(two.prefill, key, tokens))
                if logits is not None:
                    check(logits, oracle, sequences[key])
            case 1 | 2:
                chosen = [one for one in names if rng.random() < 0.5 and len(sequences.get(one, [])) < CAPACITY]
                batch = [(one, int(rng.integers(CFG.vocab_size)), len(sequences.get(one, []))) for one in chosen]
                rows = attempt({one: [token] for one, token, _ in batch}, partial(two.decode_batch, batch))
                for (one, _, _), row in zip(batch, rows or [], strict=rows is not None):
                    check(row, oracle, sequences[one])
            case 3 if room:
                logits = attempt({key: tokens}, partial(two.forward_verify, key, tokens))
                if logits is not None:
                    expected = oracle(sequences[key])[len(held) :]
                    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)
            case 4:
                two.truncate_kv(key, at := int(rng.integers(CAPACITY)))
                if key in sequences:
                    sequences[key] = held[:at]
            case 5:
                two.release(key)
                sequences.pop(key, None)
            case 6 if held and (free := [one for one in names if one not in sequences]):
                attempt({}, partial(two.fork, key, free[0]))
                if two.kv_len(free[0]) is not None:
                    sequences[free[0]] = list(held)
        assert {one: two.kv_len(one) for one in names} == lengths()
    for key in names:
        two.release(key)
    assert two.kv_slot_capacity_snapshot().free_blocks == 36
    return refused


def test_any_calls_on_replicas_give_the_logits_of_the_cache_free_forward(two: ReplicatedRunner, oracle: Oracle):
    assert drive(two, oracle, 150, seed=3) > 3


@pytest.mark.slow
def test_very_many_calls_on_replicas_do(two: ReplicatedRunner, oracle: Oracle):
    print(f"seed {SEED}")
    assert drive(two, oracle, min(OPERATIONS, 20_000), seed=SEED) > 100


def test_a_refused_binding_leaves_the_one_before(params: ParamTree, adapter_folders: dict[str, str]):
    bound = {name: ActiveLoraAdapter(name=name, path=path) for name, path in adapter_folders.items()}
    with from_params(params, CFG, mesh={"data": 2}, engine=REUSING) as two:
        assert isinstance(two, ReplicatedRunner)
        for at, key in enumerate(("p", "q")):
            two.set_lora_adapter_for_cache(key, bound["one"])
            two.prefill(key, [1, 2])
            assert two.replica_of(key) == at
        two.set_lora_adapter_for_cache("x", bound["two"])
        with pytest.raises(ResourceExhaustedError):
            two.set_lora_adapter_for_cache("x", bound["three"])
        assert ["x" in replica._adapters.bound for replica in two.replicas] == [True, True]
        two.release("x")
        assert two.lora_metrics_snapshot()["active_cache_bindings"] == 2


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_leaves_an_id_bound_on_all_replicas_as_before(
    at: int, two: ReplicatedRunner, adapter_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    bound = {name: ActiveLoraAdapter(name=name, path=path) for name, path in adapter_folders.items()}
    two.set_lora_adapter_for_cache("p", bound["one"])

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(two.replicas[at], "set_lora_adapter_for_cache", interrupt)
        for key in ("p", "q"):
            with pytest.raises(KeyboardInterrupt):
                two.set_lora_adapter_for_cache(key, bound["two"])
    assert two.state is ExecutorState.Ready
    held = [[replica._adapters.of(key) for key in ("p", "q")] for replica in two.replicas]
    assert [[None if one is None else one.name for one in pair] for pair in held] == [["one", None]] * 2
    assert two._router.unplaced == {"p"}
    two.release("p")
    assert two.lora_metrics_snapshot()["active_cache_bindings"] == 0


@pytest.mark.parametrize("name", ["decode_n", "reserve_kv_slots"])
def test_an_interrupt_between_replicas_is_an_error_until_reset(
    name: str, two: ReplicatedRunner, monkeypatch: pytest.MonkeyPatch
):
    for key in ("p", "q"):
        two.prefill(key, [1, 2, 3])
    runs = [DecodeRun(cache_id=key, token=4, pos=3, max_tokens=2) for key in ("p", "q")]
    calls: dict[str, Callable[[], Any]] = {
        "decode_n": lambda: two.decode_n(runs),
        "reserve_kv_slots": lambda: two.reserve_kv_slots([KvSlotRequest(cache_id=key, target_len=9) for key in "pq"]),
    }
    with monkeypatch.context() as patch:
        on, asked = two._router.on, []

        @contextlib.contextmanager
        def interrupted(index: int) -> Iterator[Any]:
            asked.append(index)
            if len(asked) == 4:  # both replicas' parts are planned, and one has run or runs
                raise KeyboardInterrupt
            with on(index) as replica:
                yield replica

        patch.setattr(two._router, "on", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls[name]()
    assert two.state is ExecutorState.Error
    two.reset()
    assert two.state is ExecutorState.Ready


@pytest.mark.parametrize("name", ["fork", "prepare"])
def test_an_interrupt_leaves_no_sequence_that_cannot_be_released(
    name: str, two: ReplicatedRunner, monkeypatch: pytest.MonkeyPatch
):
    two.prefill("p", [1, 2, 3])
    calls: dict[str, Callable[[], Any]] = {
        "fork": lambda: two.fork("p", "q"),
        "prepare": lambda: two.prepare("q", 5),
    }

    def interrupted_after(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> None:
            call(*given)
            raise KeyboardInterrupt

        return run

    with monkeypatch.context() as patch:
        for replica in two.replicas:
            patch.setattr(replica, "fork", interrupted_after(replica.fork))
            patch.setattr(replica, "prepare", interrupted_after(replica.prepare))
        with pytest.raises(KeyboardInterrupt):
            calls[name]()
    assert two.state is ExecutorState.Ready
    assert two.kv_len("q") is not None
    for key in ("p", "q"):
        two.release(key)
    assert all(not replica._pipeline.table.live for replica in two.replicas)


def test_an_interrupt_between_the_parts_of_a_batch_is_an_error_until_reset(
    two: ReplicatedRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    for key in ("p", "q"):
        two.prefill(key, [1, 2, 3])
    assert two.replica_of("p") != two.replica_of("q")
    with monkeypatch.context() as patch:
        on, entered = two._router.on, []

        @contextlib.contextmanager
        def interrupted(index: int) -> Iterator[Any]:
            entered.append(index)
            if len(entered) == 4:  # both parts are planned, and one is begun
                raise KeyboardInterrupt
            with on(index) as replica:
                yield replica

        patch.setattr(two._router, "on", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two.decode_batch([("p", 4, 3), ("q", 4, 3)])
    assert two.state is ExecutorState.Error
    two.reset()
    check(two.prefill("p", [1, 2]), oracle, [1, 2])


def test_weights_that_one_replica_cannot_take_are_taken_by_none(
    params: ParamTree, two: ReplicatedRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise ResourceExhaustedError("injected")

    monkeypatch.setattr(two, "_copied", fail)
    with pytest.raises(ResourceExhaustedError, match="injected"):
        two.set_params(jax.tree.map(lambda leaf: leaf * 2, params))
    for key in "ab":
        check(two.prefill(key, [1, 2]), oracle, [1, 2])
    assert {two.replica_of(key) for key in "ab"} == {0, 1}


def test_the_kv_of_all_replicas_is_freed_and_allocated_or_none_is(
    two: ReplicatedRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    for key in "ab":
        two.prefill(key, [1, 2])
    two.release("a")
    with pytest.raises(RequestValidationError, match="1 sequences are live, 'b' among them"):
        two.free_kv()
    check(two.prefill("a", [3, 4]), oracle, [3, 4])
    assert {two.replica_of(key) for key in "ab"} == {0, 1}
    two.release("a")
    two.release("b")
    kv = [leaf for replica in two.replicas for leaf in jax.tree.leaves(replica._device.kv)]
    two.free_kv()
    assert all(leaf.is_deleted() for leaf in kv)

    def fail() -> None:
        raise ResourceExhaustedError("injected")

    monkeypatch.setattr(two.replicas[1]._device, "reallocate", fail)
    with pytest.raises(ResourceExhaustedError, match="injected"):
        two.allocate_kv()
    assert [replica._device.is_lost for replica in two.replicas] == [True, True]
    with pytest.raises(RequestValidationError, match="the KV is freed"):
        two.prefill("a", [1, 2])
    monkeypatch.undo()
    two.allocate_kv()
    for key in "ab":
        check(two.prefill(key, [1, 2]), oracle, [1, 2])


def test_known_blocks_that_nobody_holds_are_not_counted_as_room(two: ReplicatedRunner):
    start = list(range(1, 34))  # four full blocks
    two.prefill("known", start)
    home = two.replica_of("known")
    assert home is not None
    two.release("known")
    pool = two.replicas[home]._pipeline.table.pool
    others = [KvSlotRequest(cache_id=f"held {at}", target_len=40) for at in range(2)]
    for one in others:
        two.replicas[home].reserve_kv_slots([one])
    two.replicas[home].reserve_kv_slots([KvSlotRequest(cache_id="more", target_len=32)])
    assert pool.num_free == 4  # which are the known ones
    two.prefill("next", [*start, *range(7)])  # five blocks
    assert two.replica_of("next") != home
    for key in ("held 0", "held 1", "more"):
        two.replicas[home].release(key)


def test_parameters_on_another_device_are_brought_to_the_replicas(params: ParamTree, oracle: Oracle):
    elsewhere = jax.device_put(params, jax.devices()[0])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:4]), ("data",))
    with from_params(elsewhere, CFG, mesh=mesh, max_seqs=1, kv_capacity=16) as two:
        check(two.prefill("a", [1, 2]), oracle, [1, 2])
        check(two.prefill("b", [3]), oracle, [3])


def test_a_replica_that_ran_short_takes_requests_again_after_a_reset(two: ReplicatedRunner):
    llm = ferrum_jax.LLM.from_model(two)
    llm.engine.scheduler._shortage.add(0)
    llm.reset()
    assert llm.engine.scheduler._shortage._short == set()


@pytest.mark.slow
def test_generation_over_replicas_chooses_the_tokens_of_one_runner(params: ParamTree):
    engine = replace(REUSING, spec_tokens=3, multi_step_tokens=None, verify_blocks=(1, 4))
    prompts, answers = [[at, 5, at, 5, at, 5] for at in range(6)], []
    for mesh in (None, {"data": 2}):
        with from_params(params, CFG, mesh=mesh, engine=engine) as runner:
            llm = LLM.from_model(runner, speculation=Speculation(num_tokens=3))
            outputs = llm.generate(prompts, SamplingParams(max_tokens=12))
            assert sum(output.drafted for output in outputs) > 0
            outputs += llm.generate(prompts[0], SamplingParams(max_tokens=5, n=3, temperature=0.8, seed=1))
            answers.append([output.token_ids for output in outputs])
    assert len(answers[0]) == 9
    assert answers[1] == answers[0]


def test_an_executor_over_replicas_answers_as_over_one_runner(two: ReplicatedRunner, oracle: Oracle):
    async def call() -> None:
        executor = LlmExecutor(two)
        read = [await executor.prefill(PrefillInput(input_ids=np.array([[at, 2, 3]]))) for at in range(3)]
        inputs = [DecodeInput(input_ids=np.array([[4]]), kv_cache=output.kv_cache) for output in read]
        outputs = await executor.batch_decode(inputs)
        for at, output in enumerate(outputs):
            check(np.asarray(output.logits).ravel(), oracle, [at, 2, 3, 4])
        copy = outputs[2].kv_cache.clone_handle()
        assert copy.num_tokens == 4
        assert two.replica_of(copy.cache_id) == two.replica_of(outputs[2].kv_cache.cache_id)

    asyncio.run(call())


def test_weights_that_lie_on_every_replica_are_shared(params: ParamTree):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    with from_params(params, CFG, mesh={"data": 2}, engine=REUSING) as runner:
        assert isinstance(runner, ReplicatedRunner)
        for spec, is_shared in ((PartitionSpec(), True), (PartitionSpec(None, "data"), False)):

            def place(leaf: jax.Array, spec: PartitionSpec = spec) -> jax.Array:
                own = spec if leaf.ndim > 1 and leaf.shape[1] % 2 == 0 else PartitionSpec()
                return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, own))

            given = jax.tree.map(place, params)
            runner.set_params(given)
            for at, replica in enumerate(runner.replicas):
                pairs = zip(jax.tree.leaves(replica.params), jax.tree.leaves(given), strict=True)
                mine = [one.unsafe_buffer_pointer() == shard_on(two, at).unsafe_buffer_pointer() for one, two in pairs]
                assert all(mine) == is_shared


def shard_on(array: jax.Array, at: int) -> jax.Array:
    return next(one.data for one in array.addressable_shards if one.device == jax.devices()[at])

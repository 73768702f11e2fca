"""Weights that change while requests run: every token is of exactly the weights that it is said to be of."""

import asyncio
import contextlib
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from ferrum_jax import LLM, AsyncLLM, SamplingParams
from ferrum_jax.contract.errors import (
    CancelledError,
    InternalError,
    InvalidParameterError,
    NotFoundError,
    RequestValidationError,
    UnsupportedError,
)
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.from_params import from_params
from ferrum_jax.generate.params import RequestOutput
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.updates import LivePolicy, Update, params_update
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CFG, adapter_tensors
from tests.fake import CountingLLM
from tests.generate.conftest import ENGINE, MakeRunner
from tests.generate.updates import Logprobs, Traffic, make_oracle, versions_of
from tests.tiers import by_default

POLICIES: Sequence[LivePolicy] = get_args(LivePolicy)
LONG = SamplingParams(max_tokens=20, temperature=1.0, seed=3, logprobs=True)


@pytest.fixture(scope="module")
def weights(params: ParamTree) -> list[ParamTree]:
    return versions_of(params, 3)


@pytest.fixture(scope="module")
def mixed(weights: list[ParamTree]) -> Logprobs:
    return make_oracle(weights)


@pytest.fixture
def serving(runner: ModelRunner, weights: list[ParamTree]) -> Iterator[ModelRunner]:
    runner.set_params(weights[0])
    yield runner
    runner.reset()
    runner.set_params(weights[0])


def run_traffic(runner: ModelRunner, weights: list[ParamTree], policy: LivePolicy, seed: int, mixed: Logprobs) -> None:
    runner.reset()
    runner.set_params(weights[0])
    traffic = Traffic(LLM.from_model(runner, max_rows=5, chunk_tokens=11), weights, policy, seed)
    traffic.run()
    traffic.check(mixed)
    snapshot = runner.kv_slot_capacity_snapshot()
    assert snapshot.free_blocks == snapshot.total_blocks


@pytest.mark.parametrize("policy", POLICIES)
def test_any_interleaving_of_updates_and_traffic_is_exact(
    policy: LivePolicy, serving: ModelRunner, weights: list[ParamTree], mixed: Logprobs
):
    for seed in range(6):
        run_traffic(serving, weights, policy, seed, mixed)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_thousand_interleavings_of_updates_and_traffic_are_exact(
    policy: LivePolicy, serving: ModelRunner, weights: list[ParamTree], mixed: Logprobs
):
    first = random.randrange(2**32)
    print(f"{policy}: seeds from {first} on")
    for at in range(1000):
        run_traffic(serving, weights, policy, first + at, mixed)


@pytest.mark.devices
@pytest.mark.parametrize("policy", by_default(POLICIES, "keep"))
def test_replicas_change_their_weights_together(policy: LivePolicy, weights: list[ParamTree], mixed: Logprobs):
    engine = replace(ENGINE, prefix_cache=True, max_seqs=3, decode_rows=(3,))
    with from_params(weights[0], CFG, mesh={"data": 2}, engine=engine) as runner:
        for seed in range(5):
            run_traffic(runner, weights, policy, seed, mixed)


def test_a_recompute_is_exact_where_the_kv_is_short(new_runner: MakeRunner, weights: list[ParamTree], mixed: Logprobs):
    with new_runner(prefix_cache=True, kv_blocks=7) as runner:
        traffic = Traffic(LLM.from_model(runner, max_rows=6), weights, "recompute", 5)
        traffic.run(30)
        assert any(one.preemptions for one in traffic.requests)
        traffic.check(mixed)


def started(llm: LLM, count: int = 3, *, until_asked: bool = True) -> list[Request]:
    """Requests that have sampled something; with `until_asked` they go on when other weights have been asked for."""
    requests = [llm.request([1, 2, 3, at], replace(LONG, max_tokens=35)) for at in range(count)]
    if until_asked:
        hold(llm, lambda: all(one.choices for one in requests))
    llm.engine.submit(*requests)
    while not all(one.choices for one in requests):
        time.sleep(0.001)
    return requests


def hold(llm: LLM, when: Callable[[], bool]) -> None:
    """Lets no step begin, as soon as something is so, before other weights have been asked for."""
    engine, is_asked = llm.engine, threading.Event()
    step, begin_update = engine.scheduler.step, engine.begin_update

    def held() -> None:
        if when():
            assert is_asked.wait(60)
        step()

    def watched(update: Update) -> Future[int]:
        done = begin_update(update)
        is_asked.set()
        return done

    engine.scheduler.step, engine.begin_update = held, watched


def ended(requests: Sequence[Request]) -> list[RequestOutput]:
    while not all(one.is_done for one in requests):
        time.sleep(0.001)
    return [one.output() for one in requests]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_update_waits_for_its_policy_alone(policy: LivePolicy, serving: ModelRunner, weights: list[ParamTree]):
    llm = LLM.from_model(serving, max_rows=3)
    requests, version = started(llm), serving.params_version
    late = llm.request([5], replace(LONG, max_tokens=2))
    llm.engine.submit(late)  # there is no row for it yet
    assert llm.set_params(weights[1], live=policy) == serving.params_version == version + 1
    were_done = [one.is_done for one in requests]
    outs = ended([*requests, late])
    assert outs[-1].weight_versions == [version + 1] * 2
    if policy == "wait":
        assert were_done == [True] * 3
    for out in outs[:-1]:
        assert out.finish_reason == ("abort" if policy == "abort" else "length")
        assert set(out.weight_versions) <= ({version} if policy in ("wait", "abort") else {version, version + 1})


def test_what_is_scored_while_weights_abort_it_is_cancelled(serving: ModelRunner, weights: list[ParamTree]):
    llm = LLM.from_model(serving, max_rows=3, chunk_tokens=1)
    hold(llm, lambda: bool(llm.engine.scheduler.num_running))
    with ThreadPoolExecutor(1) as pool:
        scored = pool.submit(llm.score, [[1]], [[2] * 40])
        while not llm.engine.scheduler.num_running:
            time.sleep(0.001)
        llm.set_params(weights[1], live="abort")
        with pytest.raises(CancelledError, match="ended by a change of weights"):
            scored.result()


def test_a_refused_update_changes_nothing(serving: ModelRunner, weights: list[ParamTree], params: ParamTree):
    llm, version = LLM.from_model(serving), serving.params_version
    expected = llm.generate([[1, 2, 3, 0]], replace(LONG, max_tokens=35))[0]
    for policy in POLICIES:
        (request,) = started(llm, 1, until_asked=False)
        with pytest.raises(InvalidParameterError, match="missing"):
            llm.set_params({}, live=policy)
        (out,) = ended([request])
        assert (out.token_ids, out.weight_versions) == (expected.token_ids, [version] * 35)
    serving.prefill("another's", [1, 2])
    for policy in POLICIES:
        with pytest.raises(RequestValidationError, match="release them before new weights are set"):
            llm.set_params(weights[1], live=policy)
    with pytest.raises(RequestValidationError, match="live is 'now', expected one of"):
        llm.set_params(weights[1], live="now")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnsupportedError, match="this LLM runs a CountingLLM"):
        LLM.from_model(CountingLLM()).set_params({})
    assert serving.params_version == version


def test_an_error_of_an_update_does_not_keep_the_refused_weights(serving: ModelRunner, params: ParamTree):
    llm, version = LLM.from_model(serving), serving.params_version
    refused = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    kept = weakref.ref(jax.tree.leaves(refused)[0])
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(InvalidParameterError):  # `pytest.raises` would keep the error
            llm.set_params(refused)
        del refused
        assert (kept(), serving.params_version) == (None, version)
    finally:
        gc.enable()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_update_during_which_a_step_fails_ends(
    when: str, serving: ModelRunner, weights: list[ParamTree], monkeypatch: pytest.MonkeyPatch
):
    """Before the weights are set, it fails with the requests; after that, it has happened."""
    llm = LLM.from_model(serving)
    scheduler, version = llm.engine.scheduler, serving.params_version
    (request,) = started(llm, 1)

    def fail(*_: Any) -> None:
        if scheduler._updates or when == "after":
            raise MemoryError("injected")

    collect = scheduler._collect
    if when == "after":
        monkeypatch.setattr(scheduler, "_renew", fail)
    else:
        monkeypatch.setattr(scheduler, "_collect", lambda step: (fail(), collect(step)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.set_params, weights[1], live="keep")
        if when == "after":
            assert waiting.result(timeout=60) == version + 1
        else:
            with pytest.raises(InternalError, match="injected"):
                waiting.result(timeout=60)
    while not request.is_done:
        time.sleep(0.001)
    with pytest.raises(InternalError, match="injected"):
        request.output()
    assert serving.params_version == version + (when == "after")


def test_updates_compile_nothing_copy_nothing_and_keep_their_order(
    serving: ModelRunner, weights: list[ParamTree], compiles: list[str], monkeypatch: pytest.MonkeyPatch
):
    llm = LLM.from_model(serving)
    llm.generate([[1, 2, 3, 4]], LONG)
    requests = started(llm)
    compiles.clear()
    updates = [params_update(serving, one, policy) for one in weights[1:] for policy in POLICIES]
    set_params = serving.set_params

    def guarded(*args: Any, **how: Any) -> None:
        with jax.transfer_guard("disallow_explicit"):
            set_params(*args, **how)

    monkeypatch.setattr(serving, "set_params", guarded)
    for one in updates:
        llm.engine.begin_update(one)
    versions = [one.done.result() for one in updates]
    assert versions == list(range(versions[0], versions[0] + len(updates)))
    assert compiles == []
    for mine, theirs in zip(jax.tree.leaves(serving.params), jax.tree.leaves(weights[-1]), strict=True):
        assert mine is theirs
    ended(requests)


def test_what_a_function_of_the_weights_raises_reaches_its_caller_and_ends_nothing_else(serving: ModelRunner):
    llm = LLM.from_model(serving)
    requests = started(llm, until_asked=False)
    for raised in (SystemExit, ValueError):

        def fails(_: ParamTree, raised: type[BaseException] = raised) -> ParamTree:
            raise raised

        with pytest.raises(raised):
            llm.set_params(fails, live="keep")
    assert all(out.finish_reason == "length" for out in ended(requests))


def test_an_update_that_waits_ends_with_the_engine_or_when_it_is_cancelled(
    serving: ModelRunner, weights: list[ParamTree]
):
    llm, version = LLM.from_model(serving), serving.params_version
    requests = started(llm)
    gone = params_update(serving, weights[1], "wait")
    llm.engine.begin_update(gone)
    assert gone.done.cancel()
    ended(requests)
    llm.engine.settle()
    assert serving.params_version == version
    started(llm)
    late = params_update(serving, weights[1], "wait")
    llm.engine.begin_update(late)
    llm.engine.close()
    with pytest.raises(CancelledError, match="closed"):
        late.done.result()


def test_coroutines_change_weights_too(serving: ModelRunner, weights: list[ParamTree]):
    llm = AsyncLLM(LLM.from_model(serving))

    async def main() -> list[int]:
        found, out = [], None
        async for piece in llm.generate([1, 2, 3], LONG):
            out = piece
            if not found:  # the first piece that comes, of however many tokens
                found.append(await llm.set_params(weights[1], live="keep"))
        assert out is not None
        return [*found, out.weight_versions[0], out.weight_versions[-1]]

    for _ in range(20):  # on a busy machine, the answer may be there before the change is asked for
        version = serving.params_version
        new, first, last = asyncio.run(main())
        assert (new, first) == (version + 1, version)
        if last == new:
            return
    raise AssertionError("no change of weights came before the end of an answer")


def test_the_arrays_of_an_adapter_change_in_flight_and_only_who_is_under_them_notices(
    new_runner: MakeRunner, params: ParamTree
):
    def scores(llm: LLM, out: RequestOutput, lora: str | None, start: int = 0) -> list[float]:
        before, after = out.prompt_token_ids + out.token_ids[:start], out.token_ids[start:]
        return llm.score([before], [after], lora_request=lora)[0].logprobs

    with new_runner(prefix_cache=True, max_loras=2, max_lora_rank=4) as runner:
        llm = LLM.from_model(runner, max_rows=4)
        trees = [{name: jnp.asarray(leaf) for name, leaf in adapter_tensors(one).items()} for one in ("one", "two")]
        for policy in POLICIES:
            version = llm.set_lora("tuned", trees[0], scale=2.0)
            asked = [(lora, replace(LONG, max_tokens=35, seed=at)) for at, lora in enumerate((None, "tuned", "tuned"))]
            requests = [llm.request([1, 2, 3], one, lora) for lora, one in asked]
            bare = scores(llm, replace(requests[0].output(), token_ids=[5] * 9), None)
            hold(llm, lambda requests=requests: all(one.choices for one in requests))
            llm.engine.submit(*requests)
            while not all(one.choices for one in requests):
                time.sleep(0.001)
            assert llm.set_lora("tuned", trees[1], scale=2.0, live=policy) == version + 1
            plain, *tuned = ended(requests)
            assert plain.finish_reason == "length"
            assert plain.logprobs == pytest.approx(scores(llm, plain, None), abs=1e-4)
            assert scores(llm, replace(plain, token_ids=[5] * 9), None) == pytest.approx(bare, abs=1e-4)
            for out in tuned:
                old = out.weight_versions.count(version)
                assert set(out.weight_versions) <= (
                    {version} if policy in ("wait", "abort") else {version, version + 1}
                )
                assert out.finish_reason == ("abort" if policy == "abort" else "length")
                assert 0 < old < 35 or policy == "wait"
                if policy == "recompute":
                    assert out.logprobs is not None
                    assert out.logprobs[old:] == pytest.approx(scores(llm, out, "tuned", old), abs=1e-4)
            llm.set_lora("tuned", trees[0], scale=2.0)
            for out in tuned:
                old = out.weight_versions.count(version)
                assert out.logprobs is not None
                assert out.logprobs[:old] == pytest.approx(scores(llm, out, "tuned")[:old], abs=1e-4)
        with pytest.raises(NotFoundError, match="'other' is not loaded"):
            llm.generate([[1]], lora_request="other")

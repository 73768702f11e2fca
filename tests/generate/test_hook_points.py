"""Interventions and captures of single requests while others are served: each is what the whole forward computes."""

import asyncio
import functools
import threading
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from ferrum_jax import LLM, AsyncLLM, Interventions, SamplingParams, Speculation, from_params, models
from ferrum_jax.compile.step import StepKey
from ferrum_jax.contract import DecoderOnlyLLM
from ferrum_jax.contract.errors import InvalidParameterError, RequestValidationError, UnsupportedError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.generate.params import RequestOutput
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.rows import next_row
from ferrum_jax.generate.updates import LivePolicy, params_update
from ferrum_jax.models import Edit, replace_with
from ferrum_jax.models.hooks import Point, edited
from ferrum_jax.models.specs import ParamTree
from tests import tiny
from tests.executor.conftest import CAPACITY, CFG
from tests.fake import CountingLLM
from tests.generate.conftest import ENGINE, MakeRunner, crowded, is_empty

TOLERANCE = 2e-5  # float32 sums in another order
RELATIVE = 1e-6  # of what is captured, eight units in the last place: some of it is 30
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [8] * 20, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
VECTOR = np.random.RandomState(0).normal(size=CFG.hidden_size).astype(np.float32)
STEER = {("resid_post", 0): Edit(add=VECTOR)}
KNOCK_OUT = {("z", 1): Edit(scale=(np.arange(CFG.num_attention_heads) != 2)[:, None].astype(np.float32))}
PATCH = Interventions({("mlp_out", 0): replace_with(VECTOR)}, start=6, stop=14)
OTHER = {("resid_post", 0): Edit(add=-VECTOR, scale=np.float32(0.5))}
NAMED = {"none": None, "steer": STEER, "knock out": KNOCK_OUT, "patch": PATCH, "other": OTHER}
EACH = [STEER, None, KNOCK_OUT, PATCH]
POINTS = [("resid_post", 0), ("v", 1)]
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=7, logprobs=True, ignore_eos=True)


WIDTH = CAPACITY + 1


@functools.cache
def compiled(name: str) -> Any:
    """Returns the forward of padded tokens under interventions, and what it captures."""
    given = NAMED[name]
    one = given if isinstance(given, Interventions) else Interventions(given or {})
    stop = 10**6 if one.stop is None else one.stop

    def within(edit: Any) -> Any:
        def change(x: jax.Array, positions: jax.Array) -> jax.Array:
            here = (positions >= one.start) & (positions < stop)
            return jnp.where(here.reshape(*here.shape, *(1,) * (x.ndim - 2)), edited(x, edit), x)

        return change

    functions = {point: within(edit) for point, edit in one.edits.items()}
    return jax.jit(lambda params, ids: models.run(params, ids, CFG, capture=POINTS, interventions=functions))


def forward(params: ParamTree, out: RequestOutput, given: Any) -> tuple[NDArray[np.float32], dict[Any, Any]]:
    """Returns the log-probability of each token of an answer, and what its forward captures."""
    tokens = out.prompt_token_ids + out.token_ids
    padded = np.zeros((1, WIDTH), np.int32)
    padded[0, : len(tokens)] = tokens
    name = next(name for name, one in NAMED.items() if one is given)
    logits, captured = compiled(name)(params, padded)
    logprobs = np.asarray(jax.nn.log_softmax(logits[0]))[len(out.prompt_token_ids) - 1 : len(tokens) - 1]
    chosen = np.take_along_axis(logprobs, np.array(out.token_ids)[:, None], axis=1)[:, 0]
    return chosen, {point: np.asarray(captured[point][0])[: len(tokens)] for point in POINTS}


def check(params: ParamTree, outs: list[RequestOutput], each: list[Any], *, captured: bool = True) -> None:
    for out, given in zip(outs, each, strict=True):
        logprobs, points = forward(params, out, given)
        assert out.logprobs is not None
        np.testing.assert_allclose(out.logprobs, logprobs, rtol=0, atol=TOLERANCE)
        if captured:
            for point in POINTS:
                np.testing.assert_allclose(out.captured[point], points[point][:-1], rtol=RELATIVE, atol=TOLERANCE)


def test_requests_of_one_batch_have_each_their_own(runner: ModelRunner, params: ParamTree):
    llm = LLM.from_model(runner)
    plain = llm.generate(PROMPTS, PARAMS)
    outs = llm.generate(PROMPTS, PARAMS, interventions=EACH, capture=POINTS)
    check(params, outs, EACH)
    assert outs[1].token_ids == plain[1].token_ids
    assert [one.token_ids for one in outs] != [one.token_ids for one in plain]
    check(params, llm.generate(PROMPTS, PARAMS), [None] * 4, captured=False)  # nothing is left of any
    assert is_empty(runner)


def test_points_may_come_from_an_iterator_and_none_captures_nothing(runner: ModelRunner):
    llm = LLM.from_model(runner)
    assert llm.generate(PROMPTS[0], PARAMS, capture=None)[0].captured == {}
    (out,) = llm.generate(PROMPTS[0], PARAMS, capture=iter(POINTS))  # pyright: ignore[reportArgumentType]
    assert sorted(out.captured) == sorted(POINTS)


def test_other_values_and_other_requests_compile_nothing(runner: ModelRunner, params: ParamTree, compiles: list[str]):
    llm = LLM.from_model(runner)
    llm.generate(PROMPTS, PARAMS, interventions=STEER, capture=POINTS)
    compiles.clear()
    runner.reset()
    outs = llm.generate(PROMPTS, PARAMS, interventions=OTHER, capture=POINTS)
    assert compiles == []
    check(params, outs, [OTHER] * 4)


def test_a_sweep_over_points_compiles_no_step_for_a_part_of_them(new_runner: MakeRunner, params: ParamTree):
    """Requests that begin and end at different times, each at a point of its own: in any order they share steps."""
    sweep = [STEER, KNOCK_OUT, None, PATCH]
    prompts = [PROMPTS[0][: 3 + at] for at in range(4)]
    each = [replace(PARAMS, max_tokens=count) for count in (3, 9, 5, 7)]
    with new_runner(kv_blocks=31) as runner:  # of a size of its own, which shares no programs
        llm = LLM.from_model(runner, max_rows=2)
        check(params, llm.generate(prompts, each, interventions=sweep), sweep, captured=False)
        found = llm.generate(prompts[::-1], each, interventions=sweep[::-1])
        check(params, found, sweep[::-1], captured=False)
        sets = {key.edits for key in runner._programs._steps if isinstance(key, StepKey)}
    every = {Point("resid_post", 0), Point("z", 1), Point("mlp_out", 0)}
    assert sets == {(), tuple(sorted(every))}


def test_routes_that_were_sampled_are_those_that_are_trained_on():
    """A mixture is served in other weights than the trainer's: with the routes replayed, both send tokens alike."""
    cfg, weights = tiny.model_config("qwen3_moe"), tiny.tiny_params(tiny.CONFIGS["qwen3_moe"])
    changed = [
        leaf + 0.02 * jax.random.normal(jax.random.key(at), leaf.shape)
        for at, leaf in enumerate(jax.tree.leaves(weights))
    ]
    trainers = jax.tree.unflatten(jax.tree.structure(weights), changed)
    with from_params(weights, cfg, max_seqs=2, kv_capacity=32) as runner:
        outs = LLM.from_model(runner).generate([PROMPTS[0]], replace(PARAMS, n=2), capture=[("expert_indices", None)])

    @jax.jit
    def run(params: ParamTree, tokens: jax.Array, routes: Any) -> tuple[Any, Any, Any]:
        read = jnp.arange(tokens.shape[1])[:, None] < tokens.shape[1] - 1  # nothing read the last token
        replay = {point: replace_with(jnp.pad(ids, ((0, 1), (0, 0))), read) for point, ids in routes.items()}
        logits, replayed = models.run(params, tokens, cfg, capture=list(routes), interventions=replay)
        own = models.run(params, tokens, cfg, capture=list(routes), logits="none")[1]
        replayed, own = ({point: one[point][0, :-1] for point in routes} for one in (replayed, own))
        return jax.nn.log_softmax(logits[0]), replayed, own

    for out in outs:
        routes = dict(out.captured)
        assert len(routes) == cfg.num_hidden_layers
        tokens = jnp.array([out.prompt_token_ids + out.token_ids])
        logprobs, replayed, _ = run(weights, tokens, routes)
        jax.tree.map(np.testing.assert_array_equal, replayed, routes)
        chosen = np.asarray(logprobs)[np.arange(10, 22), out.token_ids]
        assert out.logprobs is not None
        np.testing.assert_allclose(out.logprobs, chosen, atol=TOLERANCE)
        _, replayed, own = run(trainers, tokens, routes)
        jax.tree.map(np.testing.assert_array_equal, replayed, routes)
        assert any((own[point] != routes[point]).any() for point in routes)


@pytest.mark.parametrize("kv_blocks", [48, 9])
def test_copies_of_a_prompt_and_preempted_requests_capture_everything(
    kv_blocks: int, new_runner: MakeRunner, params: ParamTree
):
    many = SamplingParams(max_tokens=9, temperature=1.0, seed=3, n=6, logprobs=True, ignore_eos=True)
    with new_runner(prefix_cache=True, kv_blocks=kv_blocks) as runner:
        llm = LLM.from_model(runner, max_rows=4)
        outs = llm.generate(PROMPTS, many, interventions=EACH, capture=POINTS)
        assert any(out.preemptions for out in outs) == (kv_blocks == 9)
        assert is_empty(runner)
    check(params, outs, [given for given in EACH for _ in range(6)])


def test_copies_part_only_once_what_they_share_is_captured(runner: ModelRunner, params: ParamTree):
    llm = LLM.from_model(runner, max_rows=8)  # there is room for all: they part while the prompt's step is on its way
    many = SamplingParams(max_tokens=3, temperature=1.0, seed=3, n=5, logprobs=True, ignore_eos=True)
    for prompt in PROMPTS:
        check(params, llm.generate([prompt], many, capture=POINTS), [None] * 5)


def test_scores_prompt_logprobs_and_streams_are_under_interventions(runner: ModelRunner, params: ParamTree):
    llm = LLM.from_model(runner)
    scoring = SamplingParams(max_tokens=5, logprobs=True, prompt_logprobs=True, ignore_eos=True)
    (out,) = llm.generate([PROMPTS[0]], scoring, interventions=PATCH, capture=POINTS)
    check(params, [out], [PATCH])
    assert out.logprobs is not None
    scores = llm.score([PROMPTS[0], PROMPTS[0]], [out.token_ids] * 2, interventions=[PATCH, None])
    np.testing.assert_allclose(scores[0].logprobs, out.logprobs, rtol=0, atol=TOLERANCE)
    assert np.abs(np.subtract(scores[1].logprobs, out.logprobs)).max() > 1e-2
    whole = RequestOutput(prompt_token_ids=PROMPTS[0][:1], token_ids=PROMPTS[0][1:], text="", finish_reason=None)
    assert out.prompt_logprobs is not None
    np.testing.assert_allclose(
        np.array(out.prompt_logprobs[1:], np.float64), forward(params, whole, PATCH)[0], rtol=0, atol=TOLERANCE
    )
    stream = llm.stream(PROMPTS[0], PARAMS, interventions=STEER, capture=POINTS)
    assert list(stream) == []  # there is no tokenizer
    check(params, [stream.output()], [STEER])

    async def last() -> RequestOutput:
        outs = []
        async with AsyncLLM(llm) as engine:
            async for found in engine.generate(PROMPTS[2], PARAMS, interventions=KNOCK_OUT, capture=POINTS):
                assert bool(found.captured) == found.finished
                outs.append(found)
        return outs[-1]

    check(params, [asyncio.run(last())], [KNOCK_OUT])


@pytest.mark.parametrize("how", ["loops", "drafts"])
def test_multi_step_programs_and_drafts_leave_such_requests_exact(how: str, new_runner: MakeRunner, params: ParamTree):
    changes = {"multi_step_tokens": 4} if how == "loops" else {"spec_tokens": 3}
    with new_runner(prefix_cache=True, **changes) as runner:
        drafting = Speculation(num_tokens=3) if how == "drafts" else None
        llm = LLM.from_model(runner, speculation=drafting)
        check(params, llm.generate(PROMPTS, PARAMS, interventions=EACH), EACH, captured=False)
        check(params, llm.generate(PROMPTS, PARAMS, capture=POINTS), [None] * 4)


def test_a_change_of_weights_and_a_reset_keep_interventions(runner: ModelRunner, params: ParamTree):
    llm = LLM.from_model(runner)
    long = SamplingParams(max_tokens=30, logprobs=True, ignore_eos=True)
    step, is_asked = llm.engine.scheduler.step, threading.Event()
    requests: list[Request] = []

    def held() -> None:
        if all(one.choices for one in requests):
            assert is_asked.wait(60)
        step()

    llm.engine.scheduler.step = held
    for change in (lambda: llm.set_params(params, live="recompute"), llm.reset):
        requests = [llm.request(prompt, long, None, given, POINTS) for prompt, given in zip(PROMPTS, EACH, strict=True)]
        is_asked.clear()
        llm.engine.submit(*requests)
        while not all(one.choices for one in requests):
            time.sleep(0.001)
        assert not any(one.is_done for one in requests)
        is_asked.set()
        change()
        while not all(one.is_done for one in requests):
            time.sleep(0.001)
        check(params, [one.output() for one in requests], EACH)


@pytest.mark.parametrize("live", ["recompute", "keep"])
@pytest.mark.parametrize("num_answers", [1, 9])
def test_captures_are_of_the_weights_that_chose_the_next_token(
    live: LivePolicy, num_answers: int, runner: ModelRunner, params: ParamTree
):
    """Also where tokens are recomputed under new weights, and where more answers begin with a prompt that was."""
    llm, after = LLM.from_model(runner, max_rows=4), jax.tree.map(lambda leaf: leaf * 0.9, params)
    try:
        everyone = llm.group(PROMPTS[0], replace(PARAMS, n=num_answers), None, None, POINTS)
        request, scheduler = everyone[0], llm.engine.scheduler
        scheduler.submit(request)
        while len(request.choices) < 5:
            scheduler.step()
        scheduler.update(params_update(runner, after, live))
        scheduler.step()
        if live == "keep":
            scheduler.reset()  # loses the KV, so that it is recomputed
        while scheduler.has_work:
            scheduler.step()
    finally:
        runner.set_params(params)
    outs = [one.output() for one in everyone]
    new = max(outs[0].weight_versions)
    assert {min(out.weight_versions) for out in outs} == ({new - 1} if num_answers == 1 else {new - 1, new})
    for out in outs:
        old = len(out.prompt_token_ids) - 1 + out.weight_versions.count(new - 1)
        before = old if new - 1 in out.weight_versions else 0  # rows whose next token the old weights chose
        for point in POINTS:
            assert len(out.captured[point]) == len(out.prompt_token_ids) + len(out.token_ids) - 1
            for weights, rows in ((params, slice(0, before)), (after, slice(before, None))):
                expected = forward(weights, out, None)[1][point][:-1]
                np.testing.assert_allclose(out.captured[point][rows], expected[rows], rtol=RELATIVE, atol=TOLERANCE)


def test_a_continued_answer_whose_tokens_are_read_under_two_weights_captures_those_of_the_later(
    runner: ModelRunner, params: ParamTree
):
    (former,) = LLM.from_model(runner).generate([PROMPTS[2]], replace(PARAMS, max_tokens=4))
    llm, after = LLM.from_model(runner, chunk_tokens=8), jax.tree.map(lambda leaf: leaf * 0.9, params)
    try:
        request = llm.request(former, PARAMS, None, None, POINTS)
        scheduler = llm.engine.scheduler
        scheduler.submit(request)
        scheduler.step()
        scheduler.step()
        assert 0 < request.num_captured < len(PROMPTS[2])
        scheduler.update(params_update(runner, after, "recompute"))
        while scheduler.has_work:
            scheduler.step()
    finally:
        runner.set_params(params)
    out = request.output()
    expected = forward(after, out, None)[1]
    for point in POINTS:
        np.testing.assert_allclose(out.captured[point], expected[point][:-1], rtol=RELATIVE, atol=TOLERANCE)


def test_a_preempted_answer_that_is_aborted_keeps_its_captures(new_runner: MakeRunner, params: ParamTree):
    with new_runner(prefix_cache=True, kv_blocks=9) as runner:
        llm = LLM.from_model(runner, max_rows=4)
        requests = [llm.request([2, at], replace(PARAMS, max_tokens=30), None, None, POINTS) for at in range(4)]
        scheduler = llm.engine.scheduler
        for one in requests:
            scheduler.submit(one)
        while not (preempted := [one for one in requests if one.preemptions and not one.num_read]):
            scheduler.step()
        row = next_row(preempted[0], 100)
        assert row is not None
        assert row.capture == ()  # all that it has read is captured
        assert row.num_tokens == preempted[0].num_captured == len(preempted[0].tokens) - 1
        scheduler.update(params_update(runner, params, "abort"))
        scheduler.step()
        outs = [one.output() for one in requests]
        assert not scheduler.has_work
    assert [out.finish_reason for out in outs] == ["abort"] * 4
    assert any(out.preemptions for out in outs)
    check(params, outs, [None] * 4)


def test_what_cannot_be_done_is_refused_and_nothing_starts(runner: ModelRunner):
    llm = LLM.from_model(runner)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"interventions": [STEER]}, RequestValidationError, "2 prompts need as many interventions, 1 were given"),
        ({"interventions": "z"}, RequestValidationError, "expected Interventions or a mapping"),
        ({"interventions": {("z", 9): Edit()}}, InvalidParameterError, "the layer is 9"),
        ({"interventions": {("z", 0): lambda x, _: x}}, UnsupportedError, "is a function"),
        ({"interventions": Interventions(STEER, start=-1)}, RequestValidationError, "start is -1"),
        ({"capture": [("pattern", 0)]}, UnsupportedError, "'pattern' cannot be captured while generating"),
        ({"capture": ["z"]}, InvalidParameterError, "is no hook point"),
    ]
    for given, error, message in refused:
        with pytest.raises(error, match=message):
            llm.generate(PROMPTS[:2], PARAMS, **given)
    assert is_empty(runner)


def test_a_model_of_a_third_party_has_no_hook_points():

    model: DecoderOnlyLLM = CountingLLM()
    with pytest.raises(UnsupportedError, match="hook points need a ModelRunner, this LLM runs a CountingLLM"):
        LLM.from_model(model).generate([[1]], capture=[("z", 0)])


def test_an_intervention_past_the_capacity_changes_nothing(runner: ModelRunner):
    llm = LLM.from_model(runner)
    past = Interventions(STEER, start=CAPACITY)
    assert llm.generate(PROMPTS, PARAMS, interventions=past)[0].token_ids == llm.generate(PROMPTS, PARAMS)[0].token_ids
    with crowded(runner, 4):
        assert llm.generate([[5]], PARAMS, interventions={})[0].captured == {}


@pytest.mark.devices
def test_more_requests_than_a_replica_has_rows_wait_for_each_other(params: ParamTree):
    engine = replace(ENGINE, max_seqs=2, decode_rows=(2,), query_blocks=(1,))
    with from_params(params, CFG, engine=engine, mesh={"data": 2}) as replicas:
        llm = LLM.from_model(replicas)
        outs = llm.generate([[at, 3, 5] for at in range(1, 8)], PARAMS, interventions=STEER)
        check(params, outs, [STEER] * 7, captured=False)

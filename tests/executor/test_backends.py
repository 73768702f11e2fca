"""A whole engine over the GPU kernel, interpreted on the CPU, answers as over XLA."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import models
from ferrum_jax.config import EngineConfig
from ferrum_jax.contract.decoding import DecodeRun
from ferrum_jax.executor import ModelRunner, plan_engine
from ferrum_jax.models.backends import kv_layout
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.sharding.devices import find_device
from tests.executor.conftest import CFG, poison

WIDE = replace(CFG, head_dim=16)  # layer 0 has a window of 9, layer 1 none
TOLERANCE = 2e-5  # logits of the order of one, out of float32 sums in another order
ENGINE = EngineConfig(
    dtype="float32", max_seqs=3, kv_capacity=44, block_size=8, max_step_tokens=24,
    decode_rows=(3,), query_blocks=(2,), block_tokens=8, verify_tokens=6, multi_step_tokens=4,
    window_kv=False,  # every layer's keys and values are compared
)  # fmt: skip
PROMPTS = {"a": list(range(1, 14)), "b": [5, 3, 9]}


@pytest.fixture(scope="module")
def wide() -> ParamTree:
    return models.specs.initialise(models.family(WIDE).param_specs(WIDE), jax.random.key(0), "float32", scale=0.4)


def _runner(params: ParamTree, attention: str) -> ModelRunner:
    plan = plan_engine(ENGINE, WIDE, platform="cpu", free_bytes=10**9)
    cache = replace(plan.cache, attention=attention, layout=kv_layout(attention, WIDE))
    runner = ModelRunner(params, WIDE, replace(plan, cache=cache), device=find_device("cpu"))
    poison(runner)
    return runner


@pytest.fixture(scope="module")
def runners(wide: ParamTree) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    with _runner(wide, "xla") as reference, _runner(wide, "triton") as runner:
        yield reference, runner


def test_chunks_decoding_mixed_steps_and_going_back_answer_as_xla_does(runners: tuple[ModelRunner, ModelRunner]):
    steps = [
        [("a", PROMPTS["a"], 0, True)],  # two chunks
        [("b", PROMPTS["b"], 0, True), ("a", [7], 13, True)],  # a chunk beside a decoding row
        [("a", [2], 14, True), ("b", [11], 3, True)],
    ]
    for step in steps:
        wanted, found = (np.asarray(runner.unified_forward(step), np.float32) for runner in runners)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    for layer in range(2):
        for wanted, found in zip(*(runner.kv_cache("a", layer) for runner in runners), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    for runner in runners:
        runner.truncate_kv("a", 9)
    wanted, found = (np.asarray(runner.unified_forward([("a", [4, 8], 9, True)])) for runner in runners)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    runs = [
        DecodeRun(cache_id="a", token=3, pos=11, max_tokens=5),
        DecodeRun(cache_id="b", token=6, pos=4, max_tokens=3),
    ]
    wanted, found = (runner.decode_n(runs) for runner in runners)
    assert [run.token_ids for run in found] == [run.token_ids for run in wanted]


def test_the_whole_forward_takes_a_backend(wide: ParamTree):
    tokens = jnp.asarray([PROMPTS["a"], PROMPTS["a"][::-1]], jnp.int32)
    run = jax.jit(models.forward, static_argnames=("cfg", "attention"))
    wanted, found = (run(wide, tokens, cfg=WIDE, attention=name) for name in ("xla", "triton"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)

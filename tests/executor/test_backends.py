"""A whole engine over the GPU kernel, interpreted on the CPU, answers as over XLA."""

from collections.abc import Callable, Iterator
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
from tests import tiny
from tests.executor.conftest import CFG, poison

WIDE = replace(CFG, head_dim=16)  # layer 0 has a window of 9, layer 1 none
TOLERANCE = 2e-5  # logits of the order of one, out of float32 sums in another order
ENGINE = EngineConfig(
    dtype="float32", max_seqs=3, kv_capacity=44, block_size=8, max_step_tokens=24,
    decode_rows=(3,), query_blocks=(2,), block_tokens=8, verify_tokens=6, multi_step_tokens=4,
    window_kv=False,  # every layer's keys and values are compared
)  # fmt: skip
PROMPTS = {"a": list(range(1, 14)), "b": [5, 3, 9]}
Forward = Callable[..., jax.Array]


@pytest.fixture(scope="module")
def wide() -> ParamTree:
    return models.specs.initialise(models.family(WIDE).param_specs(WIDE), jax.random.key(0), "float32", scale=0.4)


@pytest.fixture(scope="module")
def forward() -> Forward:
    return jax.jit(models.forward, static_argnames=("cfg", "attention"))


def _runner(params: ParamTree, attention: str) -> ModelRunner:
    plan = plan_engine(ENGINE, WIDE, platform="cpu", free_bytes=10**9)
    cache = replace(plan.cache, attention=attention, layout=kv_layout(attention, WIDE))
    runner = ModelRunner(params, WIDE, replace(plan, cache=cache), device=find_device("cpu"))
    poison(runner)
    return runner


@pytest.fixture(scope="module")
def triton(wide: ParamTree) -> Iterator[ModelRunner]:
    with _runner(wide, "triton") as runner:
        yield runner


def test_chunks_beside_decoding_rows_answer_as_the_cache_free_forward(
    triton: ModelRunner, wide: ParamTree, forward: Forward
):
    texts = {"a": [7, 2], "b": [*PROMPTS["a"], 11], "c": PROMPTS["b"]}
    padded = jnp.asarray([text + [0] * (14 - len(text)) for text in texts.values()], jnp.int32)
    wanted = np.asarray(forward(wide, padded, cfg=WIDE))
    first = triton.unified_forward([("b", texts["b"][:13], 0, True), ("a", [7], 0, True)])  # two chunks
    second = triton.unified_forward([("c", texts["c"], 0, True), ("a", [2], 1, True), ("b", [11], 13, True)])
    found = np.asarray([*first, *second], np.float32)
    np.testing.assert_allclose(found, wanted[[1, 0, 2, 0, 1], [12, 0, 2, 1, 13]], rtol=0, atol=TOLERANCE)
    triton.reset()


@pytest.mark.slow
def test_decoding_and_going_back_answer_as_xla_does(triton: ModelRunner, wide: ParamTree):
    steps = [
        [("a", PROMPTS["a"], 0, True)],
        [("b", PROMPTS["b"], 0, True), ("a", [7], 13, True)],
        [("a", [2], 14, True), ("b", [11], 3, True)],
    ]
    with _runner(wide, "xla") as reference:
        runners = reference, triton
        for step in steps:
            wanted, found = (np.asarray(runner.unified_forward(step), np.float32) for runner in runners)
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
    triton.reset()


def test_latents_answer_as_the_cache_free_forward(forward: Forward):
    config = tiny.CONFIGS["deepseek3"] | {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "num_hidden_layers": 2}
    cfg, params = tiny.ModelConfig.from_hf(config), tiny.tiny_params(config)
    plan = plan_engine(ENGINE, cfg, platform="cpu", free_bytes=10**9)
    cache = replace(plan.cache, attention="triton", layout=kv_layout("triton", cfg))
    assert cache.layout == "latent_rows"
    text = [7, 2, *PROMPTS["a"], 11]
    wanted = np.asarray(forward(params, jnp.asarray([text], jnp.int32), cfg=cfg))[0]
    with ModelRunner(params, cfg, replace(plan, cache=cache), device=find_device("cpu")) as runner:
        poison(runner)
        for at, stop in ((0, 10), (10, 15), (15, 16)):
            found = runner.prefill("a", text[at:stop])
            np.testing.assert_allclose(found, wanted[stop - 1], rtol=0, atol=TOLERANCE)
        assert [side.shape for side in runner.kv_cache("a", 1)] == [(16, 1, 48)] * 2


@pytest.mark.slow
def test_the_whole_forward_takes_a_backend(wide: ParamTree, forward: Forward):
    tokens = jnp.asarray([PROMPTS["a"], PROMPTS["a"][::-1]], jnp.int32)
    wanted, found = (forward(wide, tokens, cfg=WIDE, attention=name) for name in ("xla", "triton"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)

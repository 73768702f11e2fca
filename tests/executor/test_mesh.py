"""Law 4: a model divided over the devices of a mesh answers every call as it does on one device."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ferrum_jax
from ferrum_jax.contract import DecodeRun, GreedyArgmax, Sampling
from ferrum_jax.executor import ModelRunner
from tests import tiny

TOLERANCE = 1e-5  # of the largest number: float32 sums in another order
ENGINE = ferrum_jax.EngineConfig(
    max_seqs=3, kv_capacity=64, block_size=8, decode_rows=(3,), query_blocks=(3,), block_tokens=16, multi_step_tokens=4
)
MESHES = {  # heads, key heads with copies, experts by number, and both; sizes that do not divide are padded
    "model 2": {"model": 2},
    "model 3": {"model": 3},
    "model 4": {"model": 4},
    "expert 2": {"expert": 2},
    "expert 4": {"expert": 4},
    "expert 2, model 2": {"expert": 2, "model": 2},
}
QUICK = (
    ("llama31", "model 4"),
    ("qwen2_moe", "expert 2, model 2"),
    ("deepseek3", "model 2"),
    ("olmo2", "model 3"),
)
PAIRS = [
    pytest.param(name, mesh, marks=() if (name, mesh) in QUICK else pytest.mark.slow, id=f"{name}, {mesh}")
    for name in tiny.CONFIGS
    for mesh in MESHES
    if "expert" not in MESHES[mesh] or tiny.model_config(name).experts is not None
]


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """A model on one device, and on a mesh."""
    name, mesh = request.param
    folder = tiny.write_folder(tmp_path_factory.mktemp(name), tiny.CONFIGS[name])
    with (
        ferrum_jax.load(folder, engine=ENGINE, progress=False) as one,
        ferrum_jax.load(folder, engine=ENGINE, mesh=MESHES[mesh], progress=False) as many,
    ):
        yield one, many


def agree(found: Any, expected: Any) -> None:
    """Demands the same answer, numbers to rounding."""
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            agree(mine, theirs)
    elif isinstance(expected, np.ndarray) and expected.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * max(1.0, np.abs(expected).max()))
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("pair", [pytest.param((p.values[0], p.values[1]), marks=p.marks, id=p.id) for p in PAIRS],
                         indirect=True)  # fmt: skip
def test_every_method_answers_as_on_one_device(pair: tuple[ModelRunner, ModelRunner]):
    one, many = pair
    tokens = np.random.default_rng(3).integers(97, size=40).tolist()

    def both(call: Any) -> None:
        agree(call(many), call(one))

    both(lambda runner: runner.prefill("a", tokens[:21]))
    both(lambda runner: runner.prefill("a", tokens[21:24]))
    both(lambda runner: runner.unified_forward([("a", tokens[24:25], 24, True), ("b", tokens[:9], 0, True)]))
    both(lambda runner: runner.decode_batch([("a", tokens[25], 25), ("b", tokens[9], 9)]))
    both(lambda runner: runner.forward_verify("b", tokens[10:15]))
    both(lambda runner: runner.fork("b", "c"))
    both(lambda runner: runner.decode_batch([("c", 3, 15), ("b", 4, 15)]))
    both(lambda runner: runner.truncate_kv("c", 7))
    both(lambda runner: runner.prefill("c", tokens[:4]))
    both(lambda runner: runner.decode_batch_with_logits_policy([("a", 5, 26)], [GreedyArgmax()]))
    both(lambda runner: runner.release("b"))
    scored = [("b", tokens[:20], tokens[1:21])]
    both(lambda runner: [(one.logprobs, one.greedy_ids) for one in runner.score_batch(scored)])
    run = [DecodeRun(cache_id="b", token=7, pos=20, max_tokens=6, sampling=Sampling(temperature=0.9), seed=11)]
    both(lambda runner: [one.token_ids for one in runner.decode_n(run)])
    for layer in range(one.model_config.num_hidden_layers):
        both(lambda runner, layer=layer: runner.kv_cache("c", layer))
    assert many.compile_stats()["compiles_after_warmup"] == 0


@pytest.mark.parametrize("mesh", ["model 2", "model 4"])
def test_what_is_captured_is_what_one_device_captures(mesh: str, tmp_path_factory: pytest.TempPathFactory):
    folder = tiny.write_folder(tmp_path_factory.mktemp("captured"), tiny.CONFIGS["llama31"])
    found = []
    for where in (None, MESHES[mesh]):
        with ferrum_jax.load(folder, engine=ENGINE, mesh=where, progress=False) as runner:
            found.append(runner.capture("a", list(range(20)), hidden=(0, 2), attention_weights=(1,)))
    one, many = found
    agree(many.logits, one.logits)
    for layer, states in one.hidden.items():
        agree(many.hidden[layer], states)
    agree(many.attention_weights[1], one.attention_weights[1])

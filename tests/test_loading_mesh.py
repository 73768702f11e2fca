"""Weights on a mesh: every device reads its own part, whatever the checkpoint, and the numbers are the same."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType

import ferrum_jax
from ferrum_jax import EngineConfig, models
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.models.quantisation import formats_of
from ferrum_jax.ops import native
from ferrum_jax.weights import folder as folders
from tests import tiny
from tests.weights import test_packed
from tests.weights.scalar_ggml import draw_blocks
from tests.weights.test_gguf import write_gguf

pytestmark = pytest.mark.devices

ENGINE = EngineConfig(max_seqs=2, kv_capacity=32, block_size=8, block_tokens=16, artifacts=False)
TOKENS = list(range(2, 21))
MESHES = {"llama_biases": {"model": 3}, "phi3_beyond": {"model": 4}, "qwen2_moe": {"expert": 2, "model": 2},
          "gpt_oss": {"expert": 2, "model": 2}, "deepseek3": {"model": 3}}  # fmt: skip


def check_same(path: Path, mesh: dict[str, int], layout: str = "checkpoint", **settings: Any) -> None:
    """Demands the same parameters, bit by bit, and the same logits as on one device."""
    with (
        ferrum_jax.load(path, engine=ENGINE, layout=layout, progress=False, **settings) as one,
        ferrum_jax.load(path, engine=ENGINE, layout=layout, mesh=mesh, progress=False, **settings) as many,
    ):
        tiny.assert_same_tree(many.params, one.params)
        expected = one.forward_verify("a", TOKENS)
        tolerance = 1e-5 * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(many.forward_verify("a", TOKENS), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("phi3_beyond", "deepseek3") else pytest.mark.slow) for name in MESHES],
)
def test_a_folder_gives_the_same_parameters(name: str, tmp_path: Path):
    check_same(tiny.write_folder(tmp_path, tiny.CONFIGS[name], shards=3), MESHES[name])


def test_sixteen_bits_are_kept_and_divided(tmp_path: Path):
    config = tiny.CONFIGS["qwen3"] | {"torch_dtype": "bfloat16"}
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tiny.tensors(config).items()}
    path = tiny.write_folder(tmp_path, config, named=tensors)
    check_same(path, {"model": 3}, layout="fused")


@pytest.mark.parametrize(
    ("layout", "quantize"),
    [
        ("checkpoint", None),
        pytest.param("fused", None, marks=pytest.mark.slow),
        pytest.param("checkpoint", "int8", marks=pytest.mark.slow),
        pytest.param("fused", "int8", marks=pytest.mark.slow),
    ],
)
def test_an_orbax_checkpoint_gives_the_same_parameters(layout: str, quantize: str | None, tmp_path: Path):
    source = tiny.write_folder(tmp_path / "folder", tiny.CONFIGS["llama31"])
    ferrum_jax.convert(source, tmp_path / "orbax", quantize=quantize, progress=False)
    check_same(tmp_path / "orbax", {"model": 3}, layout=layout)


def test_groups_that_two_devices_share_are_read_divided_and_joined(tmp_path: Path):
    """Nine groups of eight inputs: one device has the first half of the fifth, the other its second half."""
    source, mesh = test_packed.write(tmp_path / "folder", "words_zeros"), {"model": 2}
    made = ferrum_jax.convert(source, tmp_path / "orbax", quantize="keep", progress=False)
    params, cfg = ferrum_jax.load_params(made, "float32")
    expected = models.forward(models.dequantise(params), jnp.array([TOKENS]), cfg)[0]
    for runner in (
        ferrum_jax.load(source, engine=ENGINE, quantize="keep", mesh=mesh, progress=False),
        ferrum_jax.load(made, engine=ENGINE, mesh=mesh, progress=False),
        ferrum_jax.from_params(params, cfg, engine=ENGINE, mesh=mesh),
    ):
        with runner:
            tiny.assert_same_tree(models.dequantise(runner.params), models.dequantise(params))
            np.testing.assert_allclose(runner.forward_verify("a", TOKENS), expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(native.instruction_set() is None, reason="without kernels nothing is kept by default")
def test_a_format_that_the_devices_cannot_divide_is_refused_with_the_weights_name(tmp_path: Path):
    """Three devices' shares of 64 columns end inside the bytes of groups of 32."""
    config = tiny.CONFIGS["llama3"] | {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1}
    name = "model.layers.0.mlp.down_proj.weight"
    raw = {name: (draw_blocks("Q5_1", (96, 64), 0), GGMLQuantizationType.Q5_1)}
    path, mesh = write_gguf(tmp_path / "model.gguf", config, raw=raw), {"model": 3}
    with pytest.raises(UnsupportedError, match=rf"{name}: packed weights .* quantize='none' dequantises them"):
        ferrum_jax.load(path, engine=ENGINE, mesh=mesh, progress=False)
    plain, _ = ferrum_jax.load_params(path, "float32", quantize="none")
    with ferrum_jax.load(path, engine=ENGINE, mesh=mesh, quantize="none", progress=False) as runner:
        tiny.assert_same_tree(runner.params, plain)
    with ferrum_jax.load(path, engine=ENGINE, mesh={"model": 2}, progress=False) as runner:
        assert formats_of(runner.params)


def test_parameters_of_nnx_are_divided_as_arrays(tmp_path: Path):
    params, cfg = tiny.tiny_params(tiny.CONFIGS["llama31"]), tiny.model_config("llama31")
    with ferrum_jax.from_params(jax.tree.map(nnx.Param, params), cfg, engine=ENGINE, mesh={"model": 2}) as runner:
        found, expected = jax.tree.leaves(runner.params), jax.tree.leaves(params)
        assert len(found) == len(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_devices_read_no_more_than_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tiny.write_folder(tmp_path, tiny.CONFIGS["qwen2_moe"])
    numbers: list[int] = []
    read = folders.read_runs

    def counted(*given: Any) -> np.ndarray:
        numbers.append((found := read(*given)).size)
        return found

    monkeypatch.setattr(folders, "read_runs", counted)
    monkeypatch.setattr(folders, "read_tensor", None)  # no tensor is read whole
    with ferrum_jax.load(path, engine=ENGINE, mesh={"expert": 2, "model": 2}, progress=False) as runner:
        held = sum(len(leaf.sharding.device_set) * int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
                   for leaf in jax.tree.leaves(runner._device.params))  # fmt: skip
    assert 0.9 * held < sum(numbers) <= held  # padding is not read
    assert max(numbers) <= 49 * 48  # half of the vocabulary at most


@pytest.mark.slow
def test_research_functions_take_what_a_mesh_serves(tmp_path: Path):
    path = tiny.write_folder(tmp_path, tiny.CONFIGS["llama31"])
    tokens = jnp.asarray([TOKENS])
    with ferrum_jax.load(path, engine=ENGINE, mesh={"model": 4}, progress=False) as runner:
        params, cfg = runner.params, runner.model_config
        logits = ferrum_jax.models.forward(params, tokens, cfg)
        grads = jax.grad(lambda tree: ferrum_jax.models.forward(tree, tokens, cfg).sum())(params)

    @jax.jit
    def rollout(tree: Any) -> Any:
        drawn, one = ferrum_jax.Sampling(temperature=0.8), jnp.ones(1, jnp.int32)
        own = {"max_tokens": 6, "sampling": drawn}
        return ferrum_jax.generate_fn(tree, None, tokens, one * len(TOKENS), one.astype(jnp.uint32), cfg, **own)[0]

    whole, _ = ferrum_jax.load_params(path)
    found, wanted = rollout(params), rollout(whole)
    np.testing.assert_array_equal(found.token_ids, wanted.token_ids)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5)
    np.testing.assert_allclose(logits, ferrum_jax.models.forward(whole, tokens, cfg), atol=1e-5)
    expected = jax.grad(lambda tree: ferrum_jax.models.forward(tree, tokens, cfg).sum())(whole)
    for mine, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4 * max(1.0, np.abs(theirs).max()))

"""Models whose weights are quantised while they are loaded: the same model everywhere, in less memory."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax import EngineConfig, ModelConfig, models
from ferrum_jax.contract import ActiveLoraAdapter, DataType
from ferrum_jax.contract.errors import ConfigError, InvalidFormatError
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.loading import open_checkpoint, param_specs, plan_ahead
from ferrum_jax.models import specs
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.quantisation import formats_of
from ferrum_jax.models.specs import ParamTree, named_leaves
from ferrum_jax.weights import assemble, orbax
from tests import tiny
from tests.adapters import write_adapter

NAME = "qwen3_window_biases"
CONFIG = tiny.CONFIGS[NAME] | {"num_hidden_layers": 2, "max_window_layers": 1}
CFG = ModelConfig.from_hf(CONFIG)
FORMATS = ("int8", "float8_e4m3fn")
ENGINE = EngineConfig(
    max_seqs=2, kv_capacity=24, block_size=8, decode_rows=(2,), query_blocks=(1,), block_tokens=8, verify_tokens=8
)
LOGITS = 1e-4  # the forward's own tolerance between buckets: float32 sums in another order

slow = pytest.mark.slow
every_format = pytest.mark.parametrize("dtype", FORMATS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("models") / NAME, CONFIG)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as an Orbax checkpoint of plain weights."""
    path = tmp_path_factory.mktemp("models") / "orbax"
    orbax.save(path, tiny.tiny_params(CONFIG), CFG)
    return path


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled steps, which tests with the same weights and engine share."""
    return tmp_path_factory.mktemp("steps")


@functools.cache
def expected_params(dtype: str) -> ParamTree:
    return models.quantise(tiny.tiny_params(CONFIG), CFG, dtype)


def expected_bytes(dtype: str) -> int:
    """Counts by hand: one byte a number of a matrix, four for each of its rows, four a number of anything else."""
    tensors = tiny.tensors(CONFIG).values()
    assert np.dtype(ml_dtypes.float8_e4m3fn if "float8" in dtype else dtype).itemsize == 1
    return sum(tensor.size + 4 * tensor.shape[0] if tensor.ndim == 2 else 4 * tensor.size for tensor in tensors)


@pytest.mark.parametrize(
    ("source", "dtype"),
    [("folder", "int8"), ("checkpoint", "float8_e4m3fn"),
     pytest.param("folder", "float8_e4m3fn", marks=slow), pytest.param("checkpoint", "int8", marks=slow)],
)  # fmt: skip
def test_weights_are_quantised_one_by_one_as_they_are_read(
    source: str, dtype: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    placed: list[Any] = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda tree, *more: placed.extend(jax.tree.leaves(tree)) or put(tree, *more))
    monkeypatch.setattr(assemble, "PIECE", 100)  # numbers: every matrix goes in several pieces
    found, _ = ferrum_jax.load_params(request.getfixturevalue(source), quantize=dtype)
    tiny.assert_same_tree(found, expected_params(dtype))
    wide = [leaf for leaf in placed if leaf.ndim == 2 and leaf.shape[1] > 1 and leaf.dtype.itemsize > 1]
    assert placed
    assert not wide  # no matrix was ever on the device in float32


def test_a_narrow_checkpoint_is_quantised_from_its_own_numbers(tmp_path: Path):
    narrow = {name: t.astype(ml_dtypes.bfloat16) for name, t in tiny.tensors(CONFIG).items()}
    path = tiny.write_folder(tmp_path / "narrow", CONFIG, named=narrow)
    found, cfg = ferrum_jax.load_params(path, "float16", quantize="int8")
    wide = {name: jnp.asarray(t, jnp.float32) for name, t in narrow.items()}
    expected = models.quantise(specs.from_names(models.family(cfg).param_specs(cfg), wide), cfg, "int8")
    for name, form in formats_of(expected).items():
        for part in ("values", "scales"):
            mine, theirs = (named_leaves(tree)[f"{name}.{part}"] for tree in (found, expected))
            np.testing.assert_array_equal(mine, theirs, strict=True)
        assert form.dtype == "int8"
    assert found["model"]["norm"]["weight"].dtype == jnp.float16


@pytest.mark.slow
def test_a_prompt_and_a_token_have_the_logits_of_the_dequantised_forward(folder: Path):
    prompt = tiny.prompt(NAME)[:9]
    forward = jax.jit(models.forward, static_argnums=2)
    expected = forward(models.dequantise(expected_params("int8")), jnp.array([prompt]), CFG)[0, 7:]
    with ferrum_jax.load(folder, engine=ENGINE, quantize="int8", progress=False) as runner:
        found = [runner.prefill("a", prompt[:8]), runner.decode("a", prompt[8], 8)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS)


@slow
@every_format
def test_every_path_of_the_runner_gives_the_logits_of_the_dequantised_forward(folder: Path, dtype: str):
    prompt = tiny.prompt(NAME)[:21]
    plain, cfg = models.dequantise(expected_params(dtype)), CFG
    expected = np.asarray(jax.jit(models.forward, static_argnums=2)(plain, jnp.array([prompt]), cfg)[0])
    with ferrum_jax.load(folder, engine=ENGINE, quantize=dtype, progress=False) as runner:
        found = [
            runner.prefill("a", prompt[:19]),
            runner.decode("a", prompt[19], 19),
            runner.decode("a", prompt[20], 20),
        ]
        np.testing.assert_allclose(found, expected[18:], rtol=0, atol=LOGITS)
        runner.truncate_kv("a", 5)
        runner.prefill("b", prompt[:3])
        both = runner.decode_batch([("a", prompt[5], 5), ("b", prompt[3], 3)])
        np.testing.assert_allclose(both, expected[[5, 3]], rtol=0, atol=LOGITS)
        mixed = runner.unified_forward([("a", [prompt[6]], 6, True), ("b", prompt[4:9], 4, True)])
        np.testing.assert_allclose(np.stack([row for row in mixed if row is not None]), expected[[6, 8]], atol=LOGITS)
        np.testing.assert_allclose(runner.forward_verify("a", prompt[7:14]), expected[7:14], rtol=0, atol=LOGITS)


@slow
def test_adapters_are_added_to_quantised_products_in_the_activations_dtype(tmp_path: Path):
    config, cfg = tiny.CONFIGS["qwen3_tied"], tiny.model_config("qwen3_tied")  # which the adapter belongs to
    folder, prompt = tiny.write_folder(tmp_path / "model", config), tiny.prompt("qwen3_tied")[:7]
    path = str(write_adapter(tmp_path / "adapter", "qwen3"))
    engine = replace(ENGINE, max_loras=1, max_lora_rank=7)
    plain = models.dequantise(models.quantise(tiny.tiny_params(config), cfg, "int8"))
    with ferrum_jax.load(folder, engine=engine, quantize="int8", progress=False) as runner:
        bare = runner.prefill("bare", prompt)
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="one", path=path))
        found, loras = runner.prefill("a", prompt), runner._adapters.stacks
        assert {leaf.dtype.name for leaf in jax.tree.leaves(loras)} == {"float32"}
        forward = jax.jit(models.forward, static_argnums=2)
        expected = forward(plain, jnp.array([prompt]), cfg, loras=loras, adapters=jnp.array([0]))[0, -1]
        np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS)
        assert np.abs(found - bare).max() > 100 * LOGITS


@every_format
def test_memory_is_values_and_scales(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch):
    with ferrum_jax.load(folder, engine=ENGINE, quantize=dtype, progress=False) as runner:
        info, tensors = runner.model_info(), tiny.tensors(CONFIG)
        assert info.num_parameters == sum(tensor.size for tensor in tensors.values())
        assert info.dtype is {"int8": DataType.INT8, "float8_e4m3fn": DataType.FP8}[dtype]
        assert runner.capabilities().supported_dtypes == (DataType.FP32,)
        assert runner.capabilities().memory_requirements.parameter_memory == expected_bytes(dtype)
        usage = runner.memory_usage()
        assert usage.allocated_bytes == expected_bytes(dtype) + runner.plan.cache.num_bytes
        assert runner.plan.cache.dtype == "float32"
    source = open_checkpoint(folder)
    assert specs.num_bytes(param_specs(source, dtype), "float32") == expected_bytes(dtype)
    assert specs.num_bytes(param_specs(source, None), "float32") > 3 * expected_bytes(dtype)
    free: list[int] = []
    monkeypatch.setattr("ferrum_jax.sharding.mesh.free_bytes", lambda _: 10**9)
    monkeypatch.setattr("ferrum_jax.loading.plan_engine", lambda *_, free_bytes, **__: free.append(free_bytes))
    device = jax.local_devices()[0]
    plan_ahead(EngineConfig(quantize=dtype, dtype="float32"), source, ModelPlacement.on_one(device))
    assert free == [10**9 - expected_bytes(dtype)]


@pytest.mark.parametrize(
    ("dtype", "group_size"),
    [("int8", None), *(pytest.param(*form, marks=slow) for form in (
        ("float8_e4m3fn", 4), ("int8", 4), ("float8_e4m3fn", None)))],
)  # fmt: skip
def test_a_saved_quantised_tree_is_loaded_as_it_was(dtype: str, group_size: int | None, tmp_path: Path):
    cfg = CFG
    kept = models.quantise(tiny.tiny_params(CONFIG), cfg, dtype, group_size=group_size)
    orbax.save(tmp_path / "kept", kept, cfg)
    found, found_cfg = ferrum_jax.load_params(tmp_path / "kept")
    assert found_cfg == cfg
    tiny.assert_same_tree(found, kept)
    narrow, _ = ferrum_jax.load_params(tmp_path / "kept", "bfloat16", quantize="none")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(narrow)} == {dtype, "float32", "bfloat16"}
    other = {"int8": "float8_e4m3fn", "float8_e4m3fn": "int8"}[dtype]
    for refused in {other, *([] if group_size is None else [dtype])}:
        with pytest.raises(ConfigError, match=f"quantize is '{refused}', but 16 weights of .* already .{dtype}"):
            ferrum_jax.load(tmp_path / "kept", quantize=refused, progress=False)
    if group_size is None:
        tiny.assert_same_tree(ferrum_jax.load_params(tmp_path / "kept", quantize=dtype)[0], kept)


@slow
def test_a_converted_model_is_the_quantised_one_and_runs_from_disk(folder: Path, steps: Path, tmp_path: Path):
    made = ferrum_jax.convert(folder, tmp_path / "made", quantize="int8", progress=False)
    tiny.assert_same_tree(ferrum_jax.load_params(made)[0], expected_params("int8"))
    logits = []
    for path, quantize in ((folder, "int8"), (made, None)):
        with ferrum_jax.load(path, engine=ENGINE, quantize=quantize, artifacts=steps, progress=False) as runner:
            logits.append(runner.prefill("a", tiny.prompt(NAME)[:7]))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    "formats",
    [
        3,
        {"x": 3},
        {"x": {"dtype": "int4"}},
        {"x": {"dtype": "int8", "groups": 0}},
        {"model.norm.weight": {"dtype": []}},
    ],
)
def test_a_damaged_list_of_formats_is_refused_by_name(formats: Any, checkpoint: Path, tmp_path: Path):
    fields = json.loads((checkpoint / orbax.CONFIG).read_text(encoding="utf-8"))
    (tmp_path / orbax.CONFIG).write_text(json.dumps(fields | {orbax.QUANTISED: formats}), encoding="utf-8")
    with pytest.raises(InvalidFormatError, match=r"ferrum_config\.json: quantised is not of this version"):
        ferrum_jax.load_params(tmp_path)


@slow
def test_steps_on_disk_are_of_one_way_to_keep_the_weights(folder: Path, tmp_path: Path):
    prompt, places, answers = tiny.prompt(NAME)[:7], [], []
    for quantize, compiled in ((None, 1), ("int8", 1), ("int8", 0), (None, 0)):
        with ferrum_jax.load(
            folder, engine=ENGINE, quantize=quantize, artifacts=tmp_path / "kept", progress=False
        ) as runner:
            answers.append(runner.prefill("a", prompt))
            assert runner.compile_stats()["compiled"] == compiled, quantize
            assert runner.artifacts is not None
            places.append(runner.artifacts.folder.path)
    with ferrum_jax.load(
        folder, engine=ENGINE, quantize="float8_e4m3fn", artifacts=tmp_path / "kept", progress=False
    ) as runner:
        assert runner.artifacts is not None
        places.append(runner.artifacts.folder.path)
    assert len({places[0], places[1], places[4]}) == 3
    assert places[2:4] == [places[1], places[0]]
    np.testing.assert_array_equal(answers[2], answers[1])
    np.testing.assert_array_equal(answers[3], answers[0])
    assert np.abs(answers[1] - answers[0]).max() > 10 * LOGITS


@pytest.mark.parametrize(
    ("dtype", "activations"),
    [("int8", "bfloat16"), *(pytest.param(dtype, activations, marks=slow) for dtype, activations in (
        ("int8", "float32"), ("float8_e4m3fn", "float32"), ("float8_e4m3fn", "bfloat16")))],
)  # fmt: skip
def test_a_quantised_step_lowers_for_cuda_without_a_loop_over_blocks(folder: Path, dtype: str, activations: str):
    source = open_checkpoint(folder)
    params = specs.shapes(param_specs(source, dtype), activations)
    traced = jax.jit(models.forward, static_argnums=2).trace(params, jnp.zeros((1, 5), jnp.int32), source.config)
    texts = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")}
    kind = {"int8": "xi8>", "float8_e4m3fn": "xf8E4M3FN>"}[dtype]
    wide = {"float32": "xf32>", "bfloat16": "xbf16>"}[activations]
    q_proj = f"<{8 * 20}x48"
    assert any(
        f"tensor{q_proj}{kind}" in line and f"tensor{q_proj}{wide}" in line for line in texts["cuda"].splitlines()
    )
    assert texts["cuda"].count("stablehlo.while") < texts["cpu"].count("stablehlo.while")


def test_the_setting_comes_from_an_argument_the_engine_or_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def kept(**settings: Any) -> DataType:
        runner: ModelRunner
        with ferrum_jax.load(folder, **({"engine": ENGINE, "progress": False} | settings)) as runner:
            return runner.model_info().dtype

    assert kept() is DataType.FP32
    assert kept(engine=replace(ENGINE, quantize="int8")) is DataType.INT8
    monkeypatch.setenv("FERRUM_QUANTIZE", "float8_e4m3fn")
    assert kept() is DataType.FP8
    assert kept(quantize="int8") is DataType.INT8
    assert kept(quantize="none") is DataType.FP32
    with pytest.raises(ConfigError, match="quantize is 'int8' as an argument and 'none' in `engine`"):
        kept(quantize="int8", engine=replace(ENGINE, quantize="none"))
    for wrong in ("int4", "INT8", 8, ["int8"]):
        with pytest.raises(ConfigError, match=r"quantize is .*, expected auto, int8, float8_e4m3fn, keep or none"):
            kept(quantize=wrong)
        with pytest.raises(ConfigError, match=r"quantize is .*, expected auto, int8, float8_e4m3fn, keep or none"):
            ferrum_jax.load_params(folder, quantize=wrong)  # pyright: ignore[reportArgumentType]

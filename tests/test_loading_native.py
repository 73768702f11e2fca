"""Weights in the native quantisation of their checkpoint: the same numbers as dequantised, in less memory."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType

import ferrum_jax
from ferrum_jax import EngineConfig, models
from ferrum_jax.contract import DataType
from ferrum_jax.contract.errors import ConfigError, InvalidFormatError, UnsupportedError
from ferrum_jax.loading import open_checkpoint, param_specs, served_specs, with_defaults
from ferrum_jax.models import specs
from ferrum_jax.models.layout import LAYOUTS, lay_out
from ferrum_jax.models.quantisation import Format, formats_of
from ferrum_jax.weights import orbax
from tests import tiny
from tests.weights import test_packed
from tests.weights.scalar_ggml import FORMATS, draw_blocks, read_blocks
from tests.weights.scalar_packings import PACKINGS, write_tensors
from tests.weights.test_gguf import write_gguf

NAME = test_packed.NAME
LOGITS = 1e-4  # the forward's own tolerance: float32 sums in another order
NATIVE = [kind for kind in test_packed.PACKINGS if "ordered" not in kind and kind != "fp8_blocks"]
WIDE = tiny.CONFIGS["llama3"] | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 32,
    "num_hidden_layers": 1,
}  # blocks of 256
ENGINE = EngineConfig(max_seqs=1, kv_capacity=16, block_size=8, decode_rows=(1,), query_blocks=(1,), block_tokens=8)


# One of each layout of words and of plain values; the others differ in what `test_packed` checks.
FEW = ("gptq", "awq", "words_zeros", "int8_zeros", "float_channel")


@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in NATIVE]
)
def test_a_native_weight_stands_for_the_same_numbers(kind: str, tmp_path: Path):
    path = test_packed.write(tmp_path, kind)
    native, cfg = ferrum_jax.load_params(path, "float32", quantize="keep")
    plain, _ = ferrum_jax.load_params(path, "float32")
    if kind == "int8_zeros":  # its scales have all bits of float32, so that offsets are rounded
        for found, leaf in zip(jax.tree.leaves(models.dequantise(native)), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(found, leaf, rtol=0, atol=1e-7)
    else:
        tiny.assert_same_tree(models.dequantise(native), plain)
    assert formats_of(native).keys() == test_packed.contents(kind)[1].keys()
    described = param_specs(open_checkpoint(path), "keep")
    assert specs.shapes(described, "float32") == jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), native
    )
    assert cfg == tiny.model_config(NAME)


@pytest.mark.parametrize("kind", ["gptq", "gptq_ordered", "fp8_blocks"])  # the last two cannot be kept
def test_weights_that_are_served_in_more_bits_than_they_are_stored_are_told(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = test_packed.write(tmp_path, kind)
    sizes: dict[str, Any] = {"max_seqs": 1, "kv_capacity": 64, "device": "cpu", "progress": False}
    for how in ("keep", "none", "auto") if kind == "gptq" else ("none", "auto"):
        ferrum_jax.load(path, attention="xla", quantize=how, **sizes).close()
        assert not caplog.messages
    ferrum_jax.load(path, attention="xla", dtype="bfloat16", **sizes).close()
    told = " ".join(caplog.messages)
    if kind != "gptq":
        assert not told
        return
    assert "quantised weights are dequantised to bfloat16" in told
    assert "quantize='keep', which serves them as they are stored" in told


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq", "int8_zeros"])
def test_a_forward_of_native_weights_equals_that_of_the_dequantised_ones(kind: str, tmp_path: Path):
    path = test_packed.write(tmp_path, kind)
    tokens = jnp.asarray(tiny.prompt(NAME)[:14]).reshape(2, 7)
    (native, cfg), (plain, _) = (ferrum_jax.load_params(path, "float32", quantize=wish) for wish in ("keep", None))
    run = jax.jit(models.forward, static_argnums=2)
    np.testing.assert_allclose(run(native, tokens, cfg), run(plain, tokens, cfg), rtol=0, atol=LOGITS)


def test_only_blocks_that_divide_the_inputs_have_a_native_format(tmp_path: Path):
    narrower = test_packed.write(tmp_path / "narrower", "fp8_blocks")
    message = r"down_proj\.weight has no native format: blocks of 16 do not divide its 72 inputs"
    with pytest.raises(UnsupportedError, match=message):
        ferrum_jax.load_params(narrower, quantize="keep")
    path = test_packed.write(tmp_path / "whole", "fp8_blocks", width=80)
    native, plain = (ferrum_jax.load_params(path, "float32", quantize=wish)[0] for wish in ("keep", None))
    tiny.assert_same_tree(models.dequantise(native), plain)
    assert {(form.dtype, form.groups) for form in formats_of(native).values()} == {
        ("float8_e4m3fn", groups) for groups in (3, 5, 10)
    }


@pytest.mark.parametrize("kind", ["gptq_ordered", "gptq_ordered_v2"])
def test_columns_ordered_by_activation_are_dequantised_but_have_no_native_format(kind: str, tmp_path: Path):
    path = test_packed.write(tmp_path, kind)
    for ask in (lambda: ferrum_jax.load_params(path, quantize="keep"), lambda: ferrum_jax.load(path, quantize="keep")):
        with pytest.raises(UnsupportedError, match=r"has no native format: .*desc_act.*without quantize='keep'"):
            ask()


def test_weights_that_are_called_symmetric_but_are_not_are_refused(tmp_path: Path):
    path = test_packed.write(tmp_path, "gptq_v2", sym=True)
    with pytest.raises(InvalidFormatError, match="zero points are not all 8, though the weights are called symmetric"):
        ferrum_jax.load_params(path, quantize="keep")


MOE = tiny.CONFIGS["qwen3_moe"] | {"hidden_size": 48, "moe_intermediate_size": 72}


def write_experts(path: Path, kind: str, left_out: str | None = None) -> Path:
    """Writes a folder whose experts are packed one by one, but for the tensor `left_out`."""
    tensors = {}
    for name, tensor in tiny.tensors(MOE).items():
        if ".experts." in name and name != left_out:
            parts = PACKINGS[kind].pack(tensor)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": array for part, array in parts.items()}
        else:
            tensors[name] = tensor
    path.mkdir(parents=True)
    config = MOE | {"quantization_config": PACKINGS[kind].config}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tensors(path / "model.safetensors", tensors)
    return path


@pytest.mark.parametrize(
    "kind", ["gptq", *(pytest.param(kind, marks=pytest.mark.slow) for kind in NATIVE if kind != "gptq")]
)
def test_experts_that_are_packed_one_by_one_are_kept_as_a_stack(kind: str, tmp_path: Path):
    path = write_experts(tmp_path / "packed", kind)
    kept, cfg = ferrum_jax.load_params(path, "float32", quantize="keep")
    plain, _ = ferrum_jax.load_params(path, "float32", quantize="none")
    assert len(formats_of(kept)) == 3 * cfg.num_hidden_layers
    for found, leaf in zip(jax.tree.leaves(models.dequantise(kept)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(found, leaf, rtol=0, atol=1e-7)  # offsets of float32 scales are rounded
    prompt = tiny.prompt("qwen3_moe")[:7]
    wanted = np.asarray(jax.jit(models.forward)(plain, jnp.asarray([prompt]), cfg))[0]
    for layout in (None, "checkpoint"):
        with ferrum_jax.load(path, engine=replace(ENGINE, quantize="keep", dtype="float32"), layout=layout) as runner:
            np.testing.assert_allclose(runner.forward_verify("a", prompt), wanted, rtol=0, atol=LOGITS)


def test_experts_of_different_formats_are_dequantised_but_not_kept(tmp_path: Path):
    path = write_experts(tmp_path / "packed", "gptq", "model.layers.0.mlp.experts.1.up_proj.weight")
    kept, cfg = ferrum_jax.load_params(path, "float32", quantize="auto")
    assert len(formats_of(kept)) == 3 * cfg.num_hidden_layers - 1
    message = r"the experts of model\.layers\.0\.mlp\.experts\.up_proj\.weight have different formats"
    with pytest.raises(UnsupportedError, match=message):
        ferrum_jax.load_params(path, quantize="keep")


BLOCKS = ("Q3_K", "Q4_1", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS")


@pytest.mark.parametrize(
    "kind", [kind if kind in BLOCKS else pytest.param(kind, marks=pytest.mark.slow) for kind in FORMATS]
)
def test_a_native_gguf_stands_for_the_numbers_of_its_blocks(kind: str, tmp_path: Path):
    shapes = {name: leaf.shape for name, leaf in tiny.tensors(WIDE).items() if leaf.ndim == 2}
    drawn = {name: draw_blocks(kind, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    raw = {name: (data, GGMLQuantizationType[kind]) for name, data in drawn.items()}
    file = write_gguf(tmp_path / "m.gguf", WIDE, raw=raw)
    (native, _), (plain, _) = (ferrum_jax.load_params(file, "float32", quantize=wish) for wish in ("keep", "none"))
    assert formats_of(native).keys() == shapes.keys()
    found = {name: np.asarray(leaf) for name, leaf in specs.named_leaves(models.dequantise(native)).items()}
    for name, leaf in specs.named_leaves(plain).items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-6, atol=1e-6 * np.abs(leaf).max(), err_msg=name)
    name = test_packed.LEFT_OUT
    expected = read_blocks(kind, drawn[name], shapes[name])
    np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_scales_of_scales_are_saved_and_served(tmp_path: Path):
    shapes = {name: leaf.shape for name, leaf in tiny.tensors(WIDE).items() if leaf.ndim == 2}
    kinds = {name: "Q6_K" if "down_proj" in name else "Q4_K" for name in shapes}
    raw = {
        name: (draw_blocks(kinds[name], shape, 0), GGMLQuantizationType[kinds[name]]) for name, shape in shapes.items()
    }
    file = write_gguf(tmp_path / "m.gguf", WIDE, raw=raw)
    kept, cfg = ferrum_jax.load_params(file, "float32", quantize="keep")
    bits = {name: form.scales for name, form in formats_of(kept).items()}
    assert set(bits.values()) == {Format("int8", columns // 256, "float16") for columns in (256, 512)}
    orbax.save(tmp_path / "saved", kept, cfg)
    tiny.assert_same_tree(ferrum_jax.load_params(tmp_path / "saved", "float32", quantize="keep")[0], kept)
    config = tmp_path / "saved" / orbax.CONFIG
    fields = json.loads(config.read_text())
    fields["quantised"]["model.layers.0.mlp.down_proj.weight"]["scales"]["scales"] = "bfloat16"
    config.write_text(json.dumps(fields))
    with pytest.raises(InvalidFormatError, match=r"weight\.scales\.scales is float16, expected bfloat16"):
        ferrum_jax.load_params(tmp_path / "saved", "float32", quantize="keep")
    prompt = list(range(3, 12))
    wanted = np.asarray(jax.jit(models.forward)(models.dequantise(kept), jnp.asarray([prompt]), cfg))[0]
    atol = 2e-6 * np.abs(wanted).max()  # logits of random blocks reach 139, where XLA's are 1e-4 from float64's
    for layout in LAYOUTS:
        with ferrum_jax.from_params(lay_out(kept, cfg, layout), cfg, engine=ENGINE) as runner:
            np.testing.assert_allclose(runner.forward_verify("a", prompt), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize(("kind", "layout"), [("Q4_1", "fused"), ("Q8_0", "checkpoint")])
def test_on_a_gpu_weights_are_joined_where_they_have_one_format(kind: str, layout: str, tmp_path: Path):
    shapes = {name: leaf.shape for name, leaf in tiny.tensors(WIDE).items() if leaf.ndim == 2}
    kinds = {name: kind if "v_proj" in name else "Q4_1" for name in shapes}
    raw = {
        name: (draw_blocks(kinds[name], shape, 0), GGMLQuantizationType[kinds[name]]) for name, shape in shapes.items()
    }
    source = open_checkpoint(write_gguf(tmp_path / "m.gguf", WIDE, raw=raw))
    gpu: Any = SimpleNamespace(id=0, platform="gpu", device_kind="a GPU", memory_stats=dict)
    kept = with_defaults(EngineConfig(quantize="keep"), source, gpu)
    assert kept.layout == layout
    assert "qkv_proj" in served_specs(source, kept, gpu)["model"]["layers"][0]["self_attn"] or layout == "checkpoint"
    assert with_defaults(EngineConfig(), source, gpu).layout == "fused"  # dequantised


@pytest.mark.slow
def test_a_native_model_is_converted_laid_out_and_served(tmp_path: Path):
    every, prompt = test_packed.write(tmp_path / "whole", "awq", whole=True), tiny.prompt(NAME)[:7]
    expected, cfg = ferrum_jax.load_params(every, "float32", quantize="keep")
    made = ferrum_jax.convert(every, tmp_path / "made", "float32", quantize="keep", progress=False)
    for source in (made, every):
        tiny.assert_same_tree(ferrum_jax.load_params(source, "float32", quantize="keep")[0], expected)
    with pytest.raises(ConfigError, match=r"already \(uint4\): leave it out"):
        ferrum_jax.load(made, quantize="int8")
    with ferrum_jax.load(made, engine=ENGINE, layout="scanned", progress=False) as runner:
        logits = runner.prefill("a", prompt)
        assert runner.model_info().dtype is DataType.INT4
        assert runner.model_info().num_parameters == sum(
            leaf.size for leaf in tiny.tensors(test_packed.CONFIG).values()
        )
        held = runner.memory_usage().allocated_bytes - runner.plan.cache.num_bytes
        assert held == sum(leaf.nbytes for leaf in jax.tree.leaves(expected))
    forward = jax.jit(models.forward, static_argnums=2)
    wanted = forward(models.dequantise(expected), jnp.asarray([prompt]), cfg)[0, -1]
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=LOGITS)


def test_what_no_checkpoint_quantised_stays_as_it_is(tmp_path: Path):
    folder = tiny.write_folder(tmp_path / "plain", tiny.CONFIGS[NAME])
    found, _ = ferrum_jax.load_params(folder, quantize="keep")
    tiny.assert_same_tree(found, tiny.tiny_params(tiny.CONFIGS[NAME]))
    made = ferrum_jax.convert(folder, tmp_path / "made", progress=False)
    tiny.assert_same_tree(ferrum_jax.load_params(made, quantize="keep")[0], found)

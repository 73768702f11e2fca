"""Experts in MXFP4: every number exactly what the specification says, and contradictions refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.contract import DataType
from ferrum_jax.contract.errors import FerrumError, InvalidFormatError
from ferrum_jax.models.quantisation import Format, formats_of
from ferrum_jax.models.specs import named_leaves
from ferrum_jax.ops import native
from ferrum_jax.ops.quantised import QuantisedWeight, dequantise_weight, quantise_weight
from ferrum_jax.weights.codes import decode_stack
from tests import tiny

CONFIG = tiny.CONFIGS["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
PACKING = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
PRODUCTS = ("gate_up_proj", "down_proj")
FIRST = "model.layers.0.mlp.experts.gate_up_proj"
Tensors = dict[str, NDArray[Any]]


def e2m1(code: int) -> float:
    """Reads four bits: a sign, two of an exponent biased by 1, one of a fraction (section 5.3.3)."""
    sign, exponent, fraction = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (0.5 * fraction if exponent == 0 else (1 + 0.5 * fraction) * 2.0 ** (exponent - 1))


def by_hand(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Reads a stack one number at a time, `[E, F, G, 16]` to `[E, F, 32 G]`."""
    experts, outputs, groups, _ = blocks.shape
    found = np.empty((experts, outputs, groups * 32), np.float32)
    for expert, out, group, at in np.ndindex(experts, outputs, groups, 32):
        byte = int(blocks[expert, out, group, at // 2])
        value = e2m1(byte >> 4 if at % 2 else byte & 15)
        found[expert, out, group * 32 + at] = value * 2.0 ** (int(scales[expert, out, group]) - 127)
    return found


def contents() -> tuple[Tensors, Tensors]:
    """Returns the tensors of a folder, and the experts' products that they stand for."""
    tensors, products = tiny.tensors(CONFIG), {}
    rng = np.random.default_rng(5)
    for name in [name for name in tensors if name.endswith(PRODUCTS)]:
        experts, into, out = tensors.pop(name).shape
        blocks = rng.integers(256, size=(experts, out, into // 32, 16)).astype(np.uint8)
        scales = rng.integers(122, 127, size=blocks.shape[:-1]).astype(np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        products[name] = by_hand(blocks, scales)
    return tensors, products


def write(path: Path, change: Callable[[Tensors], object] | None = None) -> Path:
    tensors, _ = contents()
    if change is not None:
        change(tensors)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": PACKING}), encoding="utf-8")
    save_file(tensors, path / "model.safetensors")
    return path


def refuse(path: Path, kind: type[FerrumError] = InvalidFormatError, **options: Any) -> str:
    with pytest.raises(kind) as refusal:
        ferrum_jax.load_params(path, **options)
    assert str(path) in str(refusal.value)
    return str(refusal.value)


def test_every_byte_with_every_scale_is_the_number_it_stands_for():
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 16, 1, 16), (253, 16, 1, 16))
    scales = np.broadcast_to(np.arange(253, dtype=np.uint8)[:, None, None], (253, 16, 1))
    found = decode_stack({"blocks": blocks, "scales": scales})
    np.testing.assert_array_equal(found.astype(np.float32), by_hand(blocks, scales), strict=True)


def test_every_value_with_every_scale_is_kept_as_the_number_it_stands_for():
    """But for the two smallest scales, with which some numbers are below float32's least normal number."""
    codes, scales = np.tile(np.arange(256, dtype=np.uint8), (251, 1)), np.arange(2, 253, dtype=np.uint8)[:, None]
    found = np.asarray(dequantise_weight(QuantisedWeight(codes, scales), "bfloat16"), np.float32)
    numbers = [e2m1(code & 15) for code in range(256)] + [e2m1(code >> 4) for code in range(256)]
    expected = np.array(numbers, np.float32) * np.exp2(scales.astype(np.float32) - 127)
    np.testing.assert_array_equal(found, expected, strict=True)


def test_a_folder_is_read_as_the_numbers_it_stands_for(tmp_path: Path):
    tensors, products = contents()
    params, cfg = ferrum_jax.load_params(write(tmp_path), "float32")
    leaves = named_leaves(params)
    assert {name: leaf.shape for name, leaf in leaves.items()} == {
        name: spec.shape for name, spec in named_leaves(models.family(cfg).param_specs(cfg)).items()
    }
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, products[name] if name in products else tensors[name], err_msg=name)
    narrow, _ = ferrum_jax.load_params(tmp_path, "bfloat16")
    np.testing.assert_array_equal(np.asarray(named_leaves(narrow)[FIRST], np.float32), products[FIRST])


def test_it_gives_the_parameters_of_the_same_numbers_stored_plainly(tmp_path: Path):
    tensors, products = contents()
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    plain |= {name: np.ascontiguousarray(stack.transpose(0, 2, 1)) for name, stack in products.items()}
    folders = write(tmp_path / "packed"), tiny.write_folder(tmp_path / "plain", CONFIG, named=plain)
    (packed, cfg), (stored, other) = (ferrum_jax.load_params(folder, "float32") for folder in folders)
    assert cfg == other
    tiny.assert_same_tree(packed, stored)


@pytest.mark.parametrize("quantize", ["int8", pytest.param(None, marks=pytest.mark.slow)])
def test_it_is_converted_and_quantised_anew(quantize: str | None, tmp_path: Path):
    folder = write(tmp_path / "packed")
    made = ferrum_jax.convert(folder, tmp_path / "made", "float32", progress=False, quantize=quantize)
    found, _ = ferrum_jax.load_params(made, "float32")
    tiny.assert_same_tree(found, ferrum_jax.load_params(folder, "float32", quantize=quantize)[0])
    stack = contents()[1][FIRST]
    leaf = found["model"]["layers"][0]["mlp"]["experts"]["gate_up_proj"]
    expected = stack if quantize is None else quantise_weight(stack, quantize)
    jax.tree.map(np.testing.assert_array_equal, leaf, expected)


@pytest.mark.parametrize("source", ["folder", "Orbax"])
def test_it_is_kept(source: str, tmp_path: Path):
    folder = path = write(tmp_path / "packed")
    if source == "Orbax":
        path = ferrum_jax.convert(folder, tmp_path / "made", "float32", progress=False, quantize="keep")
    kept, cfg = ferrum_jax.load_params(path, "float32", quantize="keep")
    tensors, products = contents()
    assert set(formats_of(kept).values()) == {Format("float4_e2m1fn", groups, "uint8") for groups in (2, 3)}
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(kept["model"]["layers"][0]["mlp"]["experts"]))
    assert held == sum(tensor.nbytes for name, tensor in tensors.items() if "layers.0.mlp.experts" in name)
    read = named_leaves(models.dequantise(kept))
    for name, stack in products.items():
        np.testing.assert_array_equal(read[name], stack, err_msg=name)
    tokens = tiny.prompt("gpt_oss")[:9]
    wanted = np.asarray(jax.jit(models.forward)(models.dequantise(kept), jnp.array([tokens]), cfg))[0]
    wishes: list[dict[str, Any]] = [{}, {"layout": "checkpoint"}, {"attention": "xla"}]
    for options in wishes:
        with ferrum_jax.load(path, "float32", max_seqs=1, kv_capacity=16, quantize="keep", **options) as runner:
            assert set(formats_of(runner.params).values()) == set(formats_of(kept).values())
            assert runner.model_info().dtype is DataType.INT4
            np.testing.assert_allclose(runner.forward_verify("a", tokens), wanted, rtol=0, atol=1e-4)


@pytest.mark.skipif(native.instruction_set() is None, reason="no kernels")
def test_kernels_keep_it_by_default(tmp_path: Path):
    with ferrum_jax.load(write(tmp_path), max_seqs=1, kv_capacity=16) as runner:
        assert {form.dtype for form in formats_of(runner.params).values()} == {"float4_e2m1fn"}


def test_what_contradicts_the_format_is_refused_by_name(tmp_path: Path):
    def narrow(tensors: Tensors) -> None:
        tensors[f"{FIRST}_blocks"] = tensors[f"{FIRST}_blocks"][..., :8]
        down = f"{FIRST.replace('gate_up', 'down')}_scales"
        tensors[down] = tensors[down][:, :-1]

    message = refuse(write(tmp_path, narrow))
    assert f"{FIRST}_blocks has shape [6, 192, 2, 8], expected experts, outputs, groups and 16" in message
    assert "down_proj_scales has shape [6, 63, 3], expected [6, 64, 3]" in message
    assert f"{FIRST}_scales is missing" in refuse(write(tmp_path, lambda tensors: tensors.pop(f"{FIRST}_scales")))
    assert f"{FIRST}_blocks is missing" in refuse(write(tmp_path, lambda tensors: tensors.pop(f"{FIRST}_blocks")))

    def signed(tensors: Tensors) -> None:
        tensors[f"{FIRST}_scales"] = tensors[f"{FIRST}_scales"].astype(np.int8)

    assert f"{FIRST}_scales is I8, expected U8" in refuse(write(tmp_path, signed))

    def fewer(tensors: Tensors) -> None:
        tensors[f"{FIRST}_blocks"] = tensors[f"{FIRST}_blocks"][:, :32].copy()
        tensors[f"{FIRST}_scales"] = tensors[f"{FIRST}_scales"][:, :32].copy()

    assert f"{FIRST} has shape [6, 32, 64], expected [6, 192, 64]" in refuse(write(tmp_path, fewer))

    def unreal(tensors: Tensors) -> None:
        tensors[f"{FIRST}_scales"][2, 3, 1] = 255

    assert f"{FIRST}: a scale is 255, at most 252 has finite numbers" in refuse(write(tmp_path, unreal))

    def none(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(("_blocks", "_scales"))]:
            del tensors[name]

    assert "says mxfp4, but no tensor's name ends in '_blocks'" in refuse(write(tmp_path, none))

"""Quantised Hugging Face folders: every number exactly what its format says, and contradictions refused by name."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax.contract.errors import ConfigError, FerrumError, InvalidFormatError, UnsupportedError
from ferrum_jax.models.layout import lay_out
from ferrum_jax.models.specs import named_leaves
from tests import tiny
from tests.weights.scalar_packings import PACKINGS, Matrix, Parts, write_tensors

NAME = "qwen3_window_biases"
CONFIG = tiny.CONFIGS[NAME]
Q = "model.layers.1.self_attn.q_proj"
LEFT_OUT = "model.layers.0.mlp.down_proj.weight"
Tensors = dict[str, np.ndarray]

every_packing = pytest.mark.parametrize("kind", PACKINGS)


def is_packed(name: str) -> bool:
    """Products of layers are; embeddings and head are not."""
    return ".layers." in name and name.endswith("_proj.weight")


@functools.cache
def contents(
    kind: str, whole: bool = False, width: int = CONFIG["intermediate_size"]
) -> tuple[Tensors, dict[str, Parts]]:
    """Returns the tensors left as they are, a product and a layer among them unless `whole`, and the quantised ones."""
    drawn = tiny.tensors(CONFIG | {"intermediate_size": width})
    names = [name for name in drawn if is_packed(name) and (whole or not (name == LEFT_OUT or ".layers.2." in name))]
    packed = {name: PACKINGS[kind].pack(drawn[name]) for name in names}
    return {name: tensor for name, tensor in drawn.items() if name not in packed}, packed


def write(
    path: Path,
    kind: str,
    change: Callable[[Tensors], object] | None = None,
    *,
    whole: bool = False,
    width: int = CONFIG["intermediate_size"],
    **settings: Any,
) -> Path:
    """Writes a folder of the tensors of `contents`, changed by `change`; `settings` are those of its packing."""
    plain, packed = contents(kind, whole, width)
    tensors = plain | {
        f"{name.removesuffix('.weight')}.{part}": tensor
        for name, parts in packed.items()
        for part, tensor in parts.items()
    }
    if change is not None:
        change(tensors := {name: tensor.copy() for name, tensor in tensors.items()})
    path.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"intermediate_size": width, "quantization_config": PACKINGS[kind].config | settings}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tensors(path / "model.safetensors", tensors)
    return path


def refuse(path: Path, kind: type[FerrumError] = InvalidFormatError) -> str:
    with pytest.raises(kind) as refusal:
        ferrum_jax.load_params(path)
    assert str(path) in str(refusal.value)
    return str(refusal.value)


@every_packing
def test_a_packed_weight_is_read_as_the_numbers_it_stands_for(kind: str, tmp_path: Path):
    plain, packed = contents(kind)
    params, cfg = ferrum_jax.load_params(write(tmp_path, kind), "float32")
    assert cfg == tiny.model_config(NAME)
    leaves = named_leaves(params)
    assert leaves.keys() == plain.keys() | packed.keys()
    for name, leaf in leaves.items():
        expected = PACKINGS[kind].read(packed[name]) if name in packed else plain[name]
        np.testing.assert_array_equal(leaf, expected, err_msg=name, strict=True)


@pytest.mark.parametrize("is_packed_too", [False, True])
def test_a_head_of_its_own_beside_packed_weights_unties_the_model(is_packed_too: bool, tmp_path: Path):
    kind = "int8"
    head = PACKINGS[kind].pack(contents(kind)[0]["lm_head.weight"])

    def pack_head(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        tensors |= {f"lm_head.{part}": tensor for part, tensor in head.items()}

    path = write(tmp_path, kind, pack_head if is_packed_too else None, ignore=[])
    fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}), encoding="utf-8")
    params, cfg = ferrum_jax.load_params(path, "float32")
    assert cfg == tiny.model_config(NAME)
    expected = PACKINGS[kind].read(head) if is_packed_too else contents(kind)[0]["lm_head.weight"]
    np.testing.assert_array_equal(params["lm_head"]["weight"], expected, strict=True)


@pytest.mark.parametrize(
    ("weights", "block"),
    [
        ({"strategy": "tensor"}, (200, 200)),
        ({"strategy": "block", "block_structure": [16, 24]}, (16, 24)),
        ({"strategy": "block", "block_structure": [1, 32]}, (1, 32)),  # the last 16 of 48 inputs are a block, too
    ],
)
@pytest.mark.parametrize("quantize", ["none", "auto"])
def test_scales_and_zero_points_of_a_tensor_or_of_blocks_belong_to_all_their_numbers(
    weights: dict[str, Any], block: tuple[int, int], quantize: str, tmp_path: Path
):
    """compressed-tensors packs the zero points of groups and channels alone, these stay int8."""
    kind, expected = "words_channel", {}

    def change(tensors: Tensors) -> None:
        for name, parts in contents(kind)[1].items():
            module, unit = name.removesuffix(".weight"), parts | {"weight_scale": np.ones_like(parts["weight_scale"])}
            codes, draw = PACKINGS[kind].read(unit), np.random.RandomState(len(name))
            counts = [-(-size // part) for size, part in zip(codes.shape, block, strict=True)]
            scales, zeros = draw.randint(1, 8, counts) / np.float32(8), draw.randint(-8, 8, counts).astype(np.int8)
            whole = np.s_[: codes.shape[0], : codes.shape[1]]
            wide, shift = (np.kron(part, np.ones(block))[whole] for part in (scales, zeros))
            expected[name] = ((codes - shift) * wide).astype(np.float32)
            stored = (-1,) if weights["strategy"] == "tensor" else counts
            tensors[f"{module}.weight_scale"] = scales.astype(np.float32).reshape(stored)
            tensors[f"{module}.weight_zero_point"] = zeros.reshape(stored)

    group = {"weights": {"num_bits": 4, "type": "int", "symmetric": False} | weights}
    params, _ = ferrum_jax.load_params(
        write(tmp_path, kind, change, config_groups={"group_0": group}), "float32", quantize=quantize
    )
    leaves = named_leaves(ferrum_jax.models.dequantise(params))
    for name, numbers in expected.items():
        np.testing.assert_allclose(leaves[name], numbers, rtol=1e-6, atol=1e-6, err_msg=name)


@every_packing
def test_a_packed_weight_is_near_what_it_was_made_of(kind: str):
    weight = tiny.seeded_tensor(3, "any.weight", (40, 48))
    found: Matrix = PACKINGS[kind].read(PACKINGS[kind].pack(weight))
    error = float(np.sqrt(((found - weight) ** 2).mean() / (weight**2).mean()))
    assert 0 < error < PACKINGS[kind].error


@pytest.mark.parametrize("kind", ["gptq_ordered", "fp8_blocks"])
def test_a_packed_weight_is_rounded_once_to_the_dtype_asked_for(kind: str, tmp_path: Path):
    _, packed = contents(kind)
    params, _ = ferrum_jax.load_params(write(tmp_path, kind), "bfloat16")
    leaf = named_leaves(params)[f"{Q}.weight"]
    expected = PACKINGS[kind].read(packed[f"{Q}.weight"]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(leaf), expected, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["scanned", "checkpoint"])
def test_a_packed_model_may_be_quantised_anew_and_laid_out(layout: str, tmp_path: Path):
    path = write(tmp_path, "awq")
    params, cfg = ferrum_jax.load_params(path)
    expected = lay_out(ferrum_jax.models.quantise(params, cfg, "int8"), cfg, layout)
    tiny.assert_same_tree(ferrum_jax.load_params(path, quantize="int8", layout=layout)[0], expected)


def test_zero_points_of_the_first_gptq_wrap_as_they_were_written(tmp_path: Path):
    """A zero point of 0 was stored as 15, one of 8 as 7."""

    def change(tensors: Tensors) -> None:
        tensors[f"{Q}.qzeros"][:] = -1  # 15 in every place
        tensors[f"{Q}.qweight"][:] = 0x33333333

    params, _ = ferrum_jax.load_params(write(tmp_path, "gptq", change, sym=False), "float32")
    scales = contents("gptq")[1][f"{Q}.weight"]["scales"].astype(np.float32)
    np.testing.assert_array_equal(named_leaves(params)[f"{Q}.weight"], 3 * np.repeat(scales.T, 8, axis=1))


@pytest.mark.parametrize("kind", ["gptq", "fp8_blocks"])
def test_what_other_engines_add_is_left_unread(kind: str, tmp_path: Path):
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(72, np.float16)
        tensors[f"{Q}.input_scale"] = np.ones(1, np.float32)
        for name in ("k_scale", "kv_scale", "k_zero_point", "v_zero_point", "q_zero_point", "k_proj.output_zero_point"):
            tensors[f"model.layers.0.self_attn.{name}"] = np.ones(1, np.float32)

    params, _ = ferrum_jax.load_params(write(tmp_path, kind, change))
    assert "model.layers.0.mlp.up_proj.bias" not in named_leaves(params)
    path = write(tmp_path, kind, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": np.ones(72, "f2")}))
    assert "model.layers.0.mlp.up_proj.bias is unknown" in refuse(path)


PART = {"gptq": "scales", "awq": "qzeros", "words": "weight_shape", "words_zeros": "weight_zero_point",
        "int8": "weight_scale", "fp8_blocks": "weight_scale_inv"}  # fmt: skip


@pytest.mark.parametrize(("kind", "part"), PART.items())
def test_a_part_that_is_missing_or_wrong_is_refused_by_name(kind: str, part: str, tmp_path: Path):
    said = {"weight_scale_inv": "weight_scale"}.get(part, part)
    assert f"{Q}.{said} is missing" in refuse(write(tmp_path, kind, lambda tensors: tensors.pop(f"{Q}.{part}")))

    def wrong(tensors: Tensors) -> None:
        tensors[f"{Q}.{part}"] = np.concatenate([tensors[f"{Q}.{part}"]] * 2)

    assert f"{Q}.{said} has shape [" in refuse(write(tmp_path, kind, wrong))

    def other(tensors: Tensors) -> None:
        tensors[f"{Q}.{part}"] = tensors[f"{Q}.{part}"].astype(ml_dtypes.float8_e4m3fn)

    assert f"{Q}.{said} is F8_E4M3, expected" in refuse(write(tmp_path, kind, other))


@pytest.mark.parametrize(("kind", "part"), [("gptq", "qweight"), ("awq", "qweight"), ("words", "weight_packed")])
def test_values_that_are_missing_are_said_to_be(kind: str, part: str, tmp_path: Path):
    assert f"{Q}.{part} is missing" in refuse(write(tmp_path, kind, lambda tensors: tensors.pop(f"{Q}.{part}")))


@pytest.mark.parametrize(
    ("kind", "part"), [("fp8_blocks", "weight_scale_inv"), ("int8", "weight_scale"), ("awq", "scales")]
)
def test_a_scale_that_is_not_finite_is_refused(kind: str, part: str, tmp_path: Path):
    def damage(tensors: Tensors) -> None:
        tensors[f"{Q}.{part}"].reshape(-1)[0] = np.nan

    assert f"{Q}.weight: a scale is not a finite number" in refuse(write(tmp_path, kind, damage))


def test_a_configuration_that_contradicts_the_tensors_is_refused(tmp_path: Path):
    assert "groups of 7 do not divide" in refuse(write(tmp_path, "gptq", group_size=7))
    first = "model.layers.0.mlp.gate_proj"
    assert f"{first}.scales has shape [6, 72], expected [3, 72]" in refuse(write(tmp_path, "awq", group_size=16))
    assert "no module has a tensor 'qweight'" in refuse(write(tmp_path, "words", **PACKINGS["gptq"].config))
    assert "weight is F8_E4M3, expected I8" in refuse(write(tmp_path, "float_channel", **PACKINGS["int8"].config))
    assert f"{first}.qzeros has shape [6, 18], expected [12, 9]" in refuse(write(tmp_path, "gptq_8", bits=4))
    assert f"{first}.weight: columns of a group do not follow" in refuse(
        write(tmp_path, "gptq_ordered", desc_act=False)
    )
    assert f"{Q}.g_idx is missing" in refuse(write(tmp_path, "gptq_ordered", lambda t: t.pop(f"{Q}.g_idx")))

    def far(tensors: Tensors) -> None:
        tensors[f"{Q}.g_idx"][3] = 6

    assert "columns are in groups 0 to 6, there are 6" in refuse(write(tmp_path, "gptq_ordered", far))

    def unsaid(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = np.ones(48, np.int8)

    assert "model.norm.weight is I8, supported are F64" in refuse(write(tmp_path, "awq", unsaid), UnsupportedError)


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"quant_method": "bitsandbytes"}, "bitsandbytes is not supported"),
    ("gptq", {"quant_method": "quip"}, "quant_method 'quip', supported are gptq of 4 or 8 bits, awq"),
    ("gptq", {"quant_method": None}, "quant_method None, supported are"),
    ("gptq", {"bits": 3}, "gptq: bits is 3, supported are 4 and 8"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not implemented, only gptq and gptq_v2"),
    ("gptq", {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
    ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic settings of single modules"),
    ("awq", {"version": "gemv"}, "version 'gemv' is not implemented, only gemm is"),
    ("words", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not implemented, only pack-quant"),
    ("words", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "only dense weights are"),
    ("words", {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
    ("fp8_blocks", {"fmt": "e5m2"}, "fmt 'e5m2' is not implemented"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), UNSUPPORTED)
def test_a_format_that_is_not_implemented_is_refused_and_says_what_is(
    kind: str, settings: dict[str, Any], message: str, tmp_path: Path
):
    assert message in refuse(write(tmp_path, kind, **settings), UnsupportedError)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("gptq", {"bits": True}, "bits is True, expected an integer of at least 1"),
        ("gptq", {"bits": "4"}, "bits is '4', expected an integer of at least 1"),
        ("gptq", {"group_size": 0}, "group_size, where not -1 for all, is 0, expected an integer of at least 1"),
        ("gptq", {"group_size": None}, "group_size, where not -1 for all, is None, expected an integer of at least 1"),
        ("gptq", {"sym": "yes"}, "sym is 'yes', expected True or False"),
        ("words", {"config_groups": {}}, "config_groups is {}, expected at least one group"),
        ("words", {"config_groups": {"a": {"weights": None}}}, "a of config_groups has no settings of weights"),
        ("fp8_blocks", {"weight_block_size": [128]}, "weight_block_size is [128], expected outputs and inputs"),
        ("fp8_blocks", {"weight_block_size": "128x128"}, "weight_block_size is '128x128', expected outputs and inputs"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_name(
    kind: str, settings: dict[str, Any], message: str, tmp_path: Path
):
    assert message in refuse(write(tmp_path, kind, **settings), ConfigError)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": 3}), encoding="utf-8")
    assert "quantization_config is 3, expected an object" in refuse(tmp_path, ConfigError)

"""The published configurations have the number of parameters that their checkpoints have."""

import json
from pathlib import Path

import pytest

from ferrum_jax.contract.errors import ConfigError, UnsupportedError
from ferrum_jax.models.quantisation import Format, quantised_specs
from ferrum_jax.models.specs import ParamSpec, named_leaves, num_bytes, num_parameters
from ferrum_jax.planning.subject import CONFIGURATIONS, read_subject
from ferrum_jax.planning.work import numbers_of
from tests import tiny


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("deepseek-v3", 671_026_419_200),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_a_model_has_as_many_parameters_as_its_checkpoint(name: str, count: int):
    assert num_parameters(read_subject(name, "bfloat16").specs) == count


def test_a_model_is_read_in_what_load_makes_of_it():
    for name in ("Llama-3.1-8B", "deepseek-v3"):  # the second is published in fp8
        plain = read_subject(name)
        assert (plain.weights, plain.dtype, plain.formats) == ("bfloat16", "bfloat16", {})
    deepseek = read_subject("deepseek-v3", "float8_e4m3fn")
    assert (deepseek.weights, deepseek.dtype) == ("float8_e4m3fn", "bfloat16")
    leaves = named_leaves(deepseek.specs)
    assert leaves["model.layers.9.mlp.experts.down_proj.weight.values"].dtype == "float8_e4m3fn"
    assert leaves["model.layers.9.mlp.experts.down_proj.weight.scales"].shape == (256, 7168, 1)
    assert read_subject("llama-3.1-8b", "int8").weights == "int8"
    oss = read_subject("gpt-oss-20b", "mxfp4")
    assert {name.rpartition(".")[2] for name in oss.formats} == {"gate_up_proj", "down_proj"}
    assert set(oss.formats.values()) == {Format("float4_e2m1fn", 90, "uint8")}
    assert num_bytes(oss.specs, oss.dtype) == 13_761_264_768  # of all tensors of the published checkpoint


def test_numbers_of_a_packed_weight_are_in_its_values_alone():
    plain = {"w": ParamSpec((4, 256), ("heads", "embed"))}
    counted = Format("int8", 1, "float16")
    leaves = named_leaves(quantised_specs(plain, {"w": Format("uint6", 8, counted, counted)}))
    assert len(leaves) == 6
    assert {name: numbers_of(name, spec) for name, spec in leaves.items() if numbers_of(name, spec)} == {
        "w.values": 1024
    }


def test_a_folder_and_its_configuration_are_the_same_model(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIGS["qwen3"]))
    assert read_subject(str(tmp_path)) == read_subject(str(tmp_path / "config.json"))
    assert read_subject(str(tmp_path)).cfg == tiny.model_config("qwen3")


def test_what_is_no_model_or_dtype_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"dtype is mxfp4, but llama-3.1-8b has no experts whose inputs 32 divides"):
        read_subject("llama-3.1-8b", "mxfp4")
    with pytest.raises(ConfigError, match=r"nowhere is no file or folder, and known names are llama-3.1-8b"):
        read_subject("nowhere")
    for other in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(UnsupportedError, match=r"has no config\.json"):
            read_subject(str(other))
    for dtype in ("float32", "int3"):
        with pytest.raises(
            ConfigError, match=f"dtype is '{dtype}', expected float16, bfloat16, int8, float8_e4m3fn or mxfp4"
        ):
            read_subject("llama-3.1-8b", dtype)
    for name in ("quantization_config", "compression_config"):  # the second of earlier compressed-tensors
        packed = CONFIGURATIONS["qwen3-8b"] | {name: {"quant_method": "gptq", "bits": 4, "group_size": 64}}
        (tmp_path / "config.json").write_text(json.dumps(packed))
        assert read_subject(str(tmp_path)).weights == "bfloat16"
        assert read_subject(str(tmp_path), "int8").weights == "int8"

"""GGUF files: every type of tensor, every architecture, and what is refused."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import FerrumError, InvalidFormatError, NotFoundError, UnsupportedError
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import named_leaves
from ferrum_jax.weights.gguf import DEQUANTISED, GgufSource
from tests import tiny
from tests.long import SEED
from tests.weights import scalar_ggml

MODULES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
WHOLE_BLOCKS = tiny.CONFIGS["qwen2_tied"] | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
QUANTISED = "model.layers.0.mlp.down_proj.weight"
Raw = Mapping[str, tuple[NDArray[Any], GGMLQuantizationType]]


def gguf_name(name: str) -> str:
    module, leaf = name.rsplit(".", 1)
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{leaf}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{MODULES[part]}.{leaf}"


def interleave(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Moves row H/2·a + b of every head to 2·b + a, as llama.cpp's conversion of Llama's q and k does."""
    width = len(weight) // num_heads
    moved = np.empty_like(weight)
    for head in range(num_heads):
        for row in range(width):
            a, b = divmod(row, width // 2)
            moved[head * width + 2 * b + a] = weight[head * width + row]
    return moved


def open_writer(path: Path, config: Mapping[str, Any], architecture: str) -> GGUFWriter:
    cfg = ModelConfig.from_hf(config)
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(cfg.max_position_embeddings)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_block_count(cfg.num_hidden_layers)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_attention_heads)
    writer.add_head_count_kv(cfg.num_key_value_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    writer.add_rope_freq_base(cfg.rope_theta)
    return writer


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    *,
    architecture: str | None = None,
    raw: Raw | None = None,
    extra: Mapping[str, NDArray[Any]] | None = None,
    without: tuple[str, ...] = (),
    yarn: tuple[float, int] | None = None,
    window: int | None = None,
    split_tensors: int = 0,
) -> Path:
    """Writes the tiny model of `config`; `raw` gives tensors as they are stored, by their Hugging Face names."""
    cfg = ModelConfig.from_hf(config)
    architecture = architecture or str(config["model_type"])
    writer = open_writer(path, config, architecture)
    writer.split_max_tensors = split_tensors  # of each part; 0: it is not split
    if yarn:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(yarn[0])
        writer.add_rope_scaling_orig_ctx_len(yarn[1])
    if window:
        writer.add_sliding_window(window)
    for name, tensor in tiny.tensors(config).items():
        if name in without:
            continue
        if raw and name in raw:
            data, kind = raw[name]
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
            continue
        if architecture == "llama" and ".q_proj." in name:
            tensor = interleave(tensor, cfg.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = interleave(tensor, cfg.num_key_value_heads)
        writer.add_tensor(gguf_name(name), tensor)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def refuse(path: Path, kind: type[FerrumError] = FerrumError) -> str:
    """Demands that loading is refused before a tensor is read, by a message that names the file; gives the message."""
    not_read = patch("gguf.quants.dequantize", side_effect=AssertionError("a tensor was read"))
    with not_read, pytest.raises(kind) as refusal:
        ferrum_jax.load_params(path)
    assert str(path) in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("name", ["llama2", "llama3", "llama_biases", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied"])
def test_every_architecture_gives_the_tensors_and_the_configuration_of_the_folder(name: str, tmp_path: Path):
    config = tiny.CONFIGS[name]
    params, cfg = ferrum_jax.load_params(write_gguf(tmp_path / "model.gguf", config))
    expected = ModelConfig.from_hf(config)
    assert {**vars(cfg), "rms_norm_eps": 0} == {**vars(expected), "rms_norm_eps": 0}
    assert cfg.rms_norm_eps == pytest.approx(expected.rms_norm_eps, rel=1e-6)
    tiny.assert_same_tree(params, tiny.tiny_params(config))


@pytest.mark.parametrize("name", ["llama_biases", "qwen2"])
@pytest.mark.parametrize("biased", [True, False])
def test_the_output_projection_has_a_bias_where_the_file_has_one(name: str, biased: bool, tmp_path: Path):
    config = tiny.CONFIGS[name] | {"mlp_bias": False}
    named = tiny.tensors(config)
    out = [f"model.layers.{i}.self_attn.o_proj.bias" for i in range(config["num_hidden_layers"])]
    if biased:
        named |= {key: tiny.seeded_tensor(tiny.SEED, key, (config["hidden_size"],)) for key in out}
    extra = {gguf_name(key): named[key] for key in out} if biased and name == "qwen2" else {}
    path = write_gguf(tmp_path / "model.gguf", config, extra=extra, without=() if biased else tuple(out))
    params, cfg = ferrum_jax.load_params(path)
    assert (cfg.attention_bias, cfg.attention_out_bias) == (True, biased)
    found = named_leaves(params)
    assert [key in found for key in out] == [biased] * len(out)
    for key in out if biased else ():
        np.testing.assert_array_equal(found[key], named[key])


def test_a_llama_file_with_a_window_is_a_mistral(tmp_path: Path):
    config = tiny.CONFIGS["mistral"]
    path = write_gguf(tmp_path / "model.gguf", config, architecture="llama", window=config["sliding_window"])
    params, cfg = ferrum_jax.load_params(path)
    assert cfg.layer_windows == (7, 7, 7)
    tiny.assert_same_tree(params, tiny.tiny_params(config))


def test_rope_freqs_become_the_llama3_scaling(tmp_path: Path):
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = tiny.CONFIGS["llama3"] | {"rope_scaling": {"rope_type": "llama3", **scaling}}
    divisors = np.array([1, 1, 1, 1, 1, 3.29226, 32, 32, 32, 32], np.float32)  # as llama.cpp computes them
    path = write_gguf(tmp_path / "model.gguf", config, extra={"rope_freqs.weight": divisors})
    params, cfg = ferrum_jax.load_params(path)
    assert cfg.rope_scaling == ModelConfig.from_hf(config).rope_scaling
    tiny.assert_same_tree(params, tiny.tiny_params(config))


def test_rope_freqs_of_another_scaling_are_refused(tmp_path: Path):
    divisors = np.linspace(1, 9, 10, dtype=np.float32)
    path = write_gguf(tmp_path / "model.gguf", tiny.CONFIGS["llama3"], extra={"rope_freqs.weight": divisors})
    assert "rope_freqs.weight" in refuse(path, UnsupportedError)
    for count in (0, 7, 64):
        extra = {"rope_freqs.weight": np.ones(count, np.float32)}
        path = write_gguf(tmp_path / f"{count}.gguf", tiny.CONFIGS["llama3"], extra=extra)
        assert f"rope_freqs.weight has {count} factors, heads have 10 pairs" in refuse(path)


@pytest.mark.parametrize("tensor", ["rope_freqs.weight", "rope_factors_long.weight"])
def test_factors_beside_another_scaling_are_refused(tensor: str, tmp_path: Path):
    extra = {tensor: np.ones(10, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", tiny.CONFIGS["llama3"], extra=extra, yarn=(4.0, tiny.ORIGINAL))
    said = f"llama.rope.scaling.type yarn with the factor 4.0 is not implemented beside {tensor}"
    assert said in refuse(path, UnsupportedError)


@pytest.mark.parametrize("name", ["qwen25_yarn", "qwen3_yarn", "llama_yarn"])
def test_yarn_settings_are_read(name: str, tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", tiny.CONFIGS[name], yarn=(4.0, tiny.ORIGINAL))
    assert ferrum_jax.load_params(path)[1].rope_scaling == tiny.model_config(name).rope_scaling


@pytest.mark.parametrize("kind", scalar_ggml.FORMATS)
def test_every_quantised_type_is_read_as_its_format_says(kind: str, tmp_path: Path):
    shape = (256, 512)
    data = scalar_ggml.draw_blocks(kind, shape, seed=4)
    raw = {QUANTISED: (data, GGMLQuantizationType[kind])}
    params, _ = ferrum_jax.load_params(write_gguf(tmp_path / "model.gguf", WHOLE_BLOCKS, raw=raw), dtype="float32")
    found = named_leaves(params)[QUANTISED]
    expected = scalar_ggml.read_blocks(kind, data, shape)
    # ggml rounds scale times number to float32 before it adds, the scalar reading does not.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * float(np.abs(expected).max()))


@pytest.mark.parametrize("kind", DEQUANTISED)
def test_other_types_are_read_as_the_package_gguf_reads_them_and_never_kept(kind: str, tmp_path: Path):
    shape, own = (256, 512), GGMLQuantizationType[kind]
    size, num_bytes = GGML_QUANT_SIZES[own]
    data = np.random.default_rng(4).integers(0, 60, (shape[0], shape[1] // size * num_bytes)).astype(np.uint8)
    path = write_gguf(tmp_path / "model.gguf", WHOLE_BLOCKS, raw={QUANTISED: (data, own)})
    for wish in ("none", "keep"):
        params, _ = ferrum_jax.load_params(path, dtype="float32", quantize=wish)
        np.testing.assert_array_equal(named_leaves(params)[QUANTISED], dequantize(data, own).reshape(shape))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_every_plain_type_is_read_exactly(kind: str, tmp_path: Path):
    narrow = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}[kind]
    tensor = tiny.tensors(WHOLE_BLOCKS)[QUANTISED].astype(narrow)
    stored = tensor.view(np.uint8) if kind == "BF16" else tensor
    raw = {QUANTISED: (stored, GGMLQuantizationType[kind])}
    path = write_gguf(tmp_path / "model.gguf", WHOLE_BLOCKS, raw=raw)
    params, _ = ferrum_jax.load_params(path, dtype="float32")
    np.testing.assert_array_equal(named_leaves(params)[QUANTISED], tensor.astype(np.float32), strict=True)
    source = GgufSource(path)
    assert not np.shares_memory(source.read(QUANTISED), source.read(QUANTISED))  # nor with the mapped file


def test_a_type_that_is_not_supported_is_refused_by_name(tmp_path: Path):
    data = np.zeros((256, 512 // 256 * 292), np.uint8)
    raw = {QUANTISED: (data, GGMLQuantizationType.Q8_K)}
    message = refuse(write_gguf(tmp_path / "model.gguf", WHOLE_BLOCKS, raw=raw), UnsupportedError)
    assert "blk.0.ffn_down.weight" in message
    assert "Q8_K" in message


def test_an_architecture_that_is_not_supported_is_refused_by_name(tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", tiny.CONFIGS["llama3"], architecture="gemma")
    assert "architecture 'gemma', supported are gemma2," in refuse(path, UnsupportedError)


def write_split(folder: Path, **options: Any) -> list[Path]:
    """Writes the tiny Llama in parts of ten tensors, and returns their paths."""
    write_gguf(folder / "model.gguf", tiny.CONFIGS["llama3"], split_tensors=10, **options)
    return sorted(folder.glob("model-*.gguf"))


def test_a_split_file_is_read_from_its_first_part(tmp_path: Path):
    (tmp_path / "whole").mkdir()
    whole = write_gguf(tmp_path / "whole" / "model.gguf", tiny.CONFIGS["llama3"])
    parts = write_split(tmp_path)
    assert len(parts) > 2
    found, cfg = ferrum_jax.load_params(parts[0], "float32")
    expected, own = ferrum_jax.load_params(whole, "float32")
    tiny.assert_same_tree(found, expected)
    assert cfg == own


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path):
    parts = write_split(tmp_path)
    told = "give the first, whose name ends in -00001-of-0000"
    assert told in refuse(parts[1])
    (tmp_path / "renamed.gguf").write_bytes(parts[0].read_bytes())
    assert told in refuse(tmp_path / "renamed.gguf")
    (other := tmp_path / "second").mkdir()
    (other / parts[0].name).write_bytes(parts[1].read_bytes())
    assert told in refuse(other / parts[0].name)
    last = parts[-1].read_bytes()
    parts[-1].write_bytes(parts[1].read_bytes())
    with pytest.raises(InvalidFormatError, match=f"is part 2 of {len(parts)}, expected {len(parts)} of {len(parts)}"):
        ferrum_jax.load_params(parts[0])
    parts[-1].unlink()
    with pytest.raises(NotFoundError, match=parts[-1].name):
        ferrum_jax.load_params(parts[0])
    parts[-1].write_bytes(last)
    ferrum_jax.load_params(parts[0])
    (tmp_path / "other").mkdir()
    others = write_split(tmp_path / "other", without=("model.norm.weight",))  # in the last part
    parts[-1].write_bytes(others[-1].read_bytes())
    assert "and its other parts have" in refuse(parts[0], InvalidFormatError)


def test_what_is_wrong_with_a_later_part_is_said_of_that_part(tmp_path: Path):
    parts = write_split(tmp_path)
    parts[1].write_bytes(parts[1].read_bytes()[:-50])
    with pytest.raises(InvalidFormatError, match=f"^{parts[1]} is not a whole GGUF file"):
        ferrum_jax.load_params(parts[0])
    twice = GGUFWriter(parts[1], "llama")
    twice.add_uint16("split.no", 1)
    twice.add_uint16("split.count", len(parts))
    twice.add_tensor("token_embd.weight", np.full((3, 4), 7, np.float32))
    finish(twice)
    assert "token_embd.weight more than once" in refuse(parts[0], InvalidFormatError)


def test_parts_may_be_named_in_capitals(tmp_path: Path):
    parts = write_split(tmp_path)
    expected, _ = ferrum_jax.load_params(parts[0], "float32")
    first, *_ = [part.rename(part.with_name(part.name.upper())) for part in parts]
    found, _ = ferrum_jax.load_params(first, "float32")
    tiny.assert_same_tree(found, expected)


def test_experts_of_an_architecture_that_has_none_are_refused(tmp_path: Path):
    writer = open_writer(tmp_path / "model.gguf", tiny.CONFIGS["qwen3"], "qwen3")
    writer.add_expert_count(8)
    writer.add_tensor("token_embd.weight", tiny.tensors(tiny.CONFIGS["llama3"])["model.embed_tokens.weight"])
    finish(writer)
    with pytest.raises(UnsupportedError, match="num_experts"):
        ferrum_jax.load_params(tmp_path / "model.gguf")


def test_missing_and_unknown_tensors_are_refused_by_name(tmp_path: Path):
    config = tiny.CONFIGS["qwen3"]
    missing = write_gguf(tmp_path / "a.gguf", config, without=("model.layers.1.self_attn.k_norm.weight",))
    assert "model.layers.1.self_attn.k_norm.weight is missing" in refuse(missing)
    unknown = write_gguf(tmp_path / "b.gguf", config, extra={"blk.0.stranger.weight": np.ones(3, np.float32)})
    assert "blk.0.stranger.weight is unknown" in refuse(unknown)
    bare = write_gguf(tmp_path / "c.gguf", config, without=("model.embed_tokens.weight",))
    assert "token_embd.weight" in refuse(bare)


def test_a_wrong_shape_is_refused_by_name(tmp_path: Path):
    name = "model.layers.2.mlp.up_proj.weight"
    raw = {name: (np.zeros((48, 72), np.float32), GGMLQuantizationType.F32)}
    message = refuse(write_gguf(tmp_path / "model.gguf", tiny.CONFIGS["qwen3"], raw=raw))
    assert f"{name} has shape [48, 72], expected [72, 48]" in message
    raw = {name: (np.zeros((72, 0), np.uint8), GGMLQuantizationType.Q4_1)}
    path = write_gguf(tmp_path / "empty.gguf", tiny.CONFIGS["qwen3"], raw=raw)
    for quantize in ("none", "keep", "auto"):
        with pytest.raises(InvalidFormatError, match=r"up_proj\.weight has shape \[72, 0\], expected \[72, 48\]"):
            ferrum_jax.load_params(path, quantize=quantize)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.02, 0.5, 0.999])
def test_a_file_that_was_cut_is_refused_by_name(share: float, tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", tiny.CONFIGS["llama3"])
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    refuse(path, InvalidFormatError)


def test_the_real_file_cut_in_half_is_refused_before_anything_is_read(smollm2_path: Path, tmp_path: Path):
    path = tmp_path / "model.gguf"
    with smollm2_path.open("rb") as file:
        path.write_bytes(file.read(smollm2_path.stat().st_size // 2))
    refuse(path, InvalidFormatError)


def test_a_file_that_is_something_else_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "model.gguf"
    for content in (b"", b"GGUF", b"hello, world" * 100, bytes(4096)):
        path.write_bytes(content)
        refuse(path, InvalidFormatError)
    with pytest.raises(NotFoundError):
        GgufSource(tmp_path / "none.gguf")


def test_an_array_that_claims_to_be_longer_than_the_file_is_refused(tmp_path: Path):
    writer = open_writer(tmp_path / "model.gguf", tiny.CONFIGS["llama3"], "llama")
    writer.add_array("tiny.numbers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    damaged = bytearray((tmp_path / "model.gguf").read_bytes())
    count_at = damaged.index(b"tiny.numbers") + len(b"tiny.numbers") + 8  # behind the types of the value and its items
    assert int.from_bytes(damaged[count_at : count_at + 8], "little") == 3
    damaged[count_at : count_at + 8] = (2**40).to_bytes(8, "little")
    (tmp_path / "model.gguf").write_bytes(damaged)
    message = refuse(tmp_path / "model.gguf", InvalidFormatError)
    assert f"it ends at byte {len(damaged)}, byte " in message  # by its claim, which nothing has counted to


def test_arrays_that_are_nested_deeply_are_refused(tmp_path: Path):
    key, array, number = b"tiny.nested", (9).to_bytes(4, "little"), (4).to_bytes(4, "little")  # ggml's numbers of types
    one = (1).to_bytes(8, "little")
    content = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + one  # version, tensors, fields
    content += len(key).to_bytes(8, "little") + key + array + (array + one) * 2000 + number + one + bytes(4)
    (tmp_path / "model.gguf").write_bytes(content)
    assert "nested too deeply" in refuse(tmp_path / "model.gguf", InvalidFormatError)


@pytest.mark.parametrize("blocks", [9999, 10**9])
def test_more_layers_than_any_model_has_are_refused_at_once(blocks: int, tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", tiny.CONFIGS["llama3"])
    damaged = bytearray(path.read_bytes())
    at = damaged.index(b"llama.block_count") + len(b"llama.block_count") + 4  # behind the type
    damaged[at : at + 4] = blocks.to_bytes(4, "little")
    path.write_bytes(damaged)
    assert "expected at most 1000" in refuse(path, FerrumError)


def test_a_pipe_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "model.gguf")
    assert "no regular file" in refuse(tmp_path / "model.gguf", InvalidFormatError)


@pytest.mark.parametrize(("times", "seed"), [(100, 5), pytest.param(2000, None, marks=pytest.mark.slow)])
def test_corrupted_headers_are_refused_or_describe_a_whole_model(times: int, seed: int | None, tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", tiny.CONFIGS["llama3"])
    whole = path.read_bytes()
    header = len(whole) - sum(-(-tensor.nbytes // 32) * 32 for tensor in tiny.tensors(tiny.CONFIGS["llama3"]).values())
    refused = 0
    for damaged in tiny.damaged(whole, header, times=times, seed=SEED if seed is None else seed):
        path.write_bytes(damaged)
        try:
            params, cfg = ferrum_jax.load_params(path)
        except FerrumError:
            refused += 1
            continue
        wanted = named_leaves(family(cfg).param_specs(cfg))
        assert {name: leaf.shape for name, leaf in named_leaves(params).items()} == {
            name: spec.shape for name, spec in wanted.items()
        }, f"seed {seed or SEED}"
    assert refused > 0.9 * times

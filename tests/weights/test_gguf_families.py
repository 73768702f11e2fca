"""GGUF files of every family, written as llama.cpp's conversion writes them, give what the folder gives."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax.config import ModelConfig
from ferrum_jax.config.rope import RopeScaling
from ferrum_jax.contract.errors import UnsupportedError
from tests import tiny
from tests.weights.test_gguf import interleave, open_writer, refuse

Tensors = dict[str, NDArray[np.float32]]

PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps", "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}  # fmt: skip
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
SANDWICH = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INTERLEAVED = ("llama", "granite", "smollm3")
ARCHITECTURES = {"gemma3": "gemma3", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
CHANGES: dict[str, dict[str, Any]] = {  # what a file of the family cannot say is as llama.cpp has it
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3": {"query_pre_attn_scalar": 20, "sliding_window_pattern": 3, "rope_local_base_freq": 10000.0},
    "qwen2_moe": {"mlp_only_layers": [], "use_sliding_window": False},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
}
FAMILIES = ("gemma2", "gemma3", "granite", "mixtral", "olmo2", "phi3", "phi3_short", "qwen2_moe", "qwen3_moe",
            "smollm3")  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return tiny.CONFIGS[name] | CHANGES.get(name, {})


def architecture_of(name: str) -> str:
    return ARCHITECTURES.get(name, name.split("_")[0] if name.startswith("phi3") else name)


def converted(name: str, tensors: Mapping[str, NDArray[np.float32]]) -> Tensors:
    """Renames and changes the tensors of a folder as the conversion does."""
    cfg, architecture, found = ModelConfig.from_hf(config_of(name)), architecture_of(name), {}
    for key, tensor in stacked(tensors).items():
        module, leaf = key.rsplit(".", 1)
        if architecture in INTERLEAVED and module.endswith(("q_proj", "k_proj")):
            heads = cfg.num_attention_heads if module.endswith("q_proj") else cfg.num_key_value_heads
            tensor = interleave(tensor, heads)
        if architecture.startswith("gemma") and module.endswith("norm"):
            tensor = tensor + 1
        if module.endswith("shared_expert_gate"):
            tensor = tensor[0]
        found[f"{renamed(module, architecture)}.{leaf}"] = tensor
    return found


def renamed(module: str, architecture: str) -> str:
    if module in OUTSIDE:
        return OUTSIDE[module]
    _, _, layer, part = module.split(".", 3)
    norms = SANDWICH if architecture.startswith(("gemma", "olmo")) else NORMS
    return f"blk.{layer}.{(PARTS | norms)[part]}"


def stacked(tensors: Mapping[str, NDArray[np.float32]]) -> Tensors:
    found: dict[str, Any] = {}
    for key, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", key):
            found.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            found[key] = tensor
    return {
        key: np.stack([one[index] for index in sorted(one)]) if isinstance(one, dict) else one
        for key, one in found.items()
    }


def write_family(path: Path, name: str, *, settings: Mapping[str, Any] | None = None) -> Path:
    config, architecture = config_of(name), architecture_of(name)
    writer = open_writer(path, config, architecture)
    _describe(writer, config, architecture)
    for key, value in (settings or {}).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for key, tensor in converted(name, tiny.tensors(config)).items():
        writer.add_tensor(key, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: GGUFWriter, config: Mapping[str, Any], architecture: str) -> None:
    cfg = ModelConfig.from_hf(config)
    if cfg.experts is not None:
        writer.add_expert_count(cfg.experts.num_experts)
        writer.add_expert_used_count(cfg.experts.num_experts_per_tok)
    if architecture.startswith("gemma") or config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"])
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "phi3":
        writer.add_rope_dimension_count(int(cfg.head_dim * config.get("partial_rotary_factor", 1.0)))
        if scaling := config.get("rope_scaling"):
            original = config["original_max_position_embeddings"]
            ratio = config["max_position_embeddings"] / original
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(ratio) / np.log(original))))
            for length in ("long", "short"):
                writer.add_tensor(f"rope_factors_{length}.weight", np.array(scaling[f"{length}_factor"], np.float32))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_gives_the_tensors_and_the_configuration_of_the_folder(name: str, tmp_path: Path):
    config = config_of(name)
    params, cfg = ferrum_jax.load_params(write_family(tmp_path / "model.gguf", name))
    expected = ModelConfig.from_hf(config)
    assert vars(cfg).keys() == vars(expected).keys()
    for key, value in vars(expected).items():
        found = getattr(cfg, key)
        if isinstance(value, float):
            assert found == pytest.approx(value, rel=1e-6), key
        elif key == "rope_scaling" and value is not None:
            _assert_same_scaling(found, value, expected.max_position_embeddings)
        else:
            assert found == value, key
    tiny.assert_same_tree(params, tiny.tiny_params(config))


def _assert_same_scaling(found: RopeScaling, expected: RopeScaling, longest: int) -> None:
    """A file says the factor of attention, which a folder leaves to the formula, and its numbers are float32."""
    if expected.rope_type == "longrope":
        original = expected.original_max_position_embeddings
        assert original is not None
        factor = np.sqrt(1 + np.log(longest / original) / np.log(original))
        expected = dataclasses.replace(expected, attention_factor=float(factor))
    for key, value in dataclasses.asdict(expected).items():
        is_number = isinstance(value, (int, float, tuple)) and not isinstance(value, bool)
        assert getattr(found, key) == (pytest.approx(value, rel=1e-6) if is_number else value), key


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_the_largest_gemma_divides_queries_by_its_share_of_the_width(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    layers = {"gemma2": 46, "gemma3": 62}[name]
    monkeypatch.setitem(CHANGES, name, CHANGES[name] | {"num_hidden_layers": layers, "query_pre_attn_scalar": 48 / 8})
    _, cfg = ferrum_jax.load_params(write_family(tmp_path / "model.gguf", name))
    assert cfg.attention_multiplier == pytest.approx(6**-0.5)


def test_settings_that_change_the_arithmetic_and_are_not_implemented_are_refused(tmp_path: Path):
    olmo = write_family(tmp_path / "olmo.gguf", "olmo2", settings={"attention.sliding_window": 7})
    assert "which OLMo 3 has" in refuse(olmo, UnsupportedError)
    gemma = write_family(tmp_path / "gemma.gguf", "gemma2", settings={"rope.dimension_count": 10})
    assert "gemma2.rope.dimension_count is 10, heads have 20" in refuse(gemma, UnsupportedError)


def test_quantised_experts_are_not_kept(tmp_path: Path):
    config = tiny.CONFIGS["qwen3_moe"] | {"hidden_size": 64, "moe_intermediate_size": 32}
    path = tmp_path / "model.gguf"
    writer = open_writer(path, config, "qwen3moe")
    _describe(writer, config, "qwen3moe")
    for key, tensor in converted("qwen3_moe", tiny.tensors(config)).items():
        if key.endswith("_exps.weight"):
            blocks = np.zeros((*tensor.shape[:2], tensor.shape[2] // 32 * 34), np.uint8)
            writer.add_tensor(key, blocks, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(key, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    params, _ = ferrum_jax.load_params(path)
    assert not params["model"]["layers"][0]["mlp"]["experts"]["gate_proj"]["weight"].any()
    with pytest.raises(UnsupportedError, match=r"experts, such as .*, cannot be kept quantised"):
        ferrum_jax.load_params(path, quantize="keep")

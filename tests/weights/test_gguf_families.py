"""GGUF files of every family, written as llama.cpp's conversion writes them, give what the folder gives."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.config import ModelConfig, RopeScaling
from ferrum_jax.contract.errors import InvalidFormatError, UnsupportedError
from ferrum_jax.models.quantisation import formats_of
from ferrum_jax.models.specs import named_leaves
from ferrum_jax.ops import native
from ferrum_jax.weights.gguf import GgufSource
from tests import tiny
from tests.weights.scalar_ggml import draw_blocks, read_blocks
from tests.weights.test_gguf import finish, interleave, open_writer, refuse

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
    "block_sparse_moe.experts.w2": "ffn_down_exps", "mlp.router": "ffn_gate_inp",
}  # fmt: skip
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
SANDWICH = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INTERLEAVED = ("llama", "granite", "smollm3")
ARCHITECTURES = {
    "gemma3": "gemma3", "gpt_oss": "gpt-oss", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {  # what a file of the family cannot say is as llama.cpp has it
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3": {"query_pre_attn_scalar": 20, "sliding_window_pattern": 3, "rope_local_base_freq": 10000.0},
    "gpt_oss": {"swiglu_limit": 7.0},
    "qwen2_moe": {"mlp_only_layers": [], "use_sliding_window": False},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
}
FAMILIES = ("gemma2", "gemma3", "gpt_oss", "granite", "mixtral", "olmo2", "phi3", "phi3_short", "qwen2_moe",
            "qwen3_moe", "smollm3")  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return tiny.CONFIGS[name] | CHANGES.get(name, {})


def architecture_of(name: str) -> str:
    return ARCHITECTURES.get(name, name.split("_")[0] if name.startswith("phi3") else name)


def converted(name: str, tensors: Mapping[str, NDArray[np.float32]]) -> Tensors:
    """Renames and changes the tensors of a folder as the conversion does."""
    cfg, architecture, found = ModelConfig.from_hf(config_of(name)), architecture_of(name), {}
    for key, tensor in stacked(tensors).items():
        module, leaf = key.rsplit(".", 1)
        if leaf == "sinks":
            found[f"blk.{key.split('.')[2]}.attn_sinks.weight"] = tensor
            continue
        if name == "gpt_oss" and module.endswith("experts"):
            found |= _gpt_oss_experts(f"blk.{key.split('.')[2]}", leaf, tensor)
            continue
        if architecture in INTERLEAVED and module.endswith(("q_proj", "k_proj")):
            heads = cfg.num_attention_heads if module.endswith("q_proj") else cfg.num_key_value_heads
            tensor = interleave(tensor, heads)
        if architecture.startswith("gemma") and module.endswith("norm"):
            tensor = tensor + 1
        if module.endswith("shared_expert_gate"):
            tensor = tensor[0]
        found[f"{renamed(module, architecture)}.{leaf}"] = tensor
    return found


def _gpt_oss_experts(block: str, leaf: str, tensor: NDArray[np.float32]) -> Tensors:
    """Turns a stack `[E, in, out]`, and takes the gate's rows and those of up apart, which alternate in a folder."""
    kind = "bias" if leaf.endswith("_bias") else "weight"
    rows = tensor if kind == "bias" else np.ascontiguousarray(tensor.transpose(0, 2, 1))
    if leaf.startswith("down"):
        return {f"{block}.ffn_down_exps.{kind}": rows}
    return {
        f"{block}.ffn_{part}_exps.{kind}": np.ascontiguousarray(rows[:, at::2])
        for at, part in enumerate(("gate", "up"))
    }


def renamed(module: str, architecture: str) -> str:
    if module in OUTSIDE:
        return OUTSIDE[module]
    _, _, layer, part = module.split(".", 3)
    norms = SANDWICH if architecture.startswith(("gemma", "olmo", "gpt-oss")) else NORMS
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


def write_family(
    path: Path,
    name: str,
    *,
    settings: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    change: Callable[[Tensors], Tensors] = dict,
) -> Path:
    """Writes a file; `settings` are further fields or others, a field in `without` is left out."""
    config, architecture = config_of(name), architecture_of(name)
    writer = open_writer(path, config, architecture)
    _describe(writer, config, architecture)
    for key in (*(settings or {}), *without):
        for fields in writer.kv_data:
            fields.pop(f"{architecture}.{key}", None)
    for key, value in (settings or {}).items():
        _add(writer, f"{architecture}.{key}", value)
    for key, tensor in change(converted(name, tiny.tensors(config))).items():
        writer.add_tensor(key, tensor)
    finish(writer)
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Adds a field of whatever type it is."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _describe(writer: GGUFWriter, config: Mapping[str, Any], architecture: str) -> None:
    cfg = ModelConfig.from_hf(config)
    if cfg.experts is not None:
        writer.add_expert_count(cfg.experts.num_experts)
        writer.add_expert_used_count(cfg.experts.num_experts_per_tok)
    if architecture.startswith("gemma") or config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    elif architecture == "phi3":  # by which Phi-4 says that it has none
        writer.add_sliding_window(0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"])
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    if architecture == "gpt-oss":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
        writer.add_rope_scaling_orig_ctx_len(config["rope_scaling"]["original_max_position_embeddings"])
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
    cfg = GgufSource(write_family(tmp_path / "model.gguf", name)).config
    assert cfg.attention_multiplier == pytest.approx(6**-0.5)


def as_three_dimensions(tensors: Tensors) -> Tensors:
    return {key: tensor[None] if "gate_inp_shexp" in key else tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("granite", {"settings": {"attention.head_count_kv": [2, 2, 2], "feed_forward_length": [72] * 3}}),
        ("gemma3", {"settings": {"attention.sliding_window_pattern": [True, True, False]}}),
        ("qwen3_moe", {"settings": {"feed_forward_length": 0, "expert_feed_forward_length": 28}}),
        ("qwen3_moe", {"settings": {"expert_feed_forward_length": 28}, "without": ("feed_forward_length",)}),
        ("qwen2_moe", {"change": as_three_dimensions}),
        (
            "mixtral",
            {"settings": {"attention.sliding_window": 0, "attention.causal": True, "expert_weights_norm": True}},
        ),
    ],
)
def test_other_ways_of_writing_a_file_give_the_same(name: str, how: dict[str, Any], tmp_path: Path):
    params, cfg = ferrum_jax.load_params(write_family(tmp_path / "model.gguf", name, **how))
    _, plain = ferrum_jax.load_params(write_family(tmp_path / "plain.gguf", name))
    unused = {"intermediate_size": plain.intermediate_size} if name == "qwen3_moe" else {}
    assert dataclasses.replace(cfg, **unused) == plain
    tiny.assert_same_tree(params, tiny.tiny_params(config_of(name)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
             "rope.scaling.attn_factor": 1.7, "rope.scaling.yarn_attn_factor": 0.9, "rope.scaling.yarn_beta_fast": 3.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 3.0,
             "attention_factor": 1.7 * (0.1 * math.log(4) + 1)},
        ),
    ],
)  # fmt: skip
def test_a_scaling_of_rope_is_read_in_every_spelling(settings: dict, expected: dict, tmp_path: Path):
    _, cfg = ferrum_jax.load_params(write_family(tmp_path / "model.gguf", "smollm3", settings=settings))
    assert cfg.rope_scaling is not None
    for key, value in expected.items():
        assert getattr(cfg.rope_scaling, key) == (pytest.approx(value) if isinstance(value, float) else value), key


def test_what_llama_cpp_takes_for_a_missing_field_is_taken(tmp_path: Path):
    _, granite = ferrum_jax.load_params(write_family(tmp_path / "a.gguf", "granite", without=("attention.scale",)))
    assert granite.attention_multiplier == 6**-0.5
    _, gemma = ferrum_jax.load_params(
        write_family(tmp_path / "b.gguf", "gemma3", settings={"attention.sliding_window": 0})
    )
    assert gemma.layer_windows == (None, None, None)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("olmo2", {"attention.sliding_window": 7}, "which OLMo 3 has"),
        ("gemma2", {"rope.dimension_count": 10}, "gemma2.rope.dimension_count is 10, heads have 20"),
        (
            "granite",
            {"attention.head_count_kv": [2, 2, 1]},
            "granite.attention.head_count_kv differs from layer to layer",
        ),
        ("granite", {"rope.scaling.finetuned": False}, "without rotary embeddings"),
        ("smollm3", {"attention.causal": False}, "smollm3.attention.causal = False is not implemented"),
        ("smollm3", {"rope.scaling.type": "longrope"}, "no tensors rope_factors_long"),
        ("smollm3", {"rope.scaling.attn_factor": 1.5}, "attn_factor = 1.5 is not implemented for rope.scaling"),
        ("smollm3", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5"),
        ("olmo2", {"embedding_scale": 2.0}, "olmo2.embedding_scale = 2.0"),
        ("qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func = 2"),
        ("mixtral", {"expert_weights_norm": False}, "expert_weights_norm = False"),
    ],
)
def test_what_changes_the_arithmetic_and_is_not_implemented_is_refused(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
):
    path = write_family(tmp_path / "model.gguf", name, settings=settings)
    assert message in refuse(path, UnsupportedError)


def test_experts_in_the_form_of_old_are_refused_by_name(tmp_path: Path):
    def apart(tensors: Tensors) -> Tensors:
        return {"blk.0.ffn_gate.0.weight": np.zeros((72, 48), np.float32), **tensors}

    path = write_family(tmp_path / "model.gguf", "mixtral", change=apart)
    assert "experts are stored one by one" in refuse(path, UnsupportedError)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("qwen3_moe", ("Q8_0", "Q8_0")), ("qwen3_moe", ("Q4_K", "Q6_K")), ("gpt_oss", ("MXFP4", "MXFP4"))],
    ids=["one format", "Q4_K_M", "MXFP4"],
)
def test_quantised_experts_are_kept(name: str, kinds: tuple[str, str], tmp_path: Path):
    config = config_of(name) | {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256}
    path, drawn, architecture = tmp_path / "model.gguf", {}, architecture_of(name)
    writer = open_writer(path, config, architecture)
    _describe(writer, config, architecture)
    for seed, (key, tensor) in enumerate(converted(name, tiny.tensors(config)).items()):
        if key.endswith("_exps.weight"):
            kind = kinds["down" in key]
            experts, rows, columns = tensor.shape
            blocks = draw_blocks(kind, (experts * rows, columns), seed)
            drawn[key] = kind, blocks, tensor.shape
            writer.add_tensor(key, blocks.reshape(experts, rows, -1), raw_dtype=GGMLQuantizationType[kind])
        else:
            writer.add_tensor(key, tensor)
    finish(writer)
    kept, cfg = ferrum_jax.load_params(path, "float32", quantize="keep")
    plain, _ = ferrum_jax.load_params(path, "float32", quantize="none")
    of_a_layer = 2 if name == "gpt_oss" else 3  # its gate and up are one parameter
    assert len(formats_of(kept)) == of_a_layer * cfg.num_hidden_layers
    assert len(drawn) == 3 * cfg.num_hidden_layers
    read = named_leaves(models.dequantise(kept))
    for key, leaf in named_leaves(plain).items():
        np.testing.assert_allclose(read[key], leaf, rtol=1e-6, atol=1e-6 * np.abs(leaf).max(), err_msg=key)
    experts = read[f"model.layers.1.mlp.experts.down_proj{'.weight' * (name != 'gpt_oss')}"]
    kind, blocks, shape = drawn["blk.1.ffn_down_exps.weight"]
    expected = read_blocks(kind, blocks, (shape[0] * shape[1], shape[2])).reshape(shape)
    np.testing.assert_allclose(experts, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    run, tokens = jax.jit(models.forward, static_argnums=2), jnp.array([[3, 1, 4, 1, 5, 9]])
    wanted = run(plain, tokens, cfg)
    np.testing.assert_allclose(run(kept, tokens, cfg), wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    wishes: list[dict[str, Any]] = [{}, {"attention": "xla", "quantize": "keep"}]  # kernels keep by default
    for options in wishes:
        with ferrum_jax.load(path, max_seqs=2, kv_capacity=16, dtype="float32", **options) as runner:
            assert formats_of(runner.params) or not (options or native.instruction_set())
            found = runner.forward_verify("a", tokens[0].tolist())
            np.testing.assert_allclose(found, wanted[0], rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_gate_and_up_of_different_types_are_each_read_as_their_own(tmp_path: Path):
    path = tmp_path / "model.gguf"
    writer = open_writer(path, config_of("gpt_oss"), "gpt-oss")
    _describe(writer, config_of("gpt_oss"), "gpt-oss")
    for key, tensor in converted("gpt_oss", tiny.tensors(config_of("gpt_oss"))).items():
        writer.add_tensor(key, tensor.astype(np.float16) if "ffn_up_exps.weight" in key else tensor)
    finish(writer)
    params, _ = ferrum_jax.load_params(path, "float32")
    wanted = tiny.tiny_params(config_of("gpt_oss"))["model"]["layers"][0]["mlp"]["experts"]["gate_up_proj"]
    found = params["model"]["layers"][0]["mlp"]["experts"]["gate_up_proj"]
    np.testing.assert_array_equal(found[:, ::2], wanted[:, ::2])
    np.testing.assert_array_equal(found[:, 1::2], wanted[:, 1::2].astype(np.float16))


def test_a_damaged_stack_of_gpt_oss_is_refused_by_name(tmp_path: Path):
    def fewer(tensors: Tensors) -> Tensors:
        return tensors | {"blk.0.ffn_up_exps.weight": tensors["blk.0.ffn_up_exps.weight"][:3]}

    def flat(tensors: Tensors) -> Tensors:
        return tensors | {"blk.1.ffn_gate_exps.bias": tensors["blk.1.ffn_gate_exps.bias"].ravel()}

    for change, name in (
        (fewer, "blk.0.ffn_up_exps.weight has shape [3, "),
        (flat, "blk.1.ffn_gate_exps.bias has shape ["),
    ):
        with pytest.raises(InvalidFormatError, match=f"{re.escape(name)}.*expected stacks of one shape"):
            GgufSource(write_family(tmp_path / "model.gguf", "gpt_oss", change=change))
    config = config_of("gpt_oss") | {"hidden_size": 64, "intermediate_size": 64}
    writer = open_writer(tmp_path / "nan.gguf", config, "gpt-oss")
    _describe(writer, config, "gpt-oss")
    for key, tensor in converted("gpt_oss", tiny.tensors(config)).items():
        if key == "blk.0.ffn_down_exps.weight":
            experts, rows, columns = tensor.shape
            blocks = draw_blocks("MXFP4", (experts * rows, columns), 0)
            blocks[5, 17] = 255
            writer.add_tensor(key, blocks.reshape(experts, rows, -1), raw_dtype=GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(key, tensor)
    finish(writer)
    for quantize in ("none", "keep"):
        message = r"ffn_down_exps\.weight cannot be read: a scale is 255, at most 252"
        with pytest.raises(InvalidFormatError, match=message):
            ferrum_jax.load_params(tmp_path / "nan.gguf", quantize=quantize)


def test_a_mixed_stack_has_no_native_format(tmp_path: Path):
    config = config_of("gpt_oss") | {"hidden_size": 64, "intermediate_size": 64}
    writer = open_writer(tmp_path / "model.gguf", config, "gpt-oss")
    _describe(writer, config, "gpt-oss")
    for key, tensor in converted("gpt_oss", tiny.tensors(config)).items():
        kind = {"blk.0.ffn_up_exps.weight": "MXFP4", "blk.0.ffn_gate_exps.weight": "Q4_0"}.get(key)
        if kind is not None:
            experts, rows, columns = tensor.shape
            blocks = draw_blocks(kind, (experts * rows, columns), 0).reshape(experts, rows, -1)
            writer.add_tensor(key, blocks, raw_dtype=GGMLQuantizationType[kind])
        else:
            writer.add_tensor(key, tensor)
    finish(writer)
    assert formats_of(ferrum_jax.load_params(tmp_path / "model.gguf", "float32", quantize="auto")[0]) == {}
    with pytest.raises(
        UnsupportedError, match=r"gate_up_proj is made of tensors in MXFP4 and Q4_0, which have no native"
    ):
        ferrum_jax.load_params(tmp_path / "model.gguf", quantize="keep")

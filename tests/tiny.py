"""Tiny models of every family: configurations as in `config.json`, and weights out of a seed and a tensor's name.

All dimensions of a configuration differ, so that a swapped axis cannot hide. The weights are drawn so that logits are
of the order of one and attention is neither flat nor a single peak: RoPE, windows and biases then all show in them.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ferrum_jax.config import ModelConfig
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamSpec, ParamTree, from_names, named_leaves
from ferrum_jax.weights.assemble import specs_apart, stored_apart, stored_axes

Tensors = dict[str, NDArray[np.float32]]

SEED = 7
LENGTH = 45  # tokens of a prompt: more than any window below and than any original context
LONG = 300  # tokens: more than a query block of attention (256) and than two KV blocks of the forward without a cache
ORIGINAL = 16  # positions
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONG_FACTOR = [2.0, 7.0, 5.0]
NULLS = (  # settings whose null differs from their absence
    "sliding_window", "q_lora_rank", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def _config(model_type: str, **settings: Any) -> dict[str, Any]:
    base = {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "hidden_act": "silu",
        "max_position_embeddings": 160,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return {name: value for name, value in (base | settings).items() if value is not None or name in NULLS}


def _qwen2(**settings: Any) -> dict[str, Any]:  # its head width is always hidden_size / num_attention_heads
    return _config("qwen2", **({"head_dim": None, "sliding_window": 7} | settings))


def _gemma(model_type: str, **settings: Any) -> dict[str, Any]:
    own = {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 11}
    return _config(model_type, **(own | {"sliding_window": 7, "tie_word_embeddings": True} | settings))


def _phi3(**settings: Any) -> dict[str, Any]:
    return _config("phi3", **({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | settings))


def _moe(model_type: str, **settings: Any) -> dict[str, Any]:
    experts = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "norm_topk_prob": False}
    return _config(model_type, **(experts | settings))


def _gpt_oss(**settings: Any) -> dict[str, Any]:
    experts = {"num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 0.9}
    return _config("gpt_oss", **(experts | {"sliding_window": 7} | settings))


def _deepseek(model_type: str, **settings: Any) -> dict[str, Any]:
    latent = {"kv_lora_rank": 18, "qk_nope_head_dim": 14, "qk_rope_head_dim": 6, "v_head_dim": 10, "q_lora_rank": 26}
    experts = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 28}
    own = {"head_dim": None, "num_key_value_heads": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
    return _config(model_type, **(latent | experts | own | settings))


CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": _config("llama", head_dim=None, num_key_value_heads=None),
    "llama3": _config("llama", rope_theta=500000.0),
    "llama31": _config("llama", rope_theta=5000.0, rope_scaling={"rope_type": "llama3", **LLAMA3}),
    "llama32_tied": _config(
        "llama", tie_word_embeddings=True, rope_parameters={"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3}
    ),
    "llama_linear": _config("llama", max_position_embeddings=20, rope_scaling={"type": "linear", "factor": 2.5}),
    "llama_linear_tied": _config(
        "llama",
        tie_word_embeddings=True,
        max_position_embeddings=20,
        rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 300.0},
    ),
    "llama_yarn": _config("llama", rope_theta=200.0, rope_scaling={"type": "yarn", **YARN}),
    "llama_yarn_options": _config(
        "llama",
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 200.0,
            "attention_factor": 1.3,
            "beta_fast": 3.0,
            "beta_slow": 0.4,
            "truncate": False,
            **YARN,
        },
    ),
    "llama_yarn_mscale": _config(
        "llama",
        rope_parameters={"rope_type": "yarn", "rope_theta": 200.0, "mscale": 1.5, "mscale_all_dim": 0.6, **YARN},
    ),
    "llama_biases": _config("llama", attention_bias=True, mlp_bias=True),
    "llama_long": _config("llama", rope_theta=1000.0, max_position_embeddings=320),
    "mistral": _config("mistral", sliding_window=7),
    "ministral": _config(
        "ministral", sliding_window=7, layer_types=["full_attention", "sliding_attention", "full_attention"]
    ),
    "mistral_full_tied": _config("mistral", sliding_window=None, tie_word_embeddings=True),
    "mistral_yarn": _config(
        "mistral", sliding_window=11, rope_parameters={"rope_type": "yarn", "rope_theta": 200.0, **YARN}
    ),
    "mistral_long_tied": _config(
        "mistral", sliding_window=37, tie_word_embeddings=True, rope_theta=1000.0, max_position_embeddings=320
    ),
    "qwen2": _qwen2(use_sliding_window=False),
    "qwen2_tied": _qwen2(tie_word_embeddings=True, rope_theta=1000000.0),
    "qwen2_window": _qwen2(use_sliding_window=True, max_window_layers=1),
    "qwen2_window_tied": _qwen2(use_sliding_window=True, max_window_layers=0, tie_word_embeddings=True),
    "qwen2_layer_types": _qwen2(
        use_sliding_window=True, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "qwen25_yarn": _qwen2(rope_theta=200.0, rope_scaling={"type": "yarn", **YARN}),
    "qwen3": _config("qwen3"),
    "qwen3_tied": _config("qwen3", tie_word_embeddings=True, rope_parameters={"rope_theta": 300.0}),
    "qwen3_window_biases": _config(
        "qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=2, attention_bias=True
    ),
    "qwen3_yarn": _config("qwen3", rope_theta=200.0, rope_scaling={"rope_type": "yarn", **YARN}),
    "qwen3_llama3": _config("qwen3", rope_scaling={"rope_type": "llama3", **LLAMA3}),
    "phi3": _phi3(rope_theta=300.0, sliding_window=11),
    "phi3_short": _phi3(
        rope_scaling={"type": "longrope", "short_factor": [1.3, 1.0, 2.0], "long_factor": LONG_FACTOR},
        partial_rotary_factor=0.5,
        num_attention_heads=4,
        head_dim=None,
        max_position_embeddings=384,
        original_max_position_embeddings=200,
    ),
    "phi3_beyond": _phi3(
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 50.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.3, 1.0, 2.0],
            "long_factor": LONG_FACTOR,
        },
        original_max_position_embeddings=ORIGINAL,
        tie_word_embeddings=True,
        num_attention_heads=4,
        head_dim=None,
    ),
    "olmo2": _config("olmo2", rope_theta=300.0),
    "olmo2_biases": _config(
        "olmo2",
        attention_bias=True,
        tie_word_embeddings=True,
        rope_scaling={"rope_type": "yarn", **YARN},
        num_key_value_heads=None,
    ),
    "olmo3": _config(
        "olmo3", rope_theta=500000.0, sliding_window=7, num_hidden_layers=4, rope_scaling={"rope_type": "yarn", **YARN}
    ),
    "olmo3_rope_by_kind": _config(
        "olmo3",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
        },
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "granite": _config(
        "granite",
        embedding_multiplier=3.0,
        attention_multiplier=0.4,
        residual_multiplier=0.7,
        logits_scaling=1.5,
        rope_theta=300.0,
        head_dim=None,
    ),
    "granite_biases_tied": _config(
        "granite",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        attention_multiplier=0.3,
        logits_scaling=0.8,
        head_dim=None,
    ),
    "smollm3": _config("smollm3", rope_theta=300.0, no_rope_layer_interval=2, pad_token_id=0),
    "smollm3_window_biases": _config(
        "smollm3",
        attention_bias=True,
        mlp_bias=True,
        no_rope_layers=[0, 1, 1],
        use_sliding_window=True,
        sliding_window=7,
        rope_scaling={"rope_type": "linear", "factor": 2.5},
        pad_token_id=0,
        tie_word_embeddings=True,
    ),
    "gemma": _config("gemma", hidden_act="gelu", rope_theta=300.0, tie_word_embeddings=True),
    "gemma_biases": _config(
        "gemma",
        hidden_act="gelu_pytorch_tanh",
        attention_bias=True,
        tie_word_embeddings=False,
        rope_scaling={"rope_type": "yarn", **YARN},
    ),
    "gemma2": _gemma("gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=1.5),
    "gemma2_biases": _gemma(
        "gemma2",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "yarn", "rope_theta": 200.0, **YARN},
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "gemma3": _gemma(
        "gemma3_text",
        rope_theta=500.0,
        rope_local_base_freq=40.0,
        rope_scaling={"rope_type": "linear", "factor": 2.5},
        sliding_window_pattern=3,
    ),
    "gemma3_rope_by_kind": _gemma(
        "gemma3_text",
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "rope_theta": 200.0, **YARN},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        final_logit_softcapping=2.0,
        tie_word_embeddings=False,
    ),
    "mixtral": _config("mixtral", num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "qwen2_moe": _moe("qwen2_moe", shared_expert_intermediate_size=36, head_dim=None, mlp_only_layers=[1]),
    "qwen2_moe_window": _moe(
        "qwen2_moe",
        shared_expert_intermediate_size=36,
        norm_topk_prob=True,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
    ),
    "qwen3_moe": _moe("qwen3_moe", norm_topk_prob=True),
    "qwen3_moe_tied": _moe(
        "qwen3_moe",
        num_experts=None,
        num_local_experts=6,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=11,
    ),
    "deepseek2": _deepseek("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2),
    "deepseek2_lite_yarn": _deepseek(
        "deepseek_v2",
        q_lora_rank=None,
        attention_bias=True,
        rope_scaling={"type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.9, **YARN},
    ),
    "deepseek3": _deepseek("deepseek_v3", n_group=4, topk_group=2, norm_topk_prob=True),
    "deepseek3_yarn_tied": _deepseek(
        "deepseek_v3",
        n_group=2,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
        tie_word_embeddings=True,
        rope_scaling={"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **YARN},
    ),
    "gpt_oss": _gpt_oss(rope_theta=200.0, rope_scaling={"rope_type": "yarn", "truncate": False, **YARN}),
    "gpt_oss_tied": _gpt_oss(
        tie_word_embeddings=True,
        attention_bias=False,
        swiglu_limit=0.5,
        swiglu_alpha=0.8,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
}


QUICK = (  # one of each family of models/registry.py: the tier of tests that runs by default
    "llama31", "phi3_beyond", "olmo2", "gemma", "gemma3", "mixtral", "qwen2_moe", "deepseek3", "gpt_oss",
)  # fmt: skip


def model_config(name: str) -> ModelConfig:
    """Configuration of a tiny model as this package reads it."""
    return ModelConfig.from_hf(CONFIGS[name])


def prompt(name: str) -> list[int]:
    """Token ids whose logits are the reference of a tiny model."""
    length = LONG if "long" in name else LENGTH
    return _generator(SEED, f"prompt of {name}").randint(CONFIGS[name]["vocab_size"], size=length).tolist()


def seeded_tensor(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Draws one tensor: norms near 1, biases near 0 but not 0, products that keep the order of magnitude."""
    values = _generator(seed, name).standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.2 * values
    elif name.endswith("bias"):
        values *= 0.3
    elif not name.endswith("sinks"):
        gain = 1.5 if ".q_proj." in name or ".k_proj." in name else 1.0
        values *= gain / shape[1] ** 0.5
    return values.astype(np.float32)


def tensors(config: Mapping[str, Any], seed: int = SEED) -> Tensors:
    """Draws all tensors of a checkpoint, by name: those of experts as it stores them."""
    cfg = ModelConfig.from_hf(config)
    wanted = named_leaves(family(cfg).param_specs(cfg))
    specs = specs_apart(wanted, stored_apart(wanted, {}))
    drawn = {name: seeded_tensor(seed, name, _shape_stored(spec)) for name, spec in specs.items()}
    offset = {name for name, spec in specs.items() if name.endswith("norm.weight") and spec.init == "zeros"}
    return {name: tensor - 1 if name in offset else tensor for name, tensor in drawn.items()}


def tiny_params(config: Mapping[str, Any], seed: int = SEED) -> ParamTree:
    """The same tensors as a parameter tree."""
    cfg = ModelConfig.from_hf(config)
    specs, drawn = family(cfg).param_specs(cfg), tensors(config, seed)
    for name, parts in stored_apart(named_leaves(specs), {}).items():
        drawn[name] = np.stack([drawn.pop(part) for part in parts])
    for name, axes in stored_axes(named_leaves(specs)).items():
        drawn[name] = drawn[name].transpose(axes)
    return from_names(specs, {name: jnp.asarray(tensor) for name, tensor in drawn.items()})


def write_folder(
    path: Path, config: Mapping[str, Any], shards: int = 1, *, named: Mapping[str, NDArray[Any]] | None = None
) -> Path:
    """Writes a Hugging Face folder of `config` and its tensors (or those `named`), with an index if `shards` > 1."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    contents = dict(tensors(config) if named is None else named)
    if shards == 1:
        save_file(contents, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = dict(list(contents.items())[shard::shards])
        save_file(mine, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    total = sum(tensor.nbytes for tensor in contents.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return path


def assert_same_tree(found: ParamTree, expected: ParamTree) -> None:
    """Demands the same tree, and the same numbers bit by bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for name, leaf in named_leaves(expected).items():
        np.testing.assert_array_equal(named_leaves(found)[name], leaf, err_msg=name, strict=True)


def _shape_stored(spec: ParamSpec) -> tuple[int, ...]:
    axes = spec.stored or range(len(spec.shape))
    return tuple(spec.shape[axes.index(axis)] for axis in range(len(spec.shape)))


def _generator(seed: int, name: str) -> np.random.RandomState:
    # RandomState rather than Generator: its stream is frozen, and committed references depend on it.
    return np.random.RandomState([seed, zlib.crc32(name.encode())])


def damaged(content: bytes, length: int, *, times: int, seed: int) -> Iterator[bytes]:
    """Copies of a file with one to four of its first `length` bytes changed by chance."""
    draw = np.random.RandomState(seed)
    for _ in range(times):
        changed = bytearray(content)
        for at in draw.randint(length, size=draw.randint(1, 5)):
            changed[at] = draw.randint(256)
        yield bytes(changed)

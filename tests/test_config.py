"""Configurations of real models as they are published, settings, and the sizes that follow from both."""

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

from ferrum_jax import EngineConfig, ModelConfig, models
from ferrum_jax.config import FAMILIES, ExpertsConfig, RopeScaling
from ferrum_jax.contract.errors import ConfigError, FerrumError, ResourceExhaustedError, UnsupportedError
from ferrum_jax.executor import EnginePlan, plan_engine
from ferrum_jax.models import registry
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.ops import native
from tests import tiny

LLAMA31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA32_1B: dict[str, Any] = LLAMA31_8B | {
    "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "rope_scaling": LLAMA31_8B["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True,
    "transformers_version": "4.45.0.dev0",
}  # fmt: skip
LLAMA2_7B: dict[str, Any] = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
GEMMA2_9B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16,
    "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
    "torch_dtype": "float32", "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 199999,
    "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3", "num_attention_heads": 24,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
    "pad_token_id": 199999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1] * 48, "type": "longrope"}, "rope_theta": 10000.0,
    "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0", "use_cache": True, "vocab_size": 200064,
}  # fmt: skip
OLMO2_7B: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.47.0",
    "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
OLMO3_7B: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8,
    "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0", "use_cache": True, "vocab_size": 100278,
}  # fmt: skip
GEMMA_2B: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8,
    "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000.0, "torch_dtype": "bfloat16", "transformers_version": "4.38.0.dev0", "use_cache": True,
    "vocab_size": 256000,
}  # fmt: skip
GRANITE_8B: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
    "attention_multiplier": 0.0078125, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12800,
    "logits_scaling": 16.0, "max_position_embeddings": 4096, "mlp_bias": False, "model_type": "granite",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.46.0.dev0", "use_cache": True,
    "vocab_size": 49155,
}  # fmt: skip
SMOLLM3_3B: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
    "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
    "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
    "sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": False,
    "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {  # without its quantization_config, which says how weights are packed
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def llama3(factor: float) -> RopeScaling:
    return RopeScaling(
        rope_type="llama3",
        factor=factor,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


REAL: dict[str, tuple[dict[str, Any], ModelConfig]] = {
    "Llama-3.1-8B": (LLAMA31_8B, ModelConfig(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500000.0, rope_scaling=llama3(8.0), layer_windows=(None,) * 32, dtype="bfloat16",
    )),
    "Llama-3.2-1B": (LLAMA32_1B, ModelConfig(
        model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500000.0, rope_scaling=llama3(32.0), tie_word_embeddings=True, layer_windows=(None,) * 16,
        dtype="bfloat16",
    )),
    "Llama-2-7b": (LLAMA2_7B, ModelConfig(
        model_type="llama", vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_theta=10000.0, layer_windows=(None,) * 32, dtype="float16",
    )),
    "Mistral-7B-v0.1": (MISTRAL_7B, ModelConfig(
        model_type="mistral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, rms_norm_eps=1e-5,
        rope_theta=10000.0, layer_windows=(4096,) * 32, dtype="bfloat16",
    )),
    "Qwen2.5-7B": (QWEN25_7B, ModelConfig(
        model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-6,
        rope_theta=1e6, attention_bias=True, layer_windows=(None,) * 28, dtype="bfloat16",
    )),
    "Qwen3-8B": (QWEN3_8B, ModelConfig(
        model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_theta=1e6, qk_norm=True, layer_windows=(None,) * 36, dtype="bfloat16",
    )),
    "Phi-4-mini": (PHI4_MINI, ModelConfig(
        model_type="phi3", vocab_size=200064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32,
        num_attention_heads=24, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_scaling=RopeScaling(
            rope_type="longrope", factor=32.0, original_max_position_embeddings=4096, short_factor=(1.0,) * 48,
            long_factor=(2.0,) * 48,
        ),
        partial_rotary_factor=0.75, tie_word_embeddings=True, layer_windows=(262144,) * 32, dtype="bfloat16",
    )),
    "OLMo-2-7B": (OLMO2_7B, ModelConfig(
        model_type="olmo2", vocab_size=100352, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-6,
        rope_theta=500000.0, layer_windows=(None,) * 32, dtype="float32",
    )),
    "Olmo-3-7B": (OLMO3_7B, ModelConfig(
        model_type="olmo3", vocab_size=100278, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, head_dim=128, max_position_embeddings=65536, rms_norm_eps=1e-6,
        rope_theta=500000.0, local_rope_theta=500000.0, rope_scaling=RopeScaling(
            rope_type="yarn", factor=8.0, original_max_position_embeddings=8192, beta_fast=32.0, beta_slow=1.0,
            attention_factor=1.2079441541679836,
        ),
        layer_windows=((4096,) * 3 + (None,)) * 8, dtype="bfloat16",
    )),
    "gemma-2b": (GEMMA_2B, ModelConfig(
        model_type="gemma", vocab_size=256000, hidden_size=2048, intermediate_size=16384, num_hidden_layers=18,
        num_attention_heads=8, num_key_value_heads=1, head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6,
        tie_word_embeddings=True, embedding_multiplier=2048**0.5, layer_windows=(None,) * 18, dtype="bfloat16",
    )),
    "granite-3.0-8b": (GRANITE_8B, ModelConfig(
        model_type="granite", vocab_size=49155, hidden_size=4096, intermediate_size=12800, num_hidden_layers=40,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-5,
        tie_word_embeddings=True, attention_multiplier=1 / 128, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=16.0, layer_windows=(None,) * 40, dtype="bfloat16",
    )),
    "SmolLM3-3B": (SMOLLM3_3B, ModelConfig(
        model_type="smollm3", vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=4, head_dim=128, max_position_embeddings=65536, rms_norm_eps=1e-6,
        rope_theta=5e6, layers_without_rope=(3, 7, 11, 15, 19, 23, 27, 31, 35), tie_word_embeddings=True,
        layer_windows=(None,) * 36, dtype="bfloat16",
    )),
    "gemma-2-9b": (GEMMA2_9B, ModelConfig(
        model_type="gemma2", vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6,
        tie_word_embeddings=True, attention_multiplier=1 / 16, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, embedding_multiplier=3584**0.5, layer_windows=(4096, None) * 21, dtype="float32",
    )),
    "gemma-3-1b-it": (GEMMA3_1B, ModelConfig(
        model_type="gemma3_text", vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_theta=1e6, local_rope_theta=1e4, tie_word_embeddings=True, qk_norm=True, attention_multiplier=1 / 16,
        embedding_multiplier=1152**0.5, layer_windows=((512,) * 5 + (None,)) * 4 + (512, 512), dtype="bfloat16",
    )),
    "gpt-oss-20b": (GPT_OSS_20B, ModelConfig(
        model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=150000.0, rope_scaling=RopeScaling(
            rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False,
        ),
        attention_bias=True, attention_out_bias=True, attention_sinks=True, layer_windows=(128, None) * 12,
        experts=ExpertsConfig(
            num_experts=32, num_experts_per_tok=4, moe_intermediate_size=2880, norm_topk_prob=True,
            sparse_layers=(True,) * 24, swiglu_limit=7.0,
        ),
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_a_published_configuration_is_read_in_full(name: str):
    published, expected = REAL[name]
    assert ModelConfig.from_hf(published) == expected
    assert hash(ModelConfig.from_hf(published)) == hash(expected)
    longest = published["max_position_embeddings"]
    assert expected.reaching(longest).max_seq_len == longest


def test_the_newer_spelling_of_rope_and_dtype_means_the_same():
    rope = {**LLAMA31_8B["rope_scaling"], "rope_theta": 500000.0}
    newer = {k: v for k, v in LLAMA31_8B.items() if k not in ("rope_scaling", "rope_theta", "torch_dtype")}
    newer |= {"rope_parameters": rope, "dtype": "bfloat16"}
    assert ModelConfig.from_hf(newer) == ModelConfig.from_hf(LLAMA31_8B)
    older = LLAMA31_8B | {"rope_scaling": {("type" if k == "rope_type" else k): v for k, v in rope.items()}}
    assert ModelConfig.from_hf(older) == ModelConfig.from_hf(LLAMA31_8B)


def test_of_two_spellings_of_rope_the_older_counts():
    newer = {"rope_type": "llama3", **LLAMA31_8B["rope_scaling"], "factor": 4.0, "rope_theta": 7.0}
    assert ModelConfig.from_hf(LLAMA31_8B | {"rope_parameters": newer}) == ModelConfig.from_hf(LLAMA31_8B)


def test_yarn_lengthens_the_sequence_and_llama3_says_it_already():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    cfg = ModelConfig.from_hf(QWEN25_7B | {"max_position_embeddings": 32768, "rope_scaling": yarn})
    assert cfg.max_seq_len == 131072
    assert ModelConfig.from_hf(LLAMA31_8B).max_seq_len == 131072
    linear = {"type": "linear", "factor": 2.0}
    assert ModelConfig.from_hf(LLAMA2_7B | {"rope_scaling": linear}).max_seq_len == 8192


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_the_outer_original_length_wins_over_the_one_in_the_scaling(kind: str):
    scaling: dict[str, Any] = {
        "rope_type": kind, "factor": 4.0, "low_freq_factor": 1, "high_freq_factor": 4,
        "original_max_position_embeddings": 1024,
    }  # fmt: skip
    for outer, expected in ((2048, 2048), (None, 1024)):
        changes = {"rope_scaling": scaling, "original_max_position_embeddings": outer}
        found = ModelConfig.from_hf(LLAMA2_7B | changes).rope_scaling
        assert found is not None
        assert found.original_max_position_embeddings == expected
    del scaling["original_max_position_embeddings"]
    found = ModelConfig.from_hf(LLAMA2_7B | {"rope_scaling": scaling}).rope_scaling
    assert found is not None
    assert found.original_max_position_embeddings == LLAMA2_7B["max_position_embeddings"]


def test_deepseek_v3_weighs_its_experts_as_its_class_does_and_v2_does_not():
    for name, factor in (("deepseek3", 2.5), ("deepseek2", 1.0)):
        told = {key: value for key, value in tiny.CONFIGS[name].items() if key != "routed_scaling_factor"}
        experts = ModelConfig.from_hf(told).experts
        assert experts is not None
        assert experts.routed_scaling_factor == factor


def test_what_has_no_logarithm_to_divide_by_is_refused_by_name():
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}
    with pytest.raises(ConfigError, match="rope_theta is 1, expected more than 1"):
        ModelConfig.from_hf(LLAMA2_7B | {"rope_parameters": yarn})
    short = PHI4_MINI | {"original_max_position_embeddings": 1}
    with pytest.raises(ConfigError, match="original_max_position_embeddings is 1, expected at least 2"):
        ModelConfig.from_hf(short)


def test_yarn_from_no_original_length_is_refused_by_name():
    for factor in (2.0, None):
        yarn = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 0}
        with pytest.raises(ConfigError, match="original_max_position_embeddings of the RoPE scaling is 0, expected"):
            ModelConfig.from_hf(LLAMA2_7B | {"rope_scaling": yarn})


def test_every_family_that_a_configuration_may_have_has_a_forward():
    found = set()
    for family in FAMILIES:
        own = next((config for config in tiny.CONFIGS.values() if config["model_type"] == family), LLAMA2_7B)
        cfg = ModelConfig.from_hf(own | {"model_type": family})
        assert callable(models.family(cfg).forward)
        found.add(cfg.model_type)
    assert found == set(registry._FAMILIES)


def test_a_gpt_oss_without_rope_settings_has_its_own_and_with_wrong_ones_is_refused():
    assert ModelConfig.from_hf(GPT_OSS_20B | {"rope_scaling": None, "rope_parameters": {}}).rope_scaling is None
    for missing in (None, {}):
        cfg = ModelConfig.from_hf(GPT_OSS_20B | {"rope_scaling": missing})
        assert cfg == ModelConfig.from_hf(GPT_OSS_20B)
    with pytest.raises(ConfigError, match="rope_parameters is 0, expected an object"):
        ModelConfig.from_hf(GPT_OSS_20B | {"rope_scaling": None, "rope_parameters": 0})


def test_longrope_reaches_its_original_length_or_turns_by_the_long_factors():
    short = ModelConfig.from_hf(PHI4_MINI)
    assert (short.max_seq_len, short.rotary_dim) == (4096, 96)
    assert short.reaching(4096) == short
    assert (scaling := short.rope_scaling) is not None
    long = short.reaching(4097)
    assert (long.max_seq_len, long.rope_scaling) == (131072, dataclasses.replace(scaling, is_long=True))
    assert long.reaching(10) == long
    assert long.reaching(10, at_most=True) == short
    llama = ModelConfig.from_hf(LLAMA31_8B)
    assert llama.reaching(200_000) is llama
    for changes, kind, says in (
        (
            {"rope_scaling": PHI4_MINI["rope_scaling"] | {"long_factor": [2.0]}},
            ConfigError,
            "1 factors for 48",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            UnsupportedError,
            "without a short_factor",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, UnsupportedError, "'linear' is not implemented for phi3"),
        ({"partial_rotary_factor": 0.76, "rope_scaling": None}, ConfigError, "it rotates 97 of 128 numbers"),
    ):
        with pytest.raises(kind, match=says):
            ModelConfig.from_hf(PHI4_MINI | changes)


def test_smollm3_says_which_layers_turn_or_how_often_one_does_not():
    told = {name: value for name, value in SMOLLM3_3B.items() if name != "no_rope_layers"}
    assert ModelConfig.from_hf(told) == ModelConfig.from_hf(SMOLLM3_3B)
    silent = SMOLLM3_3B | {"no_rope_layer_interval": None}
    assert ModelConfig.from_hf(silent) == ModelConfig.from_hf(SMOLLM3_3B)
    with pytest.raises(ConfigError, match="no_rope_layer_interval is None"):
        ModelConfig.from_hf(told | {"no_rope_layer_interval": None})
    with pytest.raises(ConfigError, match=r"no_rope_layers is \[1, 0\], expected a list of at least 36 entries"):
        ModelConfig.from_hf(SMOLLM3_3B | {"no_rope_layers": [1, 0]})
    for entry, says in (("0", "'0'"), (2, "2"), (0.0, "0.0"), (None, "None")):
        with pytest.raises(ConfigError, match=f"no_rope_layers holds {says}, expected only 0 and 1"):
            ModelConfig.from_hf(SMOLLM3_3B | {"no_rope_layers": [1, 1, 1, entry] * 9})
    longer = SMOLLM3_3B | {"no_rope_layers": [True, True, True, False] * 10}  # of a model that layers were cut from
    assert ModelConfig.from_hf(longer) == ModelConfig.from_hf(SMOLLM3_3B)
    with pytest.raises(UnsupportedError, match="no_rope_layers"):
        ModelConfig.from_hf(SMOLLM3_3B | {"model_type": "llama"})


def test_olmo3_has_one_base_in_the_older_spelling():
    found = ModelConfig.from_hf(OLMO3_7B | {"rope_theta": 100.0})
    assert (found.rope_theta, found.local_rope_theta) == (100.0, 100.0)


def test_of_a_model_with_images_the_language_model_is_read():
    gemma3_4b = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "eoi_token_index": 256000, "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    }  # fmt: skip
    found = ModelConfig.from_hf(gemma3_4b)
    assert found == ModelConfig(
        model_type="gemma3_text", vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, rms_norm_eps=1e-6,
        rope_theta=1e6, rope_scaling=found.rope_scaling, local_rope_theta=1e4, tie_word_embeddings=True, qk_norm=True,
        attention_multiplier=1 / 16, embedding_multiplier=2560**0.5,
        layer_windows=((1024,) * 5 + (None,)) * 5 + (1024,) * 4, dtype="bfloat16",
    )  # fmt: skip
    assert found.rope_scaling is not None
    assert (found.rope_scaling.rope_type, found.rope_scaling.factor) == ("linear", 8.0)
    text = LLAMA32_1B | {"model_type": "mistral", "sliding_window": None}
    del text["tie_word_embeddings"]  # as in Mistral Small 3.1, whose head is not tied
    plain = ModelConfig.from_hf(text)
    for own, outer, tied in ((None, None, False), (True, None, True), (False, True, True), (True, False, False)):
        own, outer = ({} if one is None else {"tie_word_embeddings": one} for one in (own, outer))
        found = ModelConfig.from_hf({"model_type": "mistral3", "text_config": text | own, **outer})
        assert found == dataclasses.replace(plain, tie_word_embeddings=tied)
    slides = text | {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 8}
    assert ModelConfig.from_hf(slides).layer_windows == (None, 8) * 8  # as transformers' Auto classes read it
    assert ModelConfig.from_hf(slides | {"model_type": "ministral"}) == ModelConfig.from_hf(slides)
    found = ModelConfig.from_hf({"model_type": "mistral3", "text_config": slides})
    assert found.layer_windows == (8,) * 16  # as its MistralConfig reads it
    with pytest.raises(
        UnsupportedError, match=r"model_type 'ministral3' \['M'\]: supported are .*gpt_oss, gemma3, mis"
    ):
        ModelConfig.from_hf(
            {"model_type": "mistral3", "architectures": ["M"], "text_config": {"model_type": "ministral3"}}
        )
    with pytest.raises(UnsupportedError, match="attn_logit_softcapping = 5 is not implemented for mistral"):
        ModelConfig.from_hf({"model_type": "mistral3", "text_config": text | {"attn_logit_softcapping": 5}})
    with pytest.raises(ConfigError, match="text_config is 3, expected an object"):
        ModelConfig.from_hf({"model_type": "gemma3", "text_config": 3})


def test_gemma3_needs_no_pattern_beside_layer_types():
    kinds = [
        "full_attention" if window is None else "sliding_attention"
        for window in ModelConfig.from_hf(GEMMA3_1B).layer_windows
    ]
    silent = GEMMA3_1B | {"sliding_window_pattern": None}
    assert ModelConfig.from_hf(silent | {"layer_types": kinds}) == ModelConfig.from_hf(GEMMA3_1B)
    with pytest.raises(ConfigError, match="sliding_window_pattern is None"):
        ModelConfig.from_hf(silent)


def test_a_share_of_rotated_numbers_that_is_null_is_absent():
    assert ModelConfig.from_hf(LLAMA32_1B | {"partial_rotary_factor": None}) == ModelConfig.from_hf(LLAMA32_1B)
    newer = {"rope_type": "default", "rope_theta": 500000.0}
    plain, nothing = (
        {"rope_scaling": None, "rope_parameters": newer | one} for one in ({}, {"partial_rotary_factor": None})
    )
    assert ModelConfig.from_hf(LLAMA32_1B | nothing) == ModelConfig.from_hf(LLAMA32_1B | plain)


def test_a_factor_of_yarn_that_is_not_read_is_told(caplog: pytest.LogCaptureFixture):
    """DeepSeek-R1-0528-Qwen3-8B has one, and is computed as transformers computes it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    plain = ModelConfig.from_hf(LLAMA32_1B | {"rope_scaling": yarn})
    assert not caplog.records
    assert ModelConfig.from_hf(LLAMA32_1B | {"rope_scaling": yarn | {"attn_factor": 0.878}}) == plain
    (record,) = caplog.records
    assert "attn_factor 0.878 is not read" in record.getMessage()
    assert "attention_factor" in record.getMessage()


def test_gemma3_says_its_scaled_length_and_its_ropes_by_name_or_by_kind():
    scaled = GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert ModelConfig.from_hf(scaled).max_seq_len == 32768
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    named = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    newer = {name: value for name, value in scaled.items() if name not in named} | {"rope_parameters": kinds}
    assert ModelConfig.from_hf(newer) == ModelConfig.from_hf(scaled)
    scaled_window = kinds | {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    for changes, says in (
        ({"rope_parameters": scaled_window}, "rope_type 'linear' of layers with a window"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention = True is not implemented for gemma3_text",
        ),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not implemented"),
        ({"is_causal": False}, "is_causal = False is not implemented for gemma3_text"),
        ({"is_causal": None}, "is_causal = None is not implemented for gemma3_text"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "has a type but no rope_type"),
        ({"per_layer_config": {"0": {"skip": ["mlp"]}}}, "per_layer_config"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            ModelConfig.from_hf(newer | changes)
    # What transformers does not read where RoPE settings are given for each kind of layer:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 64}
    whole = newer | {"rope_parameters": {**kinds, "full_attention": yarn}}
    unread = whole | {"rope_parameters": {**kinds, "full_attention": yarn | {"truncate": False}}}
    assert ModelConfig.from_hf(unread) == ModelConfig.from_hf(whole)
    assert ModelConfig.from_hf(whole | {"original_max_position_embeddings": 32}) == ModelConfig.from_hf(whole)
    with pytest.raises(ConfigError, match="sliding_window is null"):
        ModelConfig.from_hf(GEMMA3_1B | {"sliding_window": None})


def test_windows_fall_on_the_layers_that_are_said_to_slide():
    window = {"use_sliding_window": True, "sliding_window": 100, "num_hidden_layers": 4}
    assert ModelConfig.from_hf(QWEN25_7B | window | {"max_window_layers": 3}).layer_windows == (None, None, None, 100)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert ModelConfig.from_hf(QWEN25_7B | window | {"layer_types": kinds}).layer_windows == (100, None, 100, None)
    assert ModelConfig.from_hf(MISTRAL_7B | {"sliding_window": None}).layer_windows == (None,) * 32
    assert not ModelConfig.from_hf(MISTRAL_7B | {"attention_bias": True}).attention_bias  # transformers' has none
    with pytest.raises(UnsupportedError, match=r"layer_types .*linear_attention.* are not implemented"):
        ModelConfig.from_hf(QWEN25_7B | {"layer_types": ["linear_attention"] * 28, "use_sliding_window": False})


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "llama3", **settings}}


REFUSED: dict[str, tuple[dict[str, Any], type[FerrumError], str]] = {
    "another family": ({"model_type": "gpt2"}, UnsupportedError, "model_type 'gpt2'"),
    "no family": ({"model_type": None}, UnsupportedError, "LlamaForCausalLM"),
    "a mixture of experts": ({"num_local_experts": 8}, UnsupportedError, "num_local_experts = 8"),
    "experts by another name": ({"num_experts": 128}, UnsupportedError, "num_experts"),
    "soft caps": ({"attn_logit_softcapping": 50.0}, UnsupportedError, "attn_logit_softcapping"),
    "quantised weights": ({"quantization_config": {"bits": 4}}, UnsupportedError, "quantization_config"),
    "another activation": ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act 'gelu'"),
    "another RoPE": (rope() | {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, UnsupportedError, "'dynamic'"),
    "a RoPE for each kind of layer": (
        {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        UnsupportedError,
        "one set for all layers",
    ),
    "RoPE settings that are text": (
        {"rope_scaling": "linear"}, ConfigError, "rope_scaling is 'linear', expected an object",
    ),
    "RoPE settings that are 0": ({"rope_scaling": 0}, ConfigError, "rope_scaling is 0, expected an object"),
    "newer RoPE settings that are false": (
        {"rope_scaling": None, "rope_parameters": False}, ConfigError, "rope_parameters is False, expected an object",
    ),
    "partial rotary": ({"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor 0.5"),
    "no factor": (rope(low_freq_factor=1, high_freq_factor=4), ConfigError, "factor"),
    "no frequencies": (rope(factor=8.0), ConfigError, "low_freq_factor"),
    "a factor of 0": (rope(factor=0.0, low_freq_factor=1, high_freq_factor=4), ConfigError, "factor"),
    "a theta of 0": ({"rope_theta": 0.0}, ConfigError, "rope_theta is 0.0"),
    "heads that cannot be shared": ({"num_key_value_heads": 5}, ConfigError, "32 attention heads cannot share 5"),
    "no heads": ({"num_attention_heads": 0}, ConfigError, "num_attention_heads is 0"),
    "no kv heads": ({"num_key_value_heads": 0}, ConfigError, "num_key_value_heads is 0"),
    "half a head": ({"num_attention_heads": 31.5}, ConfigError, "num_attention_heads is 31.5"),
    "an odd head": ({"head_dim": 63}, ConfigError, "head_dim is 63"),
    "an empty head": ({"head_dim": 0}, ConfigError, "head_dim is 0"),
    "a size that is text": ({"vocab_size": "128256"}, ConfigError, "vocab_size is '128256'"),
    "a size that is a truth": ({"hidden_size": True}, ConfigError, "hidden_size is True"),
    "layers that are text": ({"num_hidden_layers": "32"}, ConfigError, "num_hidden_layers is '32'"),
    "a negative size": ({"intermediate_size": -1}, ConfigError, "intermediate_size is -1"),
    "an epsilon that is text": ({"rms_norm_eps": "small"}, ConfigError, "rms_norm_eps is 'small', expected a number"),
    "an epsilon that is text of a number": ({"rms_norm_eps": "4"}, ConfigError, "rms_norm_eps is '4'"),
    "a theta that is a truth": ({"rope_theta": True}, ConfigError, "rope_theta is True"),
    "a theta that float32 has not": ({"rope_theta": 1e39}, ConfigError, "rope_theta is 1e\\+39"),
    "a factor that float32 has not": (
        {"rope_scaling": {"type": "yarn", "factor": 1.7e308}}, ConfigError, "factor is 1.7e\\+308",
    ),
    "a factor that makes too many positions": (
        {"rope_scaling": {"type": "yarn", "factor": 1e6}}, ConfigError, "factor of the RoPE scaling is 1e\\+06: 131072",
    ),
    "positions of 400 digits": ({"max_position_embeddings": 10**400}, ConfigError, "max_position_embeddings is 10"),
    "an original length of 400 digits": (
        {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 10**400}},
        ConfigError,
        "original_max_position_embeddings of the RoPE scaling is 10",
    ),
    "a width of 20 digits": ({"hidden_size": 10**20}, ConfigError, "hidden_size is 1.*, expected at most 2147483647"),
    "more layers than any model has": ({"num_hidden_layers": 9999}, ConfigError, "9999, expected at most 1000"),
    "a switch that is text": ({"tie_word_embeddings": "false"}, ConfigError, "tie_word_embeddings is 'false'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_or_wrong_is_refused(name: str):
    changes, kind, says = REFUSED[name]
    with pytest.raises(kind, match=says):
        ModelConfig.from_hf(LLAMA31_8B | changes)


def test_an_unknown_kind_of_layer_or_a_wrong_number_of_them_is_refused():
    sliding = QWEN3_8B | {"use_sliding_window": True, "sliding_window": 8}
    with pytest.raises(UnsupportedError, match="chunked_attention"):
        ModelConfig.from_hf(sliding | {"layer_types": ["chunked_attention"] * 36})
    with pytest.raises(ConfigError, match="3 layer types for 36 layers"):
        ModelConfig.from_hf(sliding | {"layer_types": ["full_attention"] * 3})
    with pytest.raises(ConfigError, match="layer_types is 0, expected a list"):
        ModelConfig.from_hf(sliding | {"layer_types": 0})
    for window in (0, 4.5):
        with pytest.raises(ConfigError, match=f"sliding_window is {window}"):
            ModelConfig.from_hf(MISTRAL_7B | {"sliding_window": window})


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "max_position_embeddings"],
)  # fmt: skip
def test_a_missing_size_is_named(name: str):
    with pytest.raises(ConfigError, match=f"no field '{name}'"):
        ModelConfig.from_hf({k: v for k, v in LLAMA31_8B.items() if k != name})


BAD_SETTINGS: list[tuple[str, Any]] = [
    *((name, value) for name in ("max_seqs", "kv_capacity", "block_size", "kv_blocks", "max_step_tokens")
      for value in (0, -1, 1.5, True, "8")),
    ("spec_tokens", 99_999_999), ("multi_step_tokens", 1025), ("max_seqs", 10**9), ("max_loras", 10**9),
    ("max_lora_rank", 10**9), ("kv_capacity", 2**31), ("block_size", 10**400), ("kv_blocks", 2**31),
    ("max_loras", -1), ("max_lora_rank", -1), ("spec_tokens", -1), ("memory_fraction", 0.0), ("memory_fraction", 1.1),
    ("memory_fraction", float("nan")), ("memory_fraction", "half"), ("prefix_cache", "off"), ("dtype", "int8"),
    ("kv_dtype", "float64"), ("decode_rows", ()), ("query_blocks", (2, 1)), ("verify_blocks", (4, 4)),
    ("verify_blocks", (0, 1)), ("verify_tokens", (4, 8)), ("block_tokens", 0),
    ("decode_rows", (1.5, 2)), ("decode_rows", ("a",)), ("quantize", "fp4"), ("quantize", 8),
    *(("compiler_options", value) for value in (
        "xla", True, 1, ("xla",), ("ab", "cd"), (("a", 1, 2),), (("a", 1), ("a", 2)), {"": 1}, {1: 1}, {"a\n": 1},
        {"a": None}, {"a": [1]}, {"a": b"1"}, [["a", None]],
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_SETTINGS)
def test_a_setting_that_cannot_be_is_refused_by_name(name: str, value: Any):
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: value})


ENVIRONMENT: dict[str, tuple[str, str, Any, str]] = {
    "FERRUM_KV_CAPACITY": ("512", "kv_capacity", 512, "0"),
    "FERRUM_KV_MAX_BLOCKS": ("64", "kv_blocks", 64, "many"),
    "FERRUM_PAGED_MAX_SEQS": (" 3 ", "max_seqs", 3, "-3"),
    "FERRUM_MEMORY_FRACTION": ("0.8", "memory_fraction", 0.8, "1.5"),
    "FERRUM_PREFIX_CACHE": ("0", "prefix_cache", False, "no"),
    "FERRUM_KV_DTYPE": ("bf16", "kv_dtype", "bfloat16", "int8"),
    "FERRUM_DTYPE": ("FP32", "dtype", "float32", ""),
    "FERRUM_QUANTIZE": ("int8", "quantize", "int8", "int4"),
    "FERRUM_SPEC_N": ("4", "spec_tokens", 4, "4.5"),
    "FERRUM_WINDOW_KV": ("1", "window_kv", True, "2"),
    "FERRUM_ATTENTION": ("XLA", "attention", "xla", "flash"),
    "FERRUM_LAYOUT": ("fused", "layout", "fused", "flat"),
}


@pytest.mark.parametrize(
    ("variable", "number"),
    [("FERRUM_SPEC_N", 99999999), ("FERRUM_PAGED_MAX_SEQS", 10**9), ("FERRUM_KV_CAPACITY", 2**31),
     ("FERRUM_KV_MAX_BLOCKS", 10**30), ("FERRUM_KV_CAPACITY", "9" * 5000)],
)  # fmt: skip
def test_a_number_beyond_reason_is_refused_and_its_variable_named(variable: str, number: Any):
    with pytest.raises(ConfigError, match=f"^{variable}='{number}' cannot be used"):
        EngineConfig.from_environment({variable: str(number)})


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_each_variable_is_read_and_a_wrong_one_is_named(variable: str, monkeypatch: pytest.MonkeyPatch):
    text, name, value, wrong = ENVIRONMENT[variable]
    assert EngineConfig.from_environment({variable: text, "UNRELATED": "x"}) == EngineConfig(**{name: value})
    monkeypatch.setenv(variable, text)
    assert getattr(EngineConfig.from_environment(), name) == value
    with pytest.raises(ConfigError, match=f"^{variable}={wrong!r} cannot be used"):
        EngineConfig.from_environment({variable: wrong})


@pytest.mark.parametrize("text", ["false", "True", "off", "ON", "no", "yes"])
def test_a_word_for_yes_or_no_is_no_folder_of_artifacts(text: str):
    with pytest.raises(ConfigError, match=f"FERRUM_ARTIFACTS='{text}' cannot be used: expected 0, 1 or a folder"):
        EngineConfig.from_environment({"FERRUM_ARTIFACTS": text})


@pytest.mark.parametrize("folder", ["a\u00a0b", "\u3000x", os.fsdecode(b"caf\xe9"), "./off"])
def test_a_folder_of_artifacts_has_any_name_that_a_folder_can_have(folder: str):
    assert EngineConfig.from_environment({"FERRUM_ARTIFACTS": f"/{folder}"}).artifacts == f"/{folder}"
    assert EngineConfig(artifacts=folder).artifacts == folder


def test_the_prefix_cache_is_off_at_0_and_on_at_1():
    assert EngineConfig.from_environment({"FERRUM_PREFIX_CACHE": "0"}).prefix_cache is False
    assert EngineConfig.from_environment({"FERRUM_PREFIX_CACHE": "1"}).prefix_cache is True
    assert EngineConfig.from_environment({}).prefix_cache is None


def test_what_is_given_goes_over_what_is_not():
    over = EngineConfig(max_seqs=3, prefix_cache=False, max_loras=0).over(
        EngineConfig(max_seqs=5, kv_capacity=9, prefix_cache=True, max_loras=2)
    )
    assert over == EngineConfig(max_seqs=3, kv_capacity=9, prefix_cache=False, max_loras=0)


def test_compiler_options_are_held_as_sorted_pairs_whatever_their_order():
    given: Any = {"b": np.int32(2), "a": True, "d": 0.5, "c": ""}
    config = EngineConfig(compiler_options=given)
    assert config.compiler_options == (("a", True), ("b", 2), ("c", ""), ("d", 0.5))
    again = EngineConfig(compiler_options={"a": True, "c": "", "b": 2, "d": 0.5})
    assert config == again == dataclasses.replace(config)
    assert hash(config) == hash(again)
    assert EngineConfig().compiler_options is None
    assert EngineConfig().over(config) == config


@pytest.mark.parametrize(
    ("short", "full"),
    [("bf16", "bfloat16"), ("F16", "float16"), ("half", "float16"), ("fp32", "float32"), ("bfloat16", "bfloat16")],
)
def test_a_dtype_has_short_names(short: str, full: str):
    config = EngineConfig(dtype=short, kv_dtype=short)
    assert (config.dtype, config.kv_dtype) == (full, full)


def test_a_dtype_that_is_no_name_is_refused():
    wrong: Any = 32
    with pytest.raises(ConfigError, match="dtype is 32"):
        EngineConfig(dtype=wrong)


# 2 (K and V) × 2 layers × 3 heads × 10 wide × 4 bytes
POSITION = 480  # bytes
SMALL = ModelConfig.from_hf(
    QWEN3_8B | {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
)


def planned(cfg: ModelConfig = SMALL, *, free_bytes: int = 10**12, platform: str = "cpu", **engine: Any) -> EnginePlan:
    return plan_engine(EngineConfig(**engine), cfg, platform=platform, free_bytes=free_bytes)


def test_a_pool_holds_every_sequence_at_full_length_where_both_are_given():
    plan = planned(max_seqs=3, kv_capacity=100, block_size=16)
    assert (plan.max_seqs, plan.kv_capacity, plan.cache.num_blocks) == (3, 100, 3 * 7)
    assert plan.buckets.table_columns == 7
    assert plan.cache.bytes_per_position == POSITION
    needed, sampler = 21 * 16 * POSITION, plan.sampler.num_bytes
    exact = planned(max_seqs=3, kv_capacity=100, block_size=16, memory_fraction=1.0, free_bytes=needed + sampler)
    assert exact.cache.num_blocks == 21
    with pytest.raises(ResourceExhaustedError, match=f"21 blocks takes {needed:,} bytes") as caught:
        planned(max_seqs=3, kv_capacity=100, block_size=16, memory_fraction=1.0, free_bytes=needed + sampler - 1)
    assert (caught.value.needed, caught.value.free) == (21, 20)
    assert "hold 20: ask for fewer max_seqs, a smaller kv_capacity" in str(caught.value)


def test_the_default_capacity_is_the_models_maximum_up_to_4096():
    assert planned().kv_capacity == 4096
    short = dataclasses.replace(SMALL, max_position_embeddings=300)
    assert planned(short).kv_capacity == 300
    assert planned(short, kv_capacity=5000).kv_capacity == 300
    assert planned(kv_capacity=40960).kv_capacity == 40960


def test_a_default_pool_is_clamped_to_what_is_free():
    roomy = planned()
    assert roomy.cache.num_blocks == 8 * 4096 // roomy.cache.block_size
    block, sampler = roomy.cache.block_size * POSITION, roomy.sampler.num_bytes
    tight = planned(free_bytes=2 * 5 * block + sampler)  # a half of it may be taken on a CPU
    assert tight.cache.num_blocks == 5
    assert tight.kv_capacity == 5 * tight.cache.block_size  # one sequence cannot be longer than the pool
    assert tight.buckets.table_columns == 5
    with pytest.raises(ResourceExhaustedError):
        planned(free_bytes=2 * block + sampler - 1)


def test_a_pool_that_free_memory_decides_is_the_same_with_a_little_more_or_less_of_it():
    block, sampler = planned().cache.block_size * POSITION, planned().sampler.num_bytes

    def pool(blocks: float, **engine: Any) -> int:
        free = int(blocks * block) + sampler
        return planned(free_bytes=free, memory_fraction=1.0, **engine).cache.num_blocks

    assert {pool(blocks) for blocks in (104, 105, 106.7, 111.9)} == {104}
    assert [pool(blocks) for blocks in (9, 16, 17, 143, 255, 256, 300)] == [9, 16, 16, 128, 240, 256, 256]
    assert pool(21, kv_capacity=17 * 128, max_seqs=None) == 20
    assert pool(17, kv_capacity=17 * 128) == 17  # a sequence of full length fits
    assert pool(105, kv_blocks=103) == 103
    assert planned(kv_capacity=4096, max_seqs=3, block_size=16).cache.num_blocks == 3 * 256
    with pytest.raises(ResourceExhaustedError, match=r"ask for fewer kv_blocks$"):
        pool(10, kv_blocks=11)
    with pytest.raises(ResourceExhaustedError, match=r"0\.0001 of .* bytes hold 0: ask for a smaller block_size or "):
        planned(free_bytes=10**6 + sampler, memory_fraction=0.0001)
    with pytest.raises(ResourceExhaustedError, match=r"hold 16: ask for a smaller kv_capacity$"):
        pool(16, kv_capacity=17 * 128)


@pytest.mark.parametrize(("sequences", "expected"), [(10_000, 64), (40, 32), (20, 16), (9, 8)])
def test_by_default_a_gpu_serves_as_many_sequences_as_its_free_memory_holds(sequences: int, expected: int):
    one = 4096 * POSITION // 2  # bytes of the KV of a sequence in bfloat16
    free = sequences * one + planned(max_seqs=expected).sampler.num_bytes
    plan = planned(platform="gpu", free_bytes=free, memory_fraction=1.0)
    assert (plan.max_seqs, plan.kv_capacity) == (expected, 4096)
    assert plan.cache.num_blocks * plan.cache.block_size == expected * 4096
    assert plan.buckets.decode_rows[-1] == expected
    assert planned(platform="gpu", free_bytes=2 * free).max_seqs == expected
    assert planned(platform="gpu", free_bytes=free, kv_blocks=7).cache.num_blocks == 7
    assert planned(platform="gpu", free_bytes=10**12, decode_rows=(8,)).max_seqs == 8
    assert planned(platform="gpu", free_bytes=free, max_seqs=3).max_seqs == 3


def test_more_memory_may_be_taken_of_a_gpu_and_as_much_as_is_said():
    block, sampler = 128 * POSITION // 2, planned().sampler.num_bytes
    free = 100 * block + sampler
    assert planned(platform="gpu", free_bytes=free).cache.num_blocks == 80  # of 85, with four significant bits
    assert planned(platform="gpu", free_bytes=free, memory_fraction=0.3).cache.num_blocks == 30
    assert planned(platform="gpu").cache.dtype == "bfloat16"
    assert planned(platform="cpu").cache.dtype == "float32"
    assert planned(dtype="float32", kv_dtype="float16").cache.dtype == "float16"


def test_buckets_end_in_the_largest_that_can_be_asked_for():
    buckets = planned(max_seqs=6, kv_capacity=1000, max_step_tokens=512, attention="xla").buckets
    assert buckets.decode_rows == (1, 4, 6)
    assert (buckets.query_blocks, buckets.block_tokens) == ((1, 2, 4, 8), 64)
    assert (buckets.max_rows, buckets.kv_capacity, buckets.max_step_tokens) == (6, 1000, 512)
    assert set(buckets.mixed_blocks) <= set(buckets.query_blocks)
    with pytest.raises(ConfigError, match="decode_rows ends in 8, max_seqs is 6"):
        planned(max_seqs=6, decode_rows=(1, 8))
    with pytest.raises(ConfigError, match="verify_blocks ends in 7, max_seqs is 6"):
        planned(max_seqs=6, verify_blocks=(7,))
    with pytest.raises(ConfigError, match="query_blocks end in 9 of 64 tokens, max_step_tokens is 512"):
        planned(query_blocks=(9,), max_step_tokens=512, attention="xla")


def test_a_step_is_no_larger_than_all_sequences_together_and_a_block_no_larger_than_one():
    small = planned(max_seqs=2, kv_capacity=20).buckets
    assert (small.block_tokens, small.query_blocks) == (20, (1, 2))
    assert planned(max_seqs=2, kv_capacity=200, max_step_tokens=24).buckets.block_tokens == 24
    asked = planned(kv_capacity=200, block_tokens=16, verify_tokens=99).buckets
    assert (asked.block_tokens, asked.verify_tokens) == (16, 16)


@pytest.mark.skipif(native.instruction_set() is None, reason=f"no kernels: {native.library()}")
def test_blocks_are_smaller_where_kernels_attend():
    buckets = planned(max_seqs=6, kv_capacity=1000, max_step_tokens=512).buckets
    assert (buckets.query_blocks, buckets.block_tokens, buckets.logit_blocks) == ((1, 2, 4, 8, 16), 32, 2)
    own = planned(max_seqs=6, kv_capacity=1000, block_tokens=16).buckets
    assert (own.block_tokens, own.logit_blocks) == (16, 1)
    assert [planned(max_seqs=6, kv_capacity=size).buckets.logit_blocks for size in (20, 32, 63, 64)] == [1, 1, 1, 2]


@pytest.mark.parametrize("attention", ["xla", None])
@pytest.mark.parametrize("asked", [{"spec_tokens": 99}, {"verify_tokens": 100}], ids=str)
def test_a_block_holds_all_that_is_drafted(asked: dict[str, Any], attention: str | None):
    buckets = planned(max_seqs=6, kv_capacity=1000, attention=attention, **asked).buckets
    assert (buckets.block_tokens, buckets.verify_tokens) == (100, 100)


def test_a_gpu_takes_larger_blocks_and_more_of_them_in_a_step():
    buckets = planned(platform="gpu").buckets
    assert (buckets.block_tokens, buckets.max_step_tokens) == (128, 2048)
    assert buckets.step_overhead > planned(platform="cpu").buckets.step_overhead


def test_what_was_asked_for_is_in_the_plan():
    plan = planned(prefix_cache=True, max_loras=3, max_lora_rank=16, spec_tokens=4, max_seqs=6)
    assert plan.prefix_cache
    assert plan.loras == LoraSpec(max_loras=3, max_rank=16)
    assert (plan.buckets.verify_blocks, plan.buckets.verify_tokens) == ((1, 4, 6), 5)
    plain = planned(prefix_cache=False, max_loras=0, max_lora_rank=0, spec_tokens=0, max_seqs=6)
    assert not plain.prefix_cache
    assert plain.loras is None
    assert plain.buckets.verify_blocks == (1,)


@pytest.mark.parametrize("half", [{"max_loras": 1}, {"max_lora_rank": 8}])
def test_adapters_need_a_number_and_a_rank(half: dict[str, Any]):
    with pytest.raises(ConfigError, match="adapters need both"):
        planned(**half)


def test_stacks_of_adapters_take_room_from_the_pool():
    plain, adapted = (
        planned(free_bytes=10**9, memory_fraction=1.0, max_seqs=600),
        planned(free_bytes=10**9, memory_fraction=1.0, max_seqs=600, max_loras=8, max_lora_rank=8),
    )
    assert adapted.cache.num_bytes < plain.cache.num_bytes


def test_eight_sequences_of_2048_positions_take_at_most_20_programs():
    plan = planned(max_seqs=8, kv_capacity=2048)
    assert len(plan.buckets.steps()) <= 14
    assert len(plan.declared()) <= 20, "with the small programs beside the steps"


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        (None, {}),
        ("model=8", {"model": 8}),
        ("data=2, expert=4,model=3", {"data": 2, "expert": 4, "model": 3}),
        ({"model": 2, "data": 1}, {"model": 2}),
    ],
)
def test_a_mesh_is_read(mesh: Any, sizes: dict[str, int]):
    assert EngineConfig(mesh=mesh).mesh_sizes == sizes


@pytest.mark.parametrize("mesh", ["model", "model=x", "model=0", "model=2,model=3", "heads=2", {"model": 2.0}, ("x",)])
def test_what_is_no_mesh_is_refused(mesh: Any):
    with pytest.raises(ConfigError, match="mesh"):
        EngineConfig(mesh=mesh)

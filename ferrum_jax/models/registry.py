"""Families by the `model_type` of their checkpoints, each as its differences from Llama's decoder.

| family | source |
|---|---|
| Llama 2 to 3.2 | Touvron et al. 2023, "Llama 2" |
| Mistral, Mixtral | Jiang et al. 2023, "Mistral 7B"; 2024, "Mixtral of Experts" |
| Qwen2, Qwen2-MoE | Yang et al. 2024, "Qwen2 Technical Report", section 2.2.2 (the shared expert) |
| Qwen3, Qwen3-MoE | Yang et al. 2025, "Qwen3 Technical Report", section 2 |
| Granite 3 | IBM 2024, section 3; factors as in Yang et al. 2022, "Tensor Programs V" |
| SmolLM3 | layers without rotary embeddings |
| Phi-3 to Phi-4 | Abdin et al. 2024, "Phi-3 Technical Report", section 2: projections fused in the checkpoint |
| OLMo 2 | OLMo Team 2024, "2 OLMo 2 Furious", section 3.1: norms after the blocks, scaled in float32 |
| OLMo 3 | OLMo Team 2025, "Olmo 3", section 3.2: OLMo 2 with a window in three of four layers |
| Gemma | Gemma Team 2024, "Gemma", section 2: norms scale by 1 + weight |
| Gemma 2, Gemma 3 | Gemma Team 2024, "Gemma 2", section 2; 2025, "Gemma 3", section 2: norms after the blocks, too |
| DeepSeek V2, V3, R1 | DeepSeek-AI 2024, "DeepSeek-V2" and "DeepSeek-V3": latent attention |
| GPT-OSS | OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", sections 2.2 and 2.3: attention with sinks |

Settings (windows, biases, factors, soft caps, RoPE) are fields of `ModelConfig`.
Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from functools import partial

import jax

from ferrum_jax.config import ModelConfig, check_model_config
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.models import feed_forward
from ferrum_jax.models.attention import fused_attention_specs, wide_norm_attention_specs
from ferrum_jax.models.decoder import Family
from ferrum_jax.models.latent import latent_attention, latent_attention_specs
from ferrum_jax.ops.norm import offset_rms_norm, wide_rms_norm

_LLAMA = Family()
_GEMMA = Family(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    norm=offset_rms_norm,
    norm_init="zeros",
    activation=jax.nn.gelu,
)
_OLMO = Family(
    norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    norm=wide_rms_norm,
    attention_specs=wide_norm_attention_specs,
)
_MIXTRAL = Family(
    mlp="block_sparse_moe",
    expert_specs=feed_forward.mixtral_specs,
    mix_experts=partial(feed_forward.mix_experts, names=feed_forward.MIXTRAL_NAMES),
)
_QWEN_MOE = Family(expert_specs=feed_forward.qwen_specs, mix_experts=feed_forward.qwen_experts)
_DEEPSEEK = Family(
    attention_specs=latent_attention_specs,
    attention=latent_attention,
    expert_specs=feed_forward.deepseek_specs,
    mix_experts=feed_forward.deepseek_experts,
)
_FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3"), _LLAMA),
    "gemma": Family(norm=offset_rms_norm, norm_init="zeros", activation=jax.nn.gelu),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
    "phi3": Family(attention_specs=fused_attention_specs, mlp_specs=feed_forward.fused_mlp_specs),
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO),
    "mixtral": _MIXTRAL,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _QWEN_MOE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _DEEPSEEK),
    "gpt_oss": Family(
        norm=wide_rms_norm, expert_specs=feed_forward.gpt_oss_specs, mix_experts=feed_forward.gpt_oss_experts
    ),
}


def family(cfg: ModelConfig) -> Family:
    """Returns the family of a configuration.

    Raises:
        InvalidParameterError: `cfg` is no `ModelConfig`.
        UnsupportedError: no family has this `model_type`.
    """
    check_model_config(cfg)
    found = _FAMILIES.get(cfg.model_type)
    if found is None:
        raise UnsupportedError(f"model_type {cfg.model_type!r}: supported are {', '.join(_FAMILIES)}")
    return found

"""Families by the name their checkpoints give them."""

from types import ModuleType

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.models import deepseek, gemma, gpt_oss, granite, llama, mixtral, olmo2, phi3, qwen_moe

_FAMILIES: dict[str, ModuleType] = {
    "llama": llama, "mistral": llama, "qwen2": llama, "qwen3": llama, "gemma2": gemma, "gemma3_text": gemma,
    "phi3": phi3, "olmo2": olmo2, "granite": granite, "smollm3": llama,
    "mixtral": mixtral, "qwen2_moe": qwen_moe, "qwen3_moe": qwen_moe,
    "deepseek_v2": deepseek, "deepseek_v3": deepseek, "gpt_oss": gpt_oss,
}  # fmt: skip


def family(cfg: ModelConfig) -> ModuleType:
    """Gives the module with `param_specs`, `FUSED`, `forward` and `head` for this configuration."""
    found = _FAMILIES.get(cfg.model_type)
    if found is None:
        raise UnsupportedError(f"model_type {cfg.model_type!r}: supported are {', '.join(_FAMILIES)}")
    return found

"""Families by the `model_type` of their checkpoints."""

from types import ModuleType

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.models import deepseek, gemma, gpt_oss, llama, mixtral, olmo2, phi3, qwen_moe

_FAMILIES: dict[str, ModuleType] = {
    "llama": llama, "mistral": llama, "qwen2": llama, "qwen3": llama, "gemma2": gemma, "gemma3_text": gemma,
    "phi3": phi3, "olmo2": olmo2, "granite": llama, "smollm3": llama,
    "mixtral": mixtral, "qwen2_moe": qwen_moe, "qwen3_moe": qwen_moe,
    "deepseek_v2": deepseek, "deepseek_v3": deepseek, "gpt_oss": gpt_oss,
}  # fmt: skip


def family(cfg: ModelConfig) -> ModuleType:
    """Returns the module with `param_specs`, `FUSED`, `forward` and `head` for a configuration.

    Raises:
        UnsupportedError: there is none.
    """
    found = _FAMILIES.get(cfg.model_type)
    if found is None:
        raise UnsupportedError(f"model_type {cfg.model_type!r}: supported are {', '.join(_FAMILIES)}")
    return found

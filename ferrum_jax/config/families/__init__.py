"""The readers of `config.json`, a module for each family whose settings are its own.

A module has `read(config)`, which gives the fields of a `ModelConfig`, and `IMPLEMENTED`: those of `CHANGES_ARITHMETIC`
that its forward computes. Any other of them is refused.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ferrum_jax.config.common import refuse_ignored
from ferrum_jax.config.families import deepseek, gemma, gpt_oss, granite, llama, mixtral, olmo2, phi3, qwen_moe, smollm3
from ferrum_jax.contract.errors import UnsupportedError

_READERS: dict[str, ModuleType] = {
    "llama": llama, "mistral": llama, "qwen2": llama, "qwen3": llama, "gemma2": gemma, "gemma3_text": gemma,
    "phi3": phi3, "olmo2": olmo2, "granite": granite, "smollm3": smollm3,
    "mixtral": mixtral, "qwen2_moe": qwen_moe, "qwen3_moe": qwen_moe,
    "deepseek_v2": deepseek, "deepseek_v3": deepseek, "gpt_oss": gpt_oss,
}  # fmt: skip
FAMILIES = tuple(_READERS)


def read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields of a `ModelConfig` with the reader of its family.

    Raises:
        UnsupportedError: there is no such family, or it does not implement a setting.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        names = config.get("architectures") or []
        raise UnsupportedError(f"model_type {family!r} {names}: supported are {', '.join(FAMILIES)}")
    reader = _READERS[family]
    refuse_ignored(config, reader.IMPLEMENTED)
    return reader.read(config)

"""`config.json` of Llama 2 to 3.2, Mistral, Qwen2 and Qwen3."""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.config.common import read_activation, read_sizes, read_switch, windows_of
from ferrum_jax.config.rope import read_rope

IMPLEMENTED = ()


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a `ModelConfig`."""
    family = config["model_type"]
    read_activation(config, "hidden_act", "silu", ("silu", "swish"))
    bias = read_switch(config, "attention_bias")
    sizes = read_sizes(config, head_dim=128 if family == "qwen3" else None)
    return {
        **sizes,
        **read_rope(config),
        "tie_word_embeddings": read_switch(config, "tie_word_embeddings"),
        "attention_bias": True if family == "qwen2" else bias,
        "attention_out_bias": False if family == "qwen2" else bias,
        "mlp_bias": read_switch(config, "mlp_bias") and family == "llama",
        "qk_norm": family == "qwen3",
        "layer_windows": _windows(config, sizes["num_hidden_layers"]),
    }


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    family, window = config["model_type"], config.get("sliding_window", 4096)  # Hugging Face's own default
    if family == "llama" or window is None:
        return (None,) * layers
    if family == "mistral":
        return (window,) * layers
    if not read_switch(config, "use_sliding_window"):
        return (None,) * layers
    first = config.get("max_window_layers", 28)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return windows_of(config.get("layer_types") or kinds, window)

"""`config.json` of Qwen2-MoE and Qwen3-MoE."""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.config.common import read_activation, read_sizes, read_switch, windows_of
from ferrum_jax.config.experts import ExpertsConfig
from ferrum_jax.config.numbers import refuse_no_count
from ferrum_jax.config.rope import read_rope

IMPLEMENTED = ("num_experts", "num_local_experts")


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a `ModelConfig`."""
    second = config["model_type"] == "qwen2_moe"
    read_activation(config, "hidden_act", "silu", ("silu", "swish"))
    sizes = read_sizes(config)
    shared = {"shared_expert_intermediate_size": config["shared_expert_intermediate_size"]} if second else {}
    return {
        **sizes,
        **read_rope(config),
        "tie_word_embeddings": read_switch(config, "tie_word_embeddings"),
        "attention_bias": read_switch(config, "qkv_bias", True) if second else read_switch(config, "attention_bias"),
        "attention_out_bias": False if second else read_switch(config, "attention_bias"),
        "qk_norm": not second,
        "layer_windows": _windows(config, sizes["num_hidden_layers"]),
        "experts": _experts(config, **shared),
    }


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096)  # Hugging Face's own default
    if window is None or not read_switch(config, "use_sliding_window"):
        return (None,) * layers
    if config["model_type"] == "qwen3_moe":
        return (window,) * layers
    last = config.get("max_window_layers", 28)
    kinds = ["full_attention" if i % 2 or i >= last else "sliding_attention" for i in range(layers)]
    return windows_of(config.get("layer_types") or kinds, window)


def _experts(config: Mapping[str, Any], **sizes: Any) -> ExpertsConfig | None:
    """Reads the experts, given sizes that only one of the families has; None where no layer has any."""
    layers = config["num_hidden_layers"]
    count = config.get("num_experts", config.get("num_local_experts"))  # newer checkpoints have the second name
    if count is None:
        raise KeyError("num_experts")
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    refuse_no_count("decoder_sparse_step", step, 1)
    sparse = tuple(index not in dense and (index + 1) % step == 0 for index in range(layers))
    if count == 0 or not any(sparse):
        return None
    return ExpertsConfig(
        num_experts=count,
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"],
        norm_topk_prob=read_switch(config, "norm_topk_prob"),
        sparse_layers=sparse,
        **sizes,
    )

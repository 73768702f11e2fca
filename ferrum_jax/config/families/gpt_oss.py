"""`config.json` of GPT-OSS."""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.config.common import read_activation, read_sizes, read_switch, windows_of
from ferrum_jax.config.experts import ExpertsConfig
from ferrum_jax.config.rope import read_rope
from ferrum_jax.contract.errors import ConfigError

IMPLEMENTED = ("num_local_experts", "swiglu_limit", "swiglu_alpha")

_YARN = {  # Hugging Face's own defaults
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a `ModelConfig`."""
    read_activation(config, "hidden_act", "silu", ("silu",))
    sizes = read_sizes({"rms_norm_eps": 1e-5, **config}, head_dim=64)
    layers, has_bias = sizes["num_hidden_layers"], read_switch(config, "attention_bias", True)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or _YARN
    return {
        **sizes,
        **read_rope({"rope_theta": 150000.0, **config, "rope_parameters": rope}),
        "tie_word_embeddings": read_switch(config, "tie_word_embeddings"),
        "attention_bias": has_bias,
        "attention_out_bias": has_bias,
        "attention_sinks": True,
        "layer_windows": _windows(config, layers),
        "experts": ExpertsConfig(
            num_experts=config["num_local_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            moe_intermediate_size=sizes["intermediate_size"],
            norm_topk_prob=True,
            sparse_layers=(True,) * layers,
            swiglu_limit=float(config.get("swiglu_limit", 7.0)),
            swiglu_alpha=float(config.get("swiglu_alpha", 1.702)),
        ),
    }


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window, kinds = config.get("sliding_window", 128), config.get("layer_types")
    found = windows_of(kinds or ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)], 1)
    if window is None and any(found):
        raise ConfigError("sliding_window is null, but layer_types has layers with a window")
    return tuple(one and window for one in found)

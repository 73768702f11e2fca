"""`config.json` of Mixtral."""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.config.common import read_activation, read_sizes, read_switch
from ferrum_jax.config.experts import ExpertsConfig
from ferrum_jax.config.rope import read_rope

IMPLEMENTED = ("num_local_experts", "num_experts")


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a `ModelConfig`."""
    read_activation(config, "hidden_act", "silu", ("silu", "swish"))
    sizes = read_sizes({"rms_norm_eps": 1e-5, **config})
    layers = sizes["num_hidden_layers"]
    return {
        **sizes,
        **read_rope({"rope_theta": 1e6, **config}),
        "tie_word_embeddings": read_switch(config, "tie_word_embeddings"),
        "layer_windows": (config.get("sliding_window"),) * layers,
        "experts": ExpertsConfig(
            num_experts=config["num_local_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            moe_intermediate_size=sizes["intermediate_size"],
            norm_topk_prob=True,
            sparse_layers=(True,) * layers,
        ),
    }

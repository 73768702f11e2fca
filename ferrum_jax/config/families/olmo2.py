"""`config.json` of OLMo 2."""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.config.common import read_activation, read_sizes, read_switch
from ferrum_jax.config.rope import read_rope

IMPLEMENTED = ()


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a `ModelConfig`."""
    read_activation(config, "hidden_act", "silu", ("silu", "swish"))
    sizes, bias = read_sizes({"rms_norm_eps": 1e-5, **config}), read_switch(config, "attention_bias")
    return {
        **sizes,
        **read_rope(config),
        "tie_word_embeddings": read_switch(config, "tie_word_embeddings"),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "layer_windows": (None,) * sizes["num_hidden_layers"],
    }

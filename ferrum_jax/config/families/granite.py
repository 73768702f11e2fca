"""`config.json` of Granite 3, the dense models."""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.config.common import read_activation, read_sizes, read_switch
from ferrum_jax.config.rope import read_rope

IMPLEMENTED = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a `ModelConfig`; a multiplier that is missing is 1."""
    read_activation(config, "hidden_act", "silu", ("silu", "swish"))
    sizes, bias = read_sizes(config), read_switch(config, "attention_bias")
    return {
        **sizes,
        **read_rope(config),
        **{name: float(config.get(name, 1.0)) for name in IMPLEMENTED},
        "tie_word_embeddings": read_switch(config, "tie_word_embeddings"),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": read_switch(config, "mlp_bias"),
        "layer_windows": (None,) * sizes["num_hidden_layers"],
    }

"""`config.json` of SmolLM3."""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.config.common import read_activation, read_sizes, read_switch, windows_of
from ferrum_jax.config.rope import read_rope
from ferrum_jax.contract.errors import ConfigError, shown

IMPLEMENTED = ("no_rope_layers",)


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a `ModelConfig`; what is missing is what Hugging Face takes then."""
    read_activation(config, "hidden_act", "silu", ("silu", "swish"))
    sizes, bias = read_sizes({"num_key_value_heads": 4, **config}), read_switch(config, "attention_bias")
    layers, interval = range(sizes["num_hidden_layers"]), config.get("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers")  # which, by its use, says where there are rotary embeddings
    turns = [(layer + 1) % interval != 0 for layer in layers] if turns is None else turns
    if not isinstance(turns, list) or len(turns) != len(layers):
        raise ConfigError(f"no_rope_layers is {shown(turns)}, expected a list of {len(layers)} entries")
    window = config.get("sliding_window")
    slides = read_switch(config, "use_sliding_window") and window is not None
    kinds = ["sliding_attention" if slides and not turn else "full_attention" for turn in turns]
    return {
        **sizes,
        **read_rope({"rope_theta": 2e6, **config}),
        "layers_without_rope": tuple(layer for layer in layers if not turns[layer]),
        "tie_word_embeddings": read_switch(config, "tie_word_embeddings", default=True),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": read_switch(config, "mlp_bias"),
        "layer_windows": windows_of(config.get("layer_types") or kinds, window),
    }

"""`config.json` of Gemma 2."""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.config.common import read_activation, read_sizes, read_switch, windows_of
from ferrum_jax.config.rope import read_rope

IMPLEMENTED = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a `ModelConfig`; what is missing is what Hugging Face takes then."""
    read_activation(config, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    sizes = read_sizes(config, head_dim=256)
    bias = read_switch(config, "attention_bias")
    layers = range(sizes["num_hidden_layers"])
    kinds = config.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    return {
        **sizes,
        **read_rope(config),
        "tie_word_embeddings": read_switch(config, "tie_word_embeddings", default=True),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "attention_multiplier": config.get("query_pre_attn_scalar", 256) ** -0.5,
        "attn_logit_softcapping": config.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": config.get("final_logit_softcapping", 30.0),
        "embedding_multiplier": sizes["hidden_size"] ** 0.5,
        "layer_windows": windows_of(kinds, config.get("sliding_window", 4096)),
    }

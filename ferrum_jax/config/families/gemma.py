"""`config.json` of Gemma 2 and the text models of Gemma 3."""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.config.common import read_activation, read_sizes, read_switch, windows_of
from ferrum_jax.config.rope import read_rope
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, shown

IMPLEMENTED = (
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq",
)  # fmt: skip


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a `ModelConfig`; what is missing is what Hugging Face takes then."""
    return _read_second(config) if config["model_type"] == "gemma2" else _read_third(config)


def _read_second(config: Mapping[str, Any]) -> dict[str, Any]:
    both = _read_both(config)
    layers = range(both["num_hidden_layers"])
    kinds = config.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    return {
        **both,
        **read_rope(config),
        "attn_logit_softcapping": config.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": config.get("final_logit_softcapping", 30.0),
        "layer_windows": windows_of(kinds, config.get("sliding_window", 4096)),
    }


def _read_third(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window have a base of their own, and the scaling is the others'.

    Hugging Face's forward ignores a soft cap of scores, and no checkpoint has one.
    """
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedError(f"attn_logit_softcapping {config['attn_logit_softcapping']!r} is not implemented here")
    window, period = config.get("sliding_window", 4096), config.get("sliding_window_pattern", 6)
    if window is None:
        raise ConfigError("sliding_window is null, and layers of one kind need it")
    both = _read_both(config)
    layers = range(1, both["num_hidden_layers"] + 1)
    kinds = config.get("layer_types") or ["sliding_attention" if i % period else "full_attention" for i in layers]
    return {
        **both,
        **_read_two_ropes(config),
        "qk_norm": True,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "layer_windows": windows_of(kinds, window),
    }


def _read_two_ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads both ways of writing two settings of rotary embeddings: one for each kind of layer, or by names."""
    given = _settings(config, "rope_parameters")
    local = _settings(given, "sliding_attention")
    if local.get("rope_type", "default") != "default":
        raise UnsupportedError(f"rope_type {local['rope_type']!r} of layers with a window is not implemented")
    full = {"rope_theta": config.get("rope_theta", 1e6)} | _settings(given, "full_attention")
    full |= _settings(config, "rope_scaling")
    if given and not given.keys() & {"sliding_attention", "full_attention"}:
        raise UnsupportedError(f"rope_parameters {shown(given)} are not those of each kind of layer")
    is_linear = full.get("rope_type", full.get("type")) == "linear"
    if is_linear and (factor := full.get("factor")) is not None:  # the positions said are the scaled ones
        full = {"original_max_position_embeddings": int(config["max_position_embeddings"] / factor)} | full
    return {
        **read_rope({**config, "rope_parameters": full, "rope_scaling": None}),
        "local_rope_theta": float(local.get("rope_theta", config.get("rope_local_base_freq", 10000.0))),
    }


def _settings(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} is {shown(found)}, expected an object")
    return dict(found)


def _read_both(config: Mapping[str, Any]) -> dict[str, Any]:
    read_activation(config, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    sizes = read_sizes(config, head_dim=256)
    bias = read_switch(config, "attention_bias")
    return {
        **sizes,
        "tie_word_embeddings": read_switch(config, "tie_word_embeddings", default=True),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "attention_multiplier": config.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_multiplier": sizes["hidden_size"] ** 0.5,
    }

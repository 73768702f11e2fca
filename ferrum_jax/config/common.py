"""What the `config.json` of every family has, read alike."""

from collections.abc import Collection, Mapping
from typing import Any

from ferrum_jax.contract.errors import ConfigError, UnsupportedError

MOST_LAYERS = 10_000  # a damaged count would otherwise be counted to
CHANGES_ARITHMETIC = (  # settings that make a forward wrong if its family ignores them
    "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier",
    "residual_multiplier", "attention_multiplier", "num_experts", "num_local_experts", "n_routed_experts",
    "no_rope_layers", "quantization_config", "clip_qkv", "query_pre_attn_scalar", "kv_lora_rank", "swiglu_limit",
    "swiglu_alpha", "rope_local_base_freq", "use_bidirectional_attention", "attention_chunk_size",
)  # fmt: skip


def refuse_ignored(config: Mapping[str, Any], implemented: Collection[str]) -> None:
    """Raises UnsupportedError where a setting changes the arithmetic and the family does not implement it."""
    for name in CHANGES_ARITHMETIC:
        if name not in implemented and config.get(name) not in (None, False, 0):
            raise UnsupportedError(f"{name} = {config[name]!r} is not implemented for {config['model_type']}")


def read_sizes(config: Mapping[str, Any], *, head_dim: int | None = None) -> dict[str, Any]:
    """Reads names, sizes and the dtype; a head that says no width has `head_dim`, or its share of the model's."""
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    if layers > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers is {layers}, expected at most {MOST_LAYERS}")
    kv_heads, width = config.get("num_key_value_heads"), config.get("head_dim")
    if width is None:
        width = config["hidden_size"] // heads if head_dim is None else head_dim
    return {
        "model_type": config["model_type"],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": width,
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    }


def read_activation(config: Mapping[str, Any], name: str, default: str, supported: Collection[str]) -> str:
    """Reads the activation of the feed-forward block, which must be among those `supported`."""
    activation = config.get(name, default)
    if activation not in supported:
        raise UnsupportedError(f"{name} {activation!r} is not implemented, only {' and '.join(supported)} is")
    return activation


def read_switch(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Reads what is true or false; null is false."""
    if (value := config.get(name, default)) is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, expected true or false")
    return bool(value)


def windows_of(kinds: list[str], window: int | None) -> tuple[int | None, ...]:
    """Gives the window of each layer by its kind, as `layer_types` has it."""
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise UnsupportedError(f"layer_types {sorted(unknown)} are not implemented")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

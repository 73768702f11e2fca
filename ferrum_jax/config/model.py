"""What a model is, out of its `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from ferrum_jax.config.numbers import refuse_below, refuse_no_count, refuse_not_positive
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, shown

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MOST_LAYERS = 10_000  # a damaged count would otherwise be counted to
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_CHANGES_ARITHMETIC = (  # settings of other families that would make these forwards wrong if they were ignored
    "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier",
    "residual_multiplier", "attention_multiplier", "num_experts", "num_local_experts", "n_routed_experts",
    "no_rope_layers", "quantization_config", "clip_qkv", "query_pre_attn_scalar",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A scaling of rotary frequencies; fields are Hugging Face's, those a type does not use are None."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None  # positions
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if not isinstance(self.rope_type, str) or self.rope_type not in ROPE_TYPES:
            raise UnsupportedError(f"rope_type {shown(self.rope_type)}: supported are {', '.join(ROPE_TYPES)}")
        refuse_not_positive("factor of the RoPE scaling", self.factor)
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "low_freq_factor",
                     "high_freq_factor"):  # fmt: skip
            if getattr(self, name) is not None:
                refuse_not_positive(f"{name} of the RoPE scaling", getattr(self, name))
        if self.rope_type == "llama3" and not (self.low_freq_factor or 0) < (self.high_freq_factor or 0):
            raise ConfigError(
                f"high_freq_factor of the RoPE scaling is {self.high_freq_factor}, expected more than "
                f"low_freq_factor, {self.low_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of one model, in Hugging Face's names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of the query, key and value projections
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head
    layer_windows: tuple[int | None, ...]  # per layer: positions seen, or None for all
    dtype: str = "float32"  # of the checkpoint

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            refuse_no_count(name, getattr(self, name), 1)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, rotary embeddings need an even one")
        if not isinstance(self.layer_windows, tuple):
            raise ConfigError(f"layer_windows is {shown(self.layer_windows)}, expected a tuple")
        if len(self.layer_windows) != self.num_hidden_layers:
            raise ConfigError(f"{len(self.layer_windows)} layer types for {self.num_hidden_layers} layers")
        for window in self.layer_windows:
            refuse_below("sliding_window", window, 1)
        for name in ("rope_theta", "rms_norm_eps"):
            refuse_not_positive(name, getattr(self, name))

    @property
    def max_seq_len(self) -> int:
        """Longest sequence the position embeddings are meant for, in positions, scalings included."""
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type == "llama3":
            return self.max_position_embeddings
        original = scaling.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, int(original * scaling.factor))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a Hugging Face `config.json`; raises on any setting that is not implemented.

        Raises:
            UnsupportedError: the family, a RoPE type, an activation or another setting is not implemented.
            ConfigError: a field is missing, has the wrong type, or contradicts another.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"a configuration is a {type(config).__name__}, expected a mapping")
        try:
            return cls(**_hf_fields(config))
        except KeyError as missing:
            raise ConfigError(f"no field {missing.args[0]!r}") from None
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as wrong:
            if isinstance(wrong, (ConfigError, UnsupportedError)):
                raise
            raise ConfigError(f"a field of the wrong type: {wrong}") from None


def _hf_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    family = config.get("model_type")
    if family not in FAMILIES:
        names = config.get("architectures") or []
        raise UnsupportedError(f"model_type {family!r} {names}: supported are {', '.join(FAMILIES)}")
    for name in _CHANGES_ARITHMETIC:
        if config.get(name) not in (None, False, 0):
            raise UnsupportedError(f"{name} = {config[name]!r} is not implemented for {family}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act {activation!r} is not implemented, only silu is")
    theta, scaling, partial = _rope(config)
    if partial != 1.0:
        raise UnsupportedError(f"partial_rotary_factor {partial} is not implemented, only 1.0 is")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    if layers > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers is {layers}, expected at most {MOST_LAYERS}")
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    if head_dim is None:
        head_dim = 128 if family == "qwen3" else config["hidden_size"] // heads
    bias = _switch(config, "attention_bias")
    return {
        "model_type": family,
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": _switch(config, "tie_word_embeddings"),
        "attention_bias": True if family == "qwen2" else bias,
        "attention_out_bias": False if family == "qwen2" else bias,
        "mlp_bias": _switch(config, "mlp_bias") and family == "llama",
        "qk_norm": family == "qwen3",
        "layer_windows": _windows(config, family, layers),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    }


def _switch(config: Mapping[str, Any], name: str) -> bool:
    if (value := config.get(name)) is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, expected true or false")
    return bool(value)


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096)  # what Hugging Face takes where nothing is said
    if family == "llama" or window is None:
        return (None,) * layers
    if family == "mistral":
        return (window,) * layers
    if not _switch(config, "use_sliding_window"):
        return (None,) * layers
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise UnsupportedError(f"layer_types {sorted(unknown)} are not implemented")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None, float]:
    """Reads theta, scaling and the rotated share, from both the older and the newer way of writing them."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedError(f"RoPE settings {given!r} are not implemented, only one set for all layers is")
    theta = float(given.get("rope_theta", config.get("rope_theta", 10000.0)))
    partial = float(given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedError(f"rope_type {kind!r} is not implemented, supported are {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return theta, None, partial
    limit = config["max_position_embeddings"]
    original = given.get("original_max_position_embeddings")
    if kind in ("llama3", "yarn"):  # the outer one wins, as in `standardize_rope_params` of transformers
        outer = config.get("original_max_position_embeddings")
        original = next((length for length in (outer, original) if length is not None), limit)
        if not original > 0:
            raise ConfigError(
                f"original_max_position_embeddings of the RoPE scaling is {original}, expected more than 0"
            )
    derived = kind == "yarn" and given.get("factor") is None
    factor = limit / original if derived else given["factor"]
    named = {"rope_type", "factor", "original_max_position_embeddings", "truncate"}
    names = {field.name for field in fields(RopeScaling)} - named
    options: dict[str, Any] = {name: float(given[name]) for name in names if given.get(name) is not None}
    if kind == "llama3":
        options |= {name: float(given[name]) for name in ("low_freq_factor", "high_freq_factor")}
    options |= {"truncate": bool(given.get("truncate", True)), "original_max_position_embeddings": original}
    return theta, RopeScaling(rope_type=kind, factor=float(factor), **options), partial

"""What a model is, out of its `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from ferrum_jax.config.experts import ExpertsConfig
from ferrum_jax.config.families import read_fields
from ferrum_jax.config.latent import LatentConfig
from ferrum_jax.config.numbers import refuse_below, refuse_no_count, refuse_not_positive
from ferrum_jax.config.rope import RopeScaling
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, shown


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
    partial_rotary_factor: float = 1.0  # the share of each head that turns
    local_rope_theta: float | None = None  # of layers with a window, which then have no scaling; as the others' if None
    layers_without_rope: tuple[int, ...] = ()  # whose heads do not turn at all
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of the query, key and value projections
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head
    attention_multiplier: float | None = None  # of scores; head_dim ** -0.5 if None
    attention_sinks: bool = False  # a learnt score of each query head that takes its share of the softmax for nothing
    attn_logit_softcapping: float | None = None  # scores are softened to stay below it
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what a block adds
    logits_scaling: float = 1.0  # divides the logits
    layer_windows: tuple[int | None, ...]  # per layer: positions seen, or None for all
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None  # what attention is then made of
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
        without, layers = self.layers_without_rope, range(self.num_hidden_layers)
        if not isinstance(without, tuple) or any(layer not in layers for layer in without):
            raise ConfigError(f"layers_without_rope are {shown(without)}, expected a tuple out of {len(layers)} layers")
        refuse_not_positive("partial_rotary_factor", self.partial_rotary_factor)
        if self.partial_rotary_factor > 1 or self.rotary_dim % 2 or not self.rotary_dim:
            raise ConfigError(
                f"partial_rotary_factor is {self.partial_rotary_factor}: it turns {self.rotary_dim} of {self.head_dim} "
                "numbers of a head, expected an even number of them"
            )
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ConfigError(f"rope_scaling is {shown(self.rope_scaling)}, expected a RopeScaling or None")
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "longrope":
            for divisors in (self.rope_scaling.short_factor or (), self.rope_scaling.long_factor or ()):
                if 2 * len(divisors) != self.rotary_dim:
                    raise ConfigError(f"longrope has {len(divisors)} factors for {self.rotary_dim // 2} pairs")
        if not isinstance(self.layer_windows, tuple):
            raise ConfigError(f"layer_windows is {shown(self.layer_windows)}, expected a tuple")
        if len(self.layer_windows) != self.num_hidden_layers:
            raise ConfigError(f"{len(self.layer_windows)} layer types for {self.num_hidden_layers} layers")
        for window in self.layer_windows:
            refuse_below("sliding_window", window, 1)
        for name in ("rope_theta", "rms_norm_eps", "embedding_multiplier", "residual_multiplier", "logits_scaling"):
            refuse_not_positive(name, getattr(self, name))
        for name in ("local_rope_theta", "attention_multiplier", "attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(self, name) is not None:
                refuse_not_positive(name, getattr(self, name))

    @property
    def rotary_dim(self) -> int:
        """Numbers of each head that turn: the first ones, or those after the latent."""
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    def reaching(self, length: int, *, at_most: bool = False) -> Self:
        """The same model, for sequences of up to `length` positions.

        It differs where LongRoPE (Ding et al. 2024) has other frequencies for sequences longer than the original ones.
        All positions then turn by those, so that a cached key need never turn again. A model that has them already
        keeps them for shorter sequences, too, unless it is to reach `length` `at_most`.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type != "longrope" or scaling.original_max_position_embeddings is None:
            return self
        is_long = length > scaling.original_max_position_embeddings or (scaling.is_long and not at_most)
        return replace(self, rope_scaling=replace(scaling, is_long=is_long))

    @property
    def max_seq_len(self) -> int:
        """Longest sequence the position embeddings are meant for, in positions, scalings included."""
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type == "llama3":
            return self.max_position_embeddings
        original = scaling.original_max_position_embeddings or self.max_position_embeddings
        if scaling.rope_type == "longrope":
            return self.max_position_embeddings if scaling.is_long else min(original, self.max_position_embeddings)
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
            return cls(**read_fields(config))
        except KeyError as missing:
            raise ConfigError(f"no field {missing.args[0]!r}") from None
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as wrong:
            if isinstance(wrong, (ConfigError, UnsupportedError)):
                raise
            raise ConfigError(f"a field of the wrong type: {wrong}") from None

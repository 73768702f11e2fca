"""The architecture of a model, read from its `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from ferrum_jax.config.checks import LARGEST_COUNT, check_integer
from ferrum_jax.config.components import ExpertsConfig, LatentConfig, RopeScaling, check_fields
from ferrum_jax.config.families import read_fields
from ferrum_jax.contract.errors import ConfigError, InvalidParameterError, UnsupportedError, safe_repr


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of one model, in Hugging Face's names; a static argument under `jit`."""

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
    partial_rotary_factor: float = 1.0  # share of each head that is rotated
    local_rope_theta: float | None = None  # of sliding-window layers, without scaling; None: as in other layers
    layers_without_rope: tuple[int, ...] = ()  # indices of layers without rotary embeddings
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of the query, key and value projections
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head
    attention_multiplier: float | None = None  # of scores; head_dim ** -0.5 if None
    attention_sinks: bool = False  # a learnt score per query head, which only adds to the softmax's denominator
    attn_logit_softcapping: float | None = None  # bound of scores, by a tanh
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of each block's output
    logits_scaling: float = 1.0  # divides the logits
    layer_windows: tuple[int | None, ...]  # sliding window of each layer, in positions; None: full attention
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None  # of multi-head latent attention; None: the model has ordinary attention
    dtype: str = "float32"  # of the checkpoint

    def __post_init__(self):
        check_fields(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, rotary embeddings need an even one")
        without, layers = self.layers_without_rope, range(self.num_hidden_layers)
        if not all(type(layer) is int and layer in layers for layer in without):
            raise ConfigError(f"layers_without_rope are {safe_repr(without)}, expected some of {len(layers)} layers")
        if self.partial_rotary_factor > 1 or self.rotary_dim % 2 or not self.rotary_dim:
            raise ConfigError(
                f"partial_rotary_factor is {self.partial_rotary_factor}: it rotates {self.rotary_dim} of "
                f"{self.head_dim} numbers of a head, expected an even number of them"
            )
        scaling = self.rope_scaling
        if scaling is not None and self._original_length * scaling.factor > LARGEST_COUNT:
            raise ConfigError(
                f"factor of the RoPE scaling is {scaling.factor:g}: {self._original_length} positions times that are "
                f"more than {LARGEST_COUNT}"
            )
        if scaling is not None and scaling.rope_type == "yarn" and self.rope_theta <= 1:
            raise ConfigError(f"rope_theta is {self.rope_theta:g}, expected more than 1 for the logarithms of YaRN")
        if scaling is not None and scaling.rope_type == "longrope":
            if self._original_length < 2:
                raise ConfigError(
                    f"original_max_position_embeddings is {self._original_length}, expected at least 2 for longrope"
                )
            for divisors in (scaling.short_factor or (), scaling.long_factor or ()):
                if 2 * len(divisors) != self.rotary_dim:
                    raise ConfigError(f"longrope has {len(divisors)} factors for {self.rotary_dim // 2} pairs")
        if len(self.layer_windows) != self.num_hidden_layers:
            raise ConfigError(f"{len(self.layer_windows)} layer types for {self.num_hidden_layers} layers")
        for window in self.layer_windows:
            if window is not None:
                check_integer("sliding_window", window, 1)

    @property
    def rotary_dim(self) -> int:
        """Width of each head's rotated part: its first numbers, or those after the latent."""
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    def reaching(self, length: int, *, at_most: bool = False) -> Self:
        """Returns the configuration for sequences of up to `length` positions.

        It differs with LongRoPE (Ding et al. 2024), which has other frequencies for sequences beyond the original
        length. All positions then use these, so that a cached key is never rotated again. A configuration that has them
        already keeps them for a shorter `length`, unless `at_most` says that `length` is the longest.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type != "longrope" or scaling.original_max_position_embeddings is None:
            return self
        is_long = length > scaling.original_max_position_embeddings or (scaling.is_long and not at_most)
        return replace(self, rope_scaling=replace(scaling, is_long=is_long))

    @property
    def max_seq_len(self) -> int:
        """Positions of the longest sequence for which the position embeddings are made, with scaling."""
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type == "llama3":
            return self.max_position_embeddings
        if scaling.rope_type == "longrope" and not scaling.is_long:
            return min(self._original_length, self.max_position_embeddings)
        if scaling.rope_type == "longrope":
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(self._original_length * scaling.factor))

    @property
    def _original_length(self) -> int:
        original = None if self.rope_scaling is None else self.rope_scaling.original_max_position_embeddings
        return original or self.max_position_embeddings

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a Hugging Face `config.json`; raises on any setting that is not implemented.

        Raises:
            UnsupportedError: the family, a RoPE type, an activation or another setting is not implemented.
            ConfigError: a field is missing, has the wrong type, or contradicts another.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"a configuration is a {type(config).__name__}, expected a mapping: of transformers', config.to_dict()"
            )
        try:
            return cls(**read_fields(config))
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as wrong:
            if isinstance(wrong, (ConfigError, UnsupportedError)):
                raise
            raise ConfigError(f"a field of the wrong type: {wrong}") from None


def check_model_config(cfg: object) -> None:
    """Raises InvalidParameterError if this is no `ModelConfig`."""
    if not isinstance(cfg, ModelConfig):
        raise InvalidParameterError(f"cfg is a {type(cfg).__name__}, expected a ModelConfig: models.config_from_hf")

"""Rotary frequencies of a model's layers, from its configuration."""

import math

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.config import ModelConfig, RopeScaling
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.ops import rope

Frequencies = tuple[NDArray[np.float32], float]  # radians per position of each pair, and a factor on cosine and sine


def frequencies_of_layers(cfg: ModelConfig) -> tuple[list[Frequencies], list[int]]:
    """Returns the distinct frequencies of a model, and for each layer the index of its frequencies."""
    kinds, of_layer = [frequencies(cfg)], [0] * cfg.num_hidden_layers
    if cfg.local_rope_theta is not None:
        kinds.append((rope.default_frequencies(cfg.rotary_dim, cfg.local_rope_theta), 1.0))
        of_layer = [int(window is not None) for window in cfg.layer_windows]
    if cfg.layers_without_rope:  # a rotation by 0 changes nothing
        kinds.append((np.zeros(cfg.rotary_dim // 2, np.float32), 1.0))
        zero, without = len(kinds) - 1, set(cfg.layers_without_rope)
        of_layer = [zero if layer in without else kind for layer, kind in enumerate(of_layer)]
    return kinds, of_layer


def frequencies(cfg: ModelConfig) -> Frequencies:
    """Returns the frequencies of the layers without special ones."""
    plain = rope.default_frequencies(cfg.rotary_dim, cfg.rope_theta)
    scaling = cfg.rope_scaling
    if scaling is None:
        return plain, 1.0
    original = scaling.original_max_position_embeddings or cfg.max_position_embeddings
    if scaling.rope_type == "linear":
        return plain / np.float32(scaling.factor), 1.0
    if scaling.rope_type == "llama3" and scaling.low_freq_factor and scaling.high_freq_factor:
        return (
            rope.llama3_frequencies(plain, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, original),
            1.0,
        )
    if scaling.rope_type == "yarn":
        scaled = rope.yarn_frequencies(
            plain, cfg.rope_theta, scaling.factor, original, scaling.beta_fast, scaling.beta_slow, scaling.truncate
        )
        return scaled, _magnitude(scaling, original)
    if scaling.rope_type == "longrope":
        divisors = scaling.long_factor if scaling.is_long else scaling.short_factor
        return plain / np.asarray(divisors, np.float32), _magnitude(scaling, original)
    raise UnsupportedError(f"rope scaling {scaling} is not implemented")


def _magnitude(scaling: RopeScaling, original: int) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    log = math.log(scaling.factor)
    if scaling.rope_type == "longrope":
        return math.sqrt(1 + log / math.log(original))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * log + 1.0) / (0.1 * scaling.mscale_all_dim * log + 1.0)
    return 0.1 * log + 1.0

"""What a forward returns beside its logits, and the vectors that steer it.

Both go through the family's own forward: `capture` says what to return, `steering` what to add to the residual stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import flax.struct
import jax
import numpy as np

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError, UnsupportedError, safe_repr

Leaf = TypeVar("Leaf")


@dataclass(frozen=True, kw_only=True)
class CaptureSpec:
    """Layers whose hidden states or attention weights a forward returns; static under `jit`.

    Args:
        hidden: numbers of layers passed: 0 is the embeddings, L the output of the last layer, before the norm.
        attention: layers, from 0 to L-1, whose attention weights are returned. They are computed beside the attention
            itself, all at once, which takes N * T * S numbers a row.
    """

    hidden: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()


@flax.struct.dataclass
class Captured(Generic[Leaf]):
    """What a forward was asked to return, by layer; both are empty where nothing was."""

    hidden: dict[int, Leaf]  # [X, D], in the activations' dtype
    attention: dict[int, tuple[Leaf, ...]]  # float32 [B, N, T, S] of each group of rows; S = M * C positions


def check_capture(hidden: object, attention: object, cfg: ModelConfig) -> CaptureSpec:
    """Returns the spec of what is asked for, each layer once, in order.

    Raises:
        InvalidParameterError: a layer does not exist; the message names it.
    """
    checked = {}
    last = cfg.num_hidden_layers - 1
    for name, given, most in (("hidden", hidden, last + 1), ("attention", attention, last)):
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise InvalidParameterError(f"{name} is {safe_repr(given)}, expected layers from 0 to {most}")
        layers = list(given)
        for layer in layers:
            is_number = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
            if not is_number or not 0 <= layer <= most:
                raise InvalidParameterError(f"{name} has the layer {safe_repr(layer)}, expected 0 to {most}")
        checked[name] = tuple(sorted({int(layer) for layer in layers}))
    return CaptureSpec(**checked)


def check_weights(spec: CaptureSpec, cfg: ModelConfig, *, has_window_cache: bool) -> None:
    """Raises UnsupportedError for attention weights that cannot be captured.

    The weights are not computed for latent attention; sinks take a share that belongs to no position; and a
    sliding-window cache no longer has the keys of the whole sequence.
    """
    if spec.attention and (cfg.latent is not None or cfg.attention_sinks):
        raise UnsupportedError(f"attention weights of {cfg.model_type!r} cannot be captured")
    for layer in spec.attention:
        if has_window_cache and cfg.layer_windows[layer] is not None:
            raise UnsupportedError(
                f"layer {layer} has a sliding-window cache, its attention weights cannot be captured; "
                "window_kv=False keeps all positions"
            )


def check_shape(name: str, given: jax.Array, meaning: str, *shapes: tuple[int, ...]) -> None:
    """Raises InvalidParameterError for an array of another shape, even one that a reshape would accept."""
    if given.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise InvalidParameterError(f"{name} has shape {list(given.shape)}, expected {meaning}: {expected}")

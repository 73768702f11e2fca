"""What a forward shows of its inside, and what is added to it on the way."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError, shown
from ferrum_jax.models.specs import ParamTree

Leaf = TypeVar("Leaf")
STEERING = "steering"  # the leaf of `model` that holds what is added, where there is one


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Which layers are to be seen.

    Args:
        hidden: hidden states after so many layers: 0 are the embeddings, L what the last layer gives, before the norm.
        attention: layers, from 0 to L-1, whose attention weights are wanted. They are computed beside the attention
            itself, all of them at once, which takes `heads * T * S` numbers a row.
    """

    hidden: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()


@flax.struct.dataclass
class Seen(Generic[Leaf]):
    """What was seen, by layer."""

    hidden: dict[int, Leaf]  # [X, D], in the activations' dtype
    attention: dict[int, tuple[Leaf, ...]]  # float32 [B, N, T, S] of each group of rows; S = M * C positions


def checked_watch(hidden: object, attention: object, cfg: ModelConfig) -> Watch:
    """Gives what is watched, each layer once, or raises InvalidParameter naming a layer that is not there."""
    wanted = {}
    last = cfg.num_hidden_layers - 1
    for name, given, most in (("hidden", hidden, last + 1), ("attention", attention, last)):
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise InvalidParameterError(f"{name} is {shown(given)}, expected layers from 0 to {most}")
        layers = list(given)
        for layer in layers:
            is_number = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
            if not is_number or not 0 <= layer <= most:
                raise InvalidParameterError(f"{name} has the layer {shown(layer)}, expected 0 to {most}")
        wanted[name] = tuple(sorted({int(layer) for layer in layers}))
    return Watch(**wanted)


def steered(params: ParamTree, steering: jax.Array) -> ParamTree:
    """Gives parameters with vectors that are added to what each layer gives: `[L, D]`, or `[L, X, D]` for each token.

    Like every parameter they are an argument of a step: other vectors compile nothing.

    Raises:
        InvalidParameterError: the vectors have another shape.
    """
    width = params["model"]["norm"]["weight"].shape[-1]
    if steering.ndim not in (2, 3) or steering.shape[-1] != width:
        raise InvalidParameterError(
            f"steering has shape {list(steering.shape)}, expected [L, {width}] or [L, X, {width}]"
        )
    return params | {"model": params["model"] | {STEERING: steering}}


def added(params: ParamTree, cfg: ModelConfig, num_tokens: int) -> jax.Array | None:
    """Gives what is to be added after each layer, `[L, 1 or X, D]`, None where there is nothing.

    Raises:
        InvalidParameterError: it is for other layers or another number of tokens than there are.
    """
    found = params["model"].get(STEERING)
    if found is None:
        return None
    if found.shape[0] != cfg.num_hidden_layers:
        raise InvalidParameterError(f"steering is for {found.shape[0]} layers, the model has {cfg.num_hidden_layers}")
    if found.ndim == 3 and found.shape[1] not in (1, num_tokens):
        raise InvalidParameterError(f"steering of the parameters is for {found.shape[1]} tokens, here are {num_tokens}")
    return found[:, None] if found.ndim == 2 else found


def summed(one: jax.Array, other: jax.Array | None) -> jax.Array:
    """Gives two steerings as one, `[L, 1 or X, D]` each, in float32: rounded where it is added, once."""
    return one if other is None else one.astype(jnp.float32) + other.astype(jnp.float32)


def add(x: jax.Array, steering: jax.Array | None, layer: int) -> jax.Array:
    """Adds a layer's vector to what it gave, in float32, rounded once."""
    return x if steering is None else (x.astype(jnp.float32) + steering[layer].astype(jnp.float32)).astype(x.dtype)

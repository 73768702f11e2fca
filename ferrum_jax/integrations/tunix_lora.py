"""LoRA of qwix in tunix's models: its matrices as those of an adapter, and how they are scaled."""

# pyright: reportMissingImports=false
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from qwix import LoraProvider

from ferrum_jax.contract.checks import listed
from ferrum_jax.contract.errors import ConfigError, UnsupportedError
from ferrum_jax.weights.foreign import Move

LORA = ("_lora_a", "_lora_b")  # ends of the paths of the two matrices, after that of their weight


def adapter_of(
    leaves: Mapping[str, jax.Array], moves: Sequence[Move], scales: Mapping[str, float]
) -> dict[str, jax.Array]:
    """Converts pairs of LoRA's matrices into those of PEFT, by its names; the scale is part of the second.

    Raises:
        UnsupportedError: LoRA of something that is not a whole weight here, or several of them.
    """
    whole = {
        move.path for move in moves if all(count == 1 for _, count in move.ours.parts) and len(move.ours.axes) == 2
    }
    if others := sorted(scales.keys() - whole):
        raise UnsupportedError(f"LoRA of {listed(others, ', ')} is not supported")
    found = {}
    for move in (one for one in moves if one.path in scales):
        a, b = (leaves[move.path + half] for half in LORA)
        outputs, inputs = (axis.letters for axis in move.ours.axes)
        is_input = [bool(axis.letters) and set(axis.letters) <= set(inputs) for axis in move.theirs.axes]
        down = _one_axis(a, move, is_input, inputs)
        up = _one_axis(jnp.moveaxis(b, 0, -1), move, [not one for one in is_input], outputs)
        name = "base_model.model." + move.name.removesuffix(".weight")
        found[f"{name}.lora_A.weight"] = down.T
        found[f"{name}.lora_B.weight"] = up.astype(jnp.float32) * (scales[move.path] * move.scale)
    return found


def _one_axis(half: jax.Array, move: Move, own: Sequence[bool], letters: Sequence[str]) -> jax.Array:
    """Brings those axes of a weight that a matrix has, before that of the rank, into one, in the order of `letters`."""
    sizes = dict(zip(move.ours.letters, move.ours.sizes, strict=True))
    box = tuple(slice(start, start + length) for start, length in itertools.compress(move.theirs.spans, own))
    there = [letter for axis in itertools.compress(move.theirs.axes, own) for letter in axis.letters]
    half = half[box].reshape(*(sizes[letter] for letter in there), half.shape[-1])
    order = [there.index(letter) for letter in letters]
    return half.transpose(*order, len(there)).reshape(-1, half.shape[-1])


def lora_scales(model: nnx.Module, leaves: Mapping[str, jax.Array], asked: float | None) -> dict[str, float]:
    """Maps weights with LoRA to alpha / rank: what is asked for, or what qwix's rules say."""
    paths = [path.removesuffix(LORA[0]) for path in leaves if path.endswith(LORA[0])]
    if not paths or asked is not None:
        return dict.fromkeys(paths, float(asked or 0))
    provider = _provider(type(model).__call__)
    if provider is None:
        raise ConfigError("this model's LoRA is not qwix's: give lora_scale, its alpha / rank")
    found = {}
    for path in paths:
        module = path.rpartition(".")[0].replace(".", "/")
        rule: Any = next(rule for rule in provider._rules if re.fullmatch(rule.module_path, module))
        found[path] = rule.alpha / rule.rank
    return found


def _provider(function: Any, depth: int = 8) -> LoraProvider | None:
    """Finds the provider that qwix has wrapped into a method, of which it keeps no other record."""
    if isinstance(function, LoraProvider):
        return function
    inner: list[Any] = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if isinstance(function, functools.partial):
        inner += [function.func, *function.args]
    inner += [getattr(function, "__self__", None)]
    found = (_provider(one, depth - 1) for one in inner if depth and one is not None)
    return next((one for one in found if one is not None), None)

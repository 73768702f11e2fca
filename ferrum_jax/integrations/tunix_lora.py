"""Conversion of qwix's LoRA in tunix's models to an adapter, and its scale."""

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

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import check_no_problems, differences, listed
from ferrum_jax.contract.errors import ConfigError, UnsupportedError
from ferrum_jax.models import adapters
from ferrum_jax.models.adapters import PROJECTIONS
from ferrum_jax.weights.foreign import Move

LORA = ("_lora_a", "_lora_b")  # suffixes that make the paths of the two matrices from their weight's path


def split_lora(leaves: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Splits leaves into LoRA's matrices and the base weights."""
    lora = {path: leaf for path, leaf in leaves.items() if path.endswith(LORA)}
    return lora, {path: leaf for path, leaf in leaves.items() if path not in lora}


def adapter_of(
    leaves: Mapping[str, jax.Array], moves: Sequence[Move], scales: Mapping[str, float], cfg: ModelConfig
) -> dict[str, jax.Array]:
    """Converts LoRA's pairs of matrices to PEFT's, with PEFT's names; the second matrix includes the scale.

    Raises:
        UnsupportedError: LoRA is on a weight that is not made of whole projections that can have adapters here.
        InvalidParameterError: a matrix has a wrong shape.
    """
    known = adapters.projections(cfg)
    whole = [
        move for move in moves
        if move.name.removesuffix(".weight") in known and all(count == 1 for _, count in move.ours.parts)
    ]  # fmt: skip
    if others := sorted(scales.keys() - {move.path for move in whole}):
        raise UnsupportedError(
            f"LoRA of {listed(others, ', ')} is not supported: those of {', '.join(PROJECTIONS)} are"
        )
    chosen = [move for move in whole if move.path in scales]
    wanted = {}
    for move in chosen:
        rank = leaves[move.path + LORA[0]].shape[-1]
        sizes = [
            [size for size, own in zip(move.theirs.shape, _is_input(move), strict=True) if own is half]
            for half in (True, False)
        ]
        wanted |= {move.path + LORA[0]: [*sizes[0], rank], move.path + LORA[1]: [rank, *sizes[1]]}
    given = {path: list(leaf.shape) for path, leaf in leaves.items() if path in wanted}
    check_no_problems("these weights cannot be set", differences(given, wanted))
    found = {}
    for move in chosen:
        a, b = (leaves[move.path + half] for half in LORA)
        outputs, inputs = (axis.letters for axis in move.ours.axes)
        is_input = _is_input(move)
        down = _one_axis(a, move, is_input, inputs)
        up = _one_axis(jnp.moveaxis(b, 0, -1), move, [not one for one in is_input], outputs)
        name = "base_model.model." + move.name.removesuffix(".weight")
        found[f"{name}.lora_A.weight"] = down.T
        found[f"{name}.lora_B.weight"] = up.astype(jnp.float32) * (scales[move.path] * move.scale)
    return found


def _is_input(move: Move) -> list[bool]:
    """Returns for each axis of tunix's weight whether a product sums over it."""
    inputs = set(move.ours.axes[-1].letters)
    return [bool(axis.letters) and set(axis.letters) <= inputs for axis in move.theirs.axes]


def _one_axis(half: jax.Array, move: Move, own: Sequence[bool], letters: Sequence[str]) -> jax.Array:
    """Merges a matrix's axes, except the rank's at the end, into one, in the order of `letters`: `[size, rank]`."""
    sizes = dict(zip(move.ours.letters, move.ours.sizes, strict=True))
    box = tuple(slice(start, start + length) for start, length in itertools.compress(move.theirs.spans, own))
    there = [letter for axis in itertools.compress(move.theirs.axes, own) for letter in axis.letters]
    half = half[box].reshape(*(sizes[letter] for letter in there), half.shape[-1])
    order = [there.index(letter) for letter in letters]
    return half.transpose(*order, len(there)).reshape(-1, half.shape[-1])


def lora_scales(model: nnx.Module, leaves: Mapping[str, jax.Array], asked: float | None) -> dict[str, float]:
    """Maps paths of weights with LoRA to alpha / rank: the value asked for, or that of qwix's rules."""
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
    """Finds the provider that qwix has wrapped into a method; qwix stores it nowhere else."""
    if isinstance(function, LoraProvider):
        return function
    inner: list[Any] = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if isinstance(function, functools.partial):
        inner += [function.func, *function.args]
    inner += [getattr(function, "__self__", None)]
    found = (_provider(one, depth - 1) for one in inner if depth and one is not None)
    return next((one for one in found if one is not None), None)

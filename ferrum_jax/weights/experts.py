"""Experts, whose products a parameter tree keeps as one leaf, `[E, out, in]`.

Checkpoints store them one by one, or as one with its axes in another order.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.models.specs import ParamSpec


def names_apart(name: str, spec: ParamSpec) -> tuple[str, ...]:
    """Gives the names under which each expert's part of a leaf is stored; none for a leaf that is stored whole."""
    if spec.axes[0] != "expert" or spec.stored is not None:
        return ()
    return tuple(name.replace(".experts.", f".experts.{index}.") for index in range(spec.shape[0]))


def stored_apart(wanted: Mapping[str, ParamSpec], found: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Says which leaves are stored expert by expert, and under which names: those that are not found whole."""
    apart = {name: names_apart(name, spec) for name, spec in wanted.items() if name not in found}
    return {name: parts for name, parts in apart.items() if parts}


def specs_apart(wanted: Mapping[str, ParamSpec], apart: Mapping[str, tuple[str, ...]]) -> dict[str, ParamSpec]:
    """Describes the tensors of a checkpoint, given the leaves and which of them are stored expert by expert."""
    specs = {}
    for name, spec in wanted.items():
        each = ParamSpec(spec.shape[1:], spec.axes[1:], spec.init, spec.dtype)
        specs |= dict.fromkeys(apart[name], each) if name in apart else {name: spec}
    return specs


def stored_axes(wanted: Mapping[str, ParamSpec]) -> dict[str, tuple[int, ...]]:
    """Maps the leaves that a Hugging Face folder has whole, but in its own order of axes, to that order."""
    return {name: spec.stored for name, spec in wanted.items() if spec.stored is not None}


def refuse_kept(formats: Collection[str], wanted: Mapping[str, ParamSpec]) -> None:
    """Raises UnsupportedError where experts, by the names they are stored under, would be kept as they are."""
    for name, spec in wanted.items():
        if any(part in formats for part in names_apart(name, spec)):
            raise UnsupportedError(
                f"{name}: experts cannot be kept quantised; without quantize='keep' they are dequantised"
            )


def stack_in_turn(parts: Iterator[Any], count: int) -> Any:
    """Stacks `count` arrays, or trees of them, on the host; no more than one is held beside the stack."""
    stack = None
    for index, part in enumerate(parts):
        if stack is None:
            stack = jax.tree.map(lambda leaf: np.empty((count, *leaf.shape), leaf.dtype), part)
        jax.tree.map(lambda whole, leaf, at=index: whole.__setitem__(at, leaf), stack, part)
    return stack

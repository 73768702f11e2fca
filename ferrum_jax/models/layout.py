"""Layouts of a model's parameters: the checkpoint's own, and two that serve faster or compile faster.

`checkpoint` has a leaf for every tensor, with the tensor's name. In `fused`, projections of the same input share one
weight: q, k and v, and gate and up, concatenated along their outputs. `scanned` is fused, with the leaves of all layers
stacked `[L, ...]`: the forward is then one loop over the layers, which compiles in a fraction of the time.

The forward takes any layout and recognises it by the structure of the tree. Conversions are pure and exact.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.config import LAYOUTS, ModelConfig
from ferrum_jax.contract.checks import check_no_problems, differences
from ferrum_jax.contract.errors import InvalidParameterError, UnsupportedError
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import (
    ParamSpec,
    ParamTree,
    as_plain,
    is_spec,
    is_weight_spec,
    map_specs,
    named_leaves,
    shape_of_numbers,
)
from ferrum_jax.ops.quantised import is_quantised
from ferrum_jax.sharding.types import take

CHECKPOINT, FUSED, SCANNED = LAYOUTS
FUSED_PARTS = {  # by block: name of the fused weight, and of its parts
    "self_attn": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "mlp": ("gate_up_proj", ("gate_proj", "up_proj")),
}
Stack = Callable[[Iterator[Any], int], Any]  # stacks trees of one structure, given an iterator and their number


@dataclass(frozen=True)
class Recipe:
    """How one leaf is made of the checkpoint's leaves: parts of a layer are concatenated, then layers are stacked."""

    layers: tuple[tuple[str, ...], ...]  # names of the parts, by layer
    is_stacked: bool = False

    def make(self, get: Callable[[str], Any], join: Callable[..., Any], stack: Stack) -> Any:
        """Makes the leaf from checkpoint leaves, `get(name)`; `join` is the `concatenate` of NumPy or JAX."""
        rows = (self._make_layer(names, get, join) for names in self.layers)
        return stack(rows, len(self.layers)) if self.is_stacked else next(rows)

    def _make_layer(self, names: Sequence[str], get: Callable[[str], Any], join: Callable[..., Any]) -> Any:
        parts = [get(name) for name in names]
        self.check_alike(parts)
        return jax.tree.map(lambda *leaves: join(leaves), *parts) if len(parts) > 1 else parts[0]

    def check_alike(self, parts: Sequence[Any]) -> None:
        """Raises UnsupportedError unless all parts, arrays or shapes, are quantised alike or not at all."""
        kinds = {(jax.tree.structure(part), *((x.dtype, x.shape[1:]) for x in jax.tree.leaves(part))) for part in parts}
        if len(kinds) > 1:
            name = self.layers[0][0]
            raise UnsupportedError(
                f"{name} is kept in another form than the weights it is fused or stacked with: only the layout "
                f"{CHECKPOINT!r} can mix forms"
            )


def recipes(cfg: ModelConfig, layout: str) -> ParamTree:
    """Returns the tree of a layout, with a `Recipe` for every leaf."""
    tree = map_specs(lambda name, _: Recipe(((name,),)), family(cfg).param_specs(cfg))
    if layout == CHECKPOINT:
        return tree
    layers = [_fused(layer) for layer in tree["model"]["layers"]]
    if layout == SCANNED:
        if len({jax.tree.structure(layer) for layer in layers}) > 1:
            raise UnsupportedError(f"layout {SCANNED!r}: the layers of this {cfg.model_type} have different parameters")
        layers = jax.tree.map(lambda *rows: Recipe(tuple(row.layers[0] for row in rows), is_stacked=True), *layers)
    return tree | {"model": tree["model"] | {"layers": layers}}


def _fused(layer: ParamTree) -> ParamTree:
    """Fuses the parts of each block that has all of them; layers with latent attention stay as they are."""
    if "kv_b_proj" in layer["self_attn"]:
        return layer
    made = dict(layer)
    for block, (name, parts) in FUSED_PARTS.items():
        if made.get(block, {}).keys() >= set(parts):
            made[block] = dict(made[block])
            taken = [made[block].pop(part) for part in parts]
            made[block][name] = {leaf: Recipe((tuple(one[leaf].layers[0][0] for one in taken),)) for leaf in taken[0]}
    return made


def joinable(formats: Mapping[str, Any], cfg: ModelConfig, layout: str) -> dict[str, Any]:
    """Drops the formats of weights that a layout would fuse or stack with weights of another format."""
    found = dict(formats)
    for recipe in jax.tree.leaves(recipes(cfg, layout), is_leaf=lambda leaf: isinstance(leaf, Recipe)):
        names = [name for part in recipe.layers for name in part]
        if len({found.get(name) for name in names}) > 1:
            found = {name: form for name, form in found.items() if name not in names}
    return found


def layout_specs(specs: ParamTree, cfg: ModelConfig, layout: str) -> ParamTree:
    """Converts the specs of the checkpoint's tree, quantised or not, into those of a layout."""
    own = named_leaves(specs, is_weight_spec)

    def describe(recipe: Recipe) -> Any:
        recipe.check_alike([own[name] for names in recipe.layers for name in names])
        parts = [own[name] for name in recipe.layers[0]]
        return jax.tree.map(lambda *found: _spec_of(found, recipe), *parts, is_leaf=is_spec)

    return jax.tree.map(describe, recipes(cfg, layout))


def _spec_of(parts: Sequence[ParamSpec], recipe: Recipe) -> ParamSpec:
    first = parts[0]
    shape, axes = (sum(part.shape[0] for part in parts), *first.shape[1:]), first.axes
    joined = first.parts
    if len(parts) > 1:
        axes, joined = ("fused", *axes[1:]), tuple((part.axes[0], part.shape[0]) for part in parts)
    if recipe.is_stacked:
        shape, axes = (len(recipe.layers), *shape), ("layer", *axes)
    return replace(first, shape=shape, axes=axes, parts=joined)


def layout_of(params: ParamTree) -> str:
    """Returns the layout of a tree."""
    layers = as_plain(params["model"]["layers"])
    if isinstance(layers, dict):
        return SCANNED
    return FUSED if "qkv_proj" in layers[0]["self_attn"] else CHECKPOINT


def check_names(params: ParamTree, cfg: ModelConfig) -> None:
    """Raises InvalidParameterError unless a tree, in any layout, has exactly the parameter names of a model."""
    wanted = dict.fromkeys(named_leaves(recipes(cfg, _likely_layout(params))))
    _check_alike(dict.fromkeys(named_leaves(params, is_quantised)), wanted, cfg)


def check_shapes(params: ParamTree, cfg: ModelConfig) -> None:
    """As `check_names`, and raises InvalidParameterError unless every parameter has the shape of the model's."""
    specs = named_leaves(layout_specs(family(cfg).param_specs(cfg), cfg, _likely_layout(params)))
    given = {name: shape_of_numbers(leaf) for name, leaf in named_leaves(params, is_quantised).items()}
    _check_alike(given, {name: str(list(spec.shape)) for name, spec in specs.items()}, cfg)


def _likely_layout(params: ParamTree) -> str:
    """Returns the layout of a tree; the checkpoint's for one that is no model's."""
    try:
        return layout_of(params)
    except (LookupError, TypeError, AttributeError):
        return CHECKPOINT


def _check_alike(given: dict[str, Any], wanted: dict[str, Any], cfg: ModelConfig) -> None:
    check_no_problems(f"these are not the parameters of this {cfg.model_type}", differences(given, wanted))


def lay_out(params: ParamTree, cfg: ModelConfig, layout: str) -> ParamTree:
    """Converts parameters from any layout to another; pure, so it may be jitted, donated to and differentiated.

    Leaves that do not change are shared; the others are copies.

    Raises:
        InvalidParameterError: there is no such layout, or the parameters are not this model's.
        UnsupportedError: weights to be fused or stacked are quantised in different ways.
    """
    if layout not in LAYOUTS:
        raise InvalidParameterError(f"layout is {layout!r}, expected {', '.join(LAYOUTS[:-1])} or {LAYOUTS[-1]}")
    params = as_plain(params)
    check_names(params, cfg)
    if layout_of(params) == layout:
        return params
    names = checkpoint_leaves(params, cfg)

    def convert(recipe: Recipe) -> Any:
        def stack(layers: Iterator[Any], _: int) -> Any:
            every = list(layers)
            recipe.check_alike(every)
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *every)

        return recipe.make(names.__getitem__, jnp.concatenate, stack)

    return jax.tree.map(convert, recipes(cfg, layout))


def checkpoint_leaves(params: ParamTree, cfg: ModelConfig) -> dict[str, Any]:
    """Converts a tree of any layout into a dict of the checkpoint's leaves by name; raises as `check_names`."""
    params = as_plain(params)
    check_names(params, cfg)
    layout = layout_of(params)
    own: dict[str, ParamSpec] = named_leaves(family(cfg).param_specs(cfg))
    leaves: dict[str, Any] = {}

    def split_leaf(recipe: Recipe, leaf: Any) -> None:
        for index, names in enumerate(recipe.layers):
            row = jax.tree.map(lambda part, at=index: take(part, at), leaf) if recipe.is_stacked else leaf
            leaves.update(zip(names, _split(row, [own[name].shape[0] for name in names]), strict=True))

    jax.tree.map(split_leaf, recipes(cfg, layout), params)
    return leaves


def _split(leaf: Any, sizes: Sequence[int]) -> list[Any]:
    """Splits a leaf along its outputs."""
    if len(sizes) == 1:
        return [leaf]
    starts = np.cumsum([0, *sizes])
    return [jax.tree.map(lambda part, at=slice(*ends): take(part, at), leaf) for ends in pairwise(starts.tolist())]

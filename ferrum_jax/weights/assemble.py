"""Assembly of parameter trees from named tensors; every leaf is set exactly once."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import differences, listed
from ferrum_jax.contract.errors import InvalidFormatError
from ferrum_jax.models.division import PADDING, Reader, Runs
from ferrum_jax.models.layout import Recipe, checkpoint_leaves, layout_specs, recipes
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.quantisation import Format, Formats, formats_of, quantised_specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamSpec, ParamTree, from_names, is_weight_spec, map_specs, named_leaves
from ferrum_jax.ops.quantised import NARROW, QuantisedWeight, quantise_weight
from ferrum_jax.progress import track
from ferrum_jax.weights.huge_pages import DevicePlacer, stack_in_turn

PIECE = 1 << 18  # numbers quantised at a time, so that intermediates fit the cache


class TensorSource(Protocol):
    """A checkpoint: tensors by their Hugging Face names, whose shapes are known without reading them."""

    path: Path

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...  # noqa: D102

    def read(self, name: str) -> np.ndarray: ...  # noqa: D102

    def reader(self, name: str) -> Reader | None: ...  # noqa: D102  # None: the tensor can only be read whole


def assemble(
    source: TensorSource,
    cfg: ModelConfig,
    *,
    layout: str,
    dtype: str,
    placed: ModelPlacement,
    ignorable: Callable[[str], bool],
    formats: Formats = MappingProxyType({}),
    read_native: Callable[[str], QuantisedWeight[np.ndarray]] | None = None,
    progress: bool = False,
) -> ParamTree:
    """Reads every parameter, one tensor at a time, casts it to `dtype`, lays it out on the host and puts it on devices.

    The weights named in `formats` are quantised on the host from the checkpoint's numbers, or read by `read_native`;
    parameters with their own dtype are cast to that. Tensors that no parameter needs must be `ignorable`.

    Raises:
        InvalidFormatError: tensors are missing, unknown or of a wrong shape; the message lists all.
    """
    wanted: dict[str, ParamSpec] = named_leaves(family(cfg).param_specs(cfg))
    found = source.shapes()
    apart = stored_apart(wanted, found)
    check_tensors(source.path, found, specs_apart(wanted, apart), ignorable)

    def read_one(name: str, form: Format | None, dtype: str) -> np.ndarray | QuantisedWeight[np.ndarray]:
        if form is None:
            return source.read(name).astype(jnp.dtype(dtype), copy=False)
        if form.dtype in NARROW:
            return QuantisedWeight(source.read(name).astype(jnp.dtype(form.dtype), copy=False))
        return quantise_tensor(source.read(name), form) if read_native is None else read_native(name)

    def read(name: str) -> Any:
        form, own = formats.get(name), wanted[name].dtype or dtype
        if placed.division is not None and (form is None or form.dtype in NARROW):
            parts = apart.get(name, (name,))
            readers = [one for one in map(source.reader, parts) if one is not None]
            if len(readers) == len(parts):
                lazy = partial(read_cast, readers, own if form is None else form.dtype, name in apart)
                return lazy if form is None else QuantisedWeight(values=lazy)
        if name not in apart:
            return read_one(name, form, own)
        return stack_in_turn((read_one(part, form, own) for part in apart[name]), len(apart[name]))

    plain = quantised_specs(family(cfg).param_specs(cfg), formats)
    tree = recipes(cfg, layout)
    made: dict[str, Recipe] = named_leaves(tree)
    own, laid = (named_leaves(tree, is_weight_spec) for tree in (plain, layout_specs(plain, cfg, layout)))
    put = DevicePlacer(placed.placement.first)
    with track("reading weights")(made) if progress else nullcontext(made) as names:
        leaves = {name: put_recipe(made[name], read, placed, own, laid[name], put) for name in names}
    return from_names(tree, leaves)


def read_cast(parts: Sequence[Reader], dtype: str, is_stack: bool, runs: tuple[Runs, ...]) -> np.ndarray:
    """Reads runs of every dimension of a parameter, and casts them; a stack of experts has a part for each."""
    kind = jnp.dtype(dtype)
    if not is_stack:
        return parts[0](runs).astype(kind, copy=False)
    found = np.zeros([sum(count for _, count in own) for own in runs], kind)
    at = 0
    for start, count in runs[0]:
        for index in range(count if start != PADDING else 0):
            found[at + index] = parts[start + index](runs[1:])
        at += count
    return found


def put_recipe(
    recipe: Recipe,
    read: Callable[[str], Any],
    placed: ModelPlacement,
    own: Mapping[str, Any],
    laid: Any,
    put: DevicePlacer,
) -> Any:
    """Makes one leaf of a layout on its devices, from the checkpoint's leaves that `read` returns.

    `own` are the specs of the checkpoint's leaves by name, `laid` is the spec of the new leaf. `put` puts it on
    the only device of an undivided model.
    """
    if placed.division is None:
        made = recipe.make(read, np.concatenate, put.stack)
        return made if recipe.is_stacked else put(made)
    found = {name: read(name) for names in recipe.layers for name in names}

    def make(part: Callable[[Any, Any], Any]) -> Any:
        return recipe.make(lambda name: part(found[name], own[name]), np.concatenate, stack_in_turn)

    return placed.put(make, laid)


def lay_out_on_host(
    params: ParamTree, cfg: ModelConfig, layout: str, placed: ModelPlacement, specs: ParamTree
) -> ParamTree:
    """Lays out parameters on the host and puts them on their devices, without compiling anything.

    Each leaf is freed as soon as it is laid out, if `params` has no other reference. `specs` are those of the layout.
    """
    leaves = checkpoint_leaves(params, cfg)
    own = named_leaves(quantised_specs(family(cfg).param_specs(cfg), formats_of(leaves)), is_weight_spec)
    del params

    def take(name: str) -> Any:
        return jax.tree.map(np.asarray, leaves.pop(name))

    laid, put = named_leaves(specs, is_weight_spec), DevicePlacer(placed.placement.first)
    return map_specs(lambda name, recipe: put_recipe(recipe, take, placed, own, laid[name], put), recipes(cfg, layout))


def check_tensors(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, ParamSpec],
    ignorable: Callable[[str], bool] = lambda _: False,
) -> None:
    """Raises InvalidFormatError with every missing, unknown and wrongly shaped tensor of the checkpoint at `path`."""
    given = {name: list(shape) for name, shape in found.items() if name in wanted or not ignorable(name)}
    check_problems(path, differences(given, {name: list(spec.shape) for name, spec in wanted.items()}))


def check_problems(path: Path, problems: Sequence[str]) -> None:
    """Raises one InvalidFormatError for all `problems` of the file at `path`, if any; shortens a long list."""
    if problems:
        raise InvalidFormatError(f"{path}: {listed(problems)}")


def quantise_tensor(tensor: np.ndarray, form: Format) -> QuantisedWeight[np.ndarray]:
    """Quantises a matrix, or a stack of them, on the host, a piece of its rows at a time."""
    rows = max(1, PIECE // math.prod(tensor.shape[1:]))
    pieces = [
        quantise_weight(tensor[start : start + rows], form.dtype, form.groups)
        for start in range(0, tensor.shape[0], rows)
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *pieces)


# Experts: the parameter tree has one leaf `[E, out, in]`; checkpoints store each expert's matrix, or the stack with its
# axes in another order.


def stored_apart(wanted: Mapping[str, ParamSpec], found: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the leaves that are not found whole, hence stored expert by expert, with the names of their parts."""
    return {
        name: tuple(name.replace(".experts.", f".experts.{index}.") for index in range(spec.shape[0]))
        for name, spec in wanted.items()
        if name not in found and spec.axes[0] == "expert" and spec.stored is None
    }


def specs_apart(wanted: Mapping[str, ParamSpec], apart: Mapping[str, tuple[str, ...]]) -> dict[str, ParamSpec]:
    """Returns the specs of a checkpoint's tensors, given those of the leaves and which are stored expert by expert."""
    specs = {}
    for name, spec in wanted.items():
        each = ParamSpec(spec.shape[1:], spec.axes[1:], spec.init, spec.dtype)
        specs |= dict.fromkeys(apart[name], each) if name in apart else {name: spec}
    return specs


def stored_axes(wanted: Mapping[str, ParamSpec]) -> dict[str, tuple[int, ...]]:
    """Returns the order of axes of the leaves that a Hugging Face folder stores whole with axes in another order."""
    return {name: spec.stored for name, spec in wanted.items() if spec.stored is not None}

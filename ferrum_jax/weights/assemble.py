"""Parameter trees out of named tensors, every leaf set exactly once."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidFormatError
from ferrum_jax.models.layout import Recipe, checkpoint_leaves, recipes
from ferrum_jax.models.quantisation import Format, Formats
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamSpec, ParamTree, from_names, named_leaves
from ferrum_jax.ops.quantised import QuantisedWeight, quantise_weight
from ferrum_jax.progress import Track
from ferrum_jax.sharding.devices import JaxDevice
from ferrum_jax.weights.experts import specs_apart, stack_in_turn, stored_apart

LISTED = 8  # problems named in one error; the rest are counted
PIECE = 1 << 18  # numbers quantised at a time, so that those in between stay in the cache


class TensorSource(Protocol):
    """A checkpoint: tensors by their Hugging Face names."""

    path: Path

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, without reading any."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor."""
        ...


def assemble(
    source: TensorSource,
    cfg: ModelConfig,
    *,
    layout: str,
    dtype: str,
    device: JaxDevice,
    ignorable: Callable[[str], bool],
    formats: Formats = MappingProxyType({}),
    read_kept: Callable[[str], QuantisedWeight[np.ndarray]] | None = None,
    progress: bool = False,
) -> ParamTree:
    """Reads every parameter, one tensor at a time, cast to `dtype`, laid out on the host and put on `device`.

    The weights named in `formats` are quantised on the host, out of the numbers that the checkpoint has, or as
    `read_kept` gives them; parameters with a dtype of their own have that. `ignorable` says which tensors that no
    parameter wants may be left unread.

    Raises:
        InvalidFormatError: tensors are missing, unknown or of a wrong shape: all of them in one message.
    """
    wanted: dict[str, ParamSpec] = named_leaves(family(cfg).param_specs(cfg))
    found = source.shapes()
    apart = stored_apart(wanted, found)
    refuse_mismatched(source.path, found, specs_apart(wanted, apart), ignorable)

    def read_one(name: str, form: Format | None, kept: str) -> np.ndarray | QuantisedWeight[np.ndarray]:
        if form is None:
            return source.read(name).astype(jnp.dtype(kept), copy=False)
        return quantise_tensor(source.read(name), form) if read_kept is None else read_kept(name)

    def read(name: str) -> np.ndarray | QuantisedWeight[np.ndarray]:
        form, kept = formats.get(name), wanted[name].dtype or dtype
        if name not in apart:
            return read_one(name, form, kept)
        return stack_in_turn((read_one(part, form, kept) for part in apart[name]), len(apart[name]))

    tree = recipes(cfg, layout)
    made: dict[str, Recipe] = named_leaves(tree)
    names = Track("reading weights")(made) if progress else made
    leaves = {name: jax.device_put(made[name].make(read, np.concatenate, np.stack), device) for name in names}
    return from_names(tree, leaves)


def lay_out_on_host(params: ParamTree, cfg: ModelConfig, layout: str, device: JaxDevice) -> ParamTree:
    """Lays out parameters that lie on the host and puts them on `device`; nothing is compiled for it.

    What was laid out is let go at once, if nobody else holds `params`.
    """
    leaves = checkpoint_leaves(params, cfg)
    del params

    def take(name: str) -> Any:
        return jax.tree.map(np.asarray, leaves.pop(name))

    def put(recipe: Recipe) -> Any:
        return jax.device_put(recipe.make(take, np.concatenate, np.stack), device)

    return jax.tree.map(put, recipes(cfg, layout))


def refuse_mismatched(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, ParamSpec],
    ignorable: Callable[[str], bool] = lambda _: False,
) -> None:
    """Raises one error that names every missing, unknown and wrongly shaped tensor of the checkpoint at `path`."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(spec.shape)}"
        for name, spec in wanted.items()
        if name in found and tuple(found[name]) != spec.shape
    ]
    problems += [f"{name} is unknown" for name in found if name not in wanted and not ignorable(name)]
    refuse_listed(path, problems)


def refuse_listed(path: Path, problems: Sequence[str]) -> None:
    """Raises one error for all `problems` of the file at `path`, if there are any; a long list is counted."""
    if problems:
        rest = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        raise InvalidFormatError(f"{path}: {'; '.join(problems[:LISTED])}{rest}")


def quantise_tensor(tensor: np.ndarray, form: Format) -> QuantisedWeight[np.ndarray]:
    """Quantises a matrix, or a stack of them, on the host, a piece of its rows at a time."""
    rows = max(1, PIECE // math.prod(tensor.shape[1:]))
    pieces = [
        quantise_weight(tensor[start : start + rows], form.dtype, form.groups)
        for start in range(0, tensor.shape[0], rows)
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *pieces)

"""Parameter specs: trees of shapes, logical axes and initialisers, which exist before the values do.

The path of a leaf, joined by dots, is its name in a Hugging Face checkpoint.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.meta import AxisMetadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ferrum_jax.config.engine import MESH_AXES
from ferrum_jax.contract.errors import ConfigError
from ferrum_jax.ops.quantised import QuantisedWeight, is_quantised
from ferrum_jax.sharding.mesh import EXPERT, MODEL

ParamTree = dict[str, Any]  # nested dicts and lists whose leaves are arrays, ParamSpecs or shapes, quantised or not
NewParams = ParamTree | Callable[[ParamTree], ParamTree]  # a tree, or a function of the served one
RULES: Mapping[str, str | None] = {  # the mesh axis that divides each logical axis; None: no axis does
    **dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "mlp_pairs"), MODEL),
    "expert": EXPERT,
    "fused": None,  # dividing it would separate the fused parts
    **dict.fromkeys(("router", "latent", "embed", "sum", "head", "layer", "adapter", "rank", "group")),
}


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape and the logical axis of each dimension."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str = "normal"  # or "ones", "zeros"
    dtype: str | None = None  # None: the dtype of the activations
    parts: tuple[tuple[str, int], ...] = ()  # logical axis and size of each part of a `fused` axis
    stored: tuple[int, ...] | None = None  # for experts stored as one tensor: the tensor's axis for each axis here


def norm_specs(size: int, axis: str = "embed", init: str = "ones") -> ParamTree:
    """Spec of the weight of a norm over `size` numbers."""
    return {"weight": ParamSpec((size,), (axis,), init)}


def is_spec(leaf: Any) -> bool:
    """True for the spec of one array: an `is_leaf` for `jax.tree`."""
    return isinstance(leaf, ParamSpec)


def is_weight_spec(leaf: Any) -> bool:
    """True for the spec of one parameter, which if quantised is several arrays: an `is_leaf` for `jax.tree`."""
    return isinstance(leaf, (ParamSpec, QuantisedWeight))


def as_plain(tree: Any) -> Any:
    """Returns a tree of dicts and lists for one of any mappings and sequences; itself if it is one.

    A mapping whose keys are 0, 1 and so on, numbers or their names, becomes a list. Boxes of one array, such as Flax's
    `nn.Partitioned` and `nnx.Variable`, are opened.
    """
    if isinstance(tree, AxisMetadata):
        return as_plain(tree.unbox())
    if isinstance(tree, Mapping):
        made: Any = {key: as_plain(value) for key, value in tree.items()}
        is_same = type(tree) is dict and all(made[key] is value for key, value in tree.items())
        by_name = {str(key): value for key, value in made.items()}
        if made and by_name.keys() == set(map(str, range(len(made)))):
            return [by_name[str(index)] for index in range(len(made))]
    elif isinstance(tree, (list, tuple)):
        made = [as_plain(value) for value in tree]
        is_same = type(tree) is list and all(mine is theirs for mine, theirs in zip(made, tree, strict=True))
    else:
        leaves = [] if is_quantised(tree) else jax.tree.leaves(tree)
        return leaves[0] if len(leaves) == 1 else tree
    return tree if is_same else made


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] = is_spec) -> dict[str, Any]:
    """Maps checkpoint names to the leaves of any tree."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]}


def name_of(path: tuple[Any, ...]) -> str:
    """Joins a pytree path by dots, as checkpoints name it; leaves out the keys that `nnx.Variable` adds at the end."""
    parts: list[str] = []
    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name in ("value", "raw_value"):
        path = path[:-1]
    for key in path:
        own = next(getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind))
        parts += map(str, own if isinstance(own, tuple) else [own])
    return ".".join(parts)


def from_names(specs: ParamTree, leaves: dict[str, Any]) -> ParamTree:
    """Builds a tree like `specs` from leaves by checkpoint name.

    Raises:
        KeyError: a name is missing.
    """
    return map_specs(lambda name, _: leaves[name], specs)


def map_specs(function: Any, specs: ParamTree) -> ParamTree:
    """Applies `function(name, spec)` to every parameter."""
    return jax.tree_util.tree_map_with_path(lambda path, spec: function(name_of(path), spec), specs, is_leaf=is_spec)


def shapes(specs: ParamTree, dtype: str) -> ParamTree:
    """Returns the tree of `jax.ShapeDtypeStruct`s, for lowering."""
    return map_specs(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or dtype)), specs)


def shardings(specs: ParamTree, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> ParamTree:
    """Returns the sharding of every parameter on a mesh, for `jax.device_put` of the whole tree."""
    return map_specs(lambda name, spec: partition(name, spec.shape, spec.axes, mesh, rules), specs)


def partition(
    name: str,
    shape: tuple[int, ...],
    logical_axes: tuple[str, ...],
    mesh: Mesh,
    rules: Mapping[str, str | None] = RULES,
) -> NamedSharding:
    """Returns the sharding of one parameter on a mesh, given the logical axis of each of its dimensions.

    This is for research code with its own mesh: serving divides models by models/division.py, which pads and copies.
    `rules` name the mesh axis of each logical axis. None replicates, and so does an axis of `MESH_AXES` that
    the mesh lacks.

    Raises:
        ConfigError: a rule is missing, names an axis that neither the mesh nor `MESH_AXES` has, or does not divide a
            dimension.
    """
    axes = []
    for size, logical in zip(shape, logical_axes, strict=True):
        if logical not in rules:
            raise ConfigError(f"{name}: no rule for the logical axis {logical!r}")
        axis = rules[logical]
        if axis not in mesh.shape:
            if axis not in (None, *MESH_AXES):
                raise ConfigError(f"{name}: {logical} goes to the axis {axis!r}, the mesh has {tuple(mesh.shape)}")
            axis = None
        if axis is not None and size % mesh.shape[axis]:
            raise ConfigError(
                f"{name}: {logical} has {size}, which {mesh.shape[axis]} devices do not divide: "
                f"the rule {{{logical!r}: None}} replicates it"
            )
        axes.append(axis)
    return NamedSharding(mesh, PartitionSpec(*axes))


def shape_of_numbers(leaf: Any) -> str:
    """Returns an array's shape, and what it holds where that is not floating-point numbers or a quantised weight."""
    shape, dtype = str(list(np.shape(leaf))), getattr(leaf, "dtype", None)
    if is_quantised(leaf) or (dtype is not None and jnp.issubdtype(dtype, jnp.floating)):
        return shape
    return f"{shape} of {type(leaf).__name__ if dtype is None else dtype} (not floating-point)"


def num_parameters(specs: ParamTree) -> int:
    """Counts the numbers of all parameters."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(shapes(specs, "float32")))


def num_bytes(specs: ParamTree, dtype: str) -> int:
    """Counts the bytes of all parameters; those without their own dtype are in `dtype`."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes(specs, dtype)))


def initialise(specs: ParamTree, key: jax.Array, dtype: str, scale: float = 0.02) -> ParamTree:
    """Draws random weights: normal with standard deviation `scale`, ones for norms, zeros for biases.

    A parameter's values depend only on the key, its name and shape: families with equal parameters draw equal values.
    """
    return map_specs(lambda name, spec: draw(name, spec, key, dtype, scale), specs)


def draw(name: str, spec: ParamSpec, key: jax.Array, dtype: str, scale: float = 0.02) -> jax.Array:
    """Draws one parameter, as `initialise` does, in its own dtype if it has one."""
    dtype = spec.dtype or dtype
    if spec.init == "ones":
        return jnp.ones(spec.shape, dtype)
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, dtype)
    own = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return (jax.random.normal(own, spec.shape, jnp.float32) * scale).astype(dtype)

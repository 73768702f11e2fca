"""What the types of arrays say of a caller's mesh, and how a model's operations stay valid under it.

Under a mesh with explicit axes every array's type has its sharding, and an operation whose result could be divided in
several ways is refused. Inside `jax.shard_map` a type has the manual axes over which an array varies, and branches and
loops are refused whose sides differ in them. With other meshes, or none, the functions here do nothing.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

P = ParamSpec("P")
T = TypeVar("T")


def promoting_ranks(function: Callable[P, T]) -> Callable[P, T]:
    """Lets a function broadcast arrays of fewer axes, whatever `jax_numpy_rank_promotion` the caller has set."""

    @functools.wraps(function)
    def promoting(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return promoting


def varying_axes(*trees: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which any array of some trees varies."""
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(trees)))


def vary(tree: T, axes: frozenset[str]) -> T:
    """Returns a tree whose arrays vary over these manual axes as well; numbers stay what they are."""

    def cast(leaf: Any) -> Any:
        missing = axes - varying_axes(leaf) if hasattr(leaf, "dtype") else None
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, tree) if axes else tree


def vary_like(tree: T, *others: Any) -> T:
    """Returns a tree whose arrays vary over the manual axes of the others' arrays as well."""
    return vary(tree, varying_axes(others))


def vary_alike(*trees: Any) -> tuple[Any, ...]:
    """Returns trees all of whose arrays vary over the same manual axes: those of any of them.

    Where an array that is equal on all devices meets one that varies, JAX casts it; the gradient of that cast is a sum
    over devices. In a branch that only some devices take, the sum would wait for the others without end: so this casts
    before the branch.
    """
    return vary(trees, varying_axes(trees))


def explicit_mesh(*trees: Any) -> AbstractMesh | None:
    """Returns the caller's mesh if it has explicit axes: that of the context, or else of any array of the trees."""
    meshes = [jax.sharding.get_abstract_mesh()]
    if meshes[0].empty:
        meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(trees)]
    found = next((mesh for mesh in meshes if not mesh.empty), None)
    return found if found is not None and explicit_axes(found) else None


def explicit_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """Returns the names of a mesh's explicit axes."""
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit)


def partition_of(array: Any) -> PartitionSpec:
    """Returns the partition spec in an array's type, which names explicit axes alone."""
    return jax.typeof(array).sharding.spec


def with_auto_axes(function: Callable[..., T], *arguments: Any, out_specs: Any, mesh: AbstractMesh | None = None) -> T:
    """Calls a function inside which the compiler divides what it computes, over the explicit axes of a mesh.

    The mesh is the caller's if None; where that has no explicit axes, the function is called as it is. `out_specs` says
    how results are divided afterwards: one `PartitionSpec`, or a tree of them that is a prefix of the function's.
    """
    mesh = explicit_mesh(*arguments) if mesh is None else mesh
    if mesh is None:
        return function(*arguments)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
    compute: Any = jax.sharding.auto_axes(function, axes=explicit_axes(mesh), out_sharding=shardings)
    return compute(*arguments)


def dividing(shape: Sequence[int], spec: Sequence[Any], mesh: AbstractMesh) -> PartitionSpec:
    """Returns a spec without the mesh axes that do not divide their dimension evenly."""

    def divides(size: int, names: Any) -> bool:
        return size % math.prod(mesh.shape[name] for name in (names if isinstance(names, tuple) else (names,))) == 0

    pairs = zip(shape, spec, strict=True)
    return PartitionSpec(*(names if names is None or divides(size, names) else None for size, names in pairs))


def take(array: Any, at: int | slice) -> Any:
    """Returns `array[at]`, along the first axis, divided like `array` where the explicit axes divide it evenly."""
    mesh = explicit_mesh(array) if isinstance(array, jax.Array) else None
    if mesh is None:
        return array[at]
    spec = (*partition_of(array), *(None,) * array.ndim)[: array.ndim]
    shape = array.shape[1:] if isinstance(at, int) else (len(range(*at.indices(len(array)))), *array.shape[1:])
    out = dividing(shape, spec[1:] if isinstance(at, int) else spec, mesh)
    return with_auto_axes(lambda own: own[at], array, out_specs=out, mesh=mesh)

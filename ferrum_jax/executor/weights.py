"""Checks of weights that are to be served, or to replace the served ones in compiled steps."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import check_no_problems, differences
from ferrum_jax.contract.errors import InvalidParameterError, ResourceExhaustedError, UnsupportedError
from ferrum_jax.models.layout import lay_out, layout_of, layout_specs
from ferrum_jax.models.quantisation import formats_of, quantised_specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamSpec, ParamTree, name_of, named_leaves
from ferrum_jax.ops.quantised import QuantisedWeight, is_packed, is_quantised
from ferrum_jax.sharding.devices import JaxDevice
from ferrum_jax.sharding.mesh import joined

_convert = jax.jit(lay_out, static_argnames=("cfg", "layout"))


def strongly_typed(params: ParamTree) -> ParamTree:
    """Returns the same parameters without weak types, such as `jnp.full(8, 1.0)` has; the tree itself without any."""

    def is_weak(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and not leaf.is_deleted() and getattr(leaf, "weak_type", False)

    if not any(map(is_weak, jax.tree.leaves(params))):
        return params
    return jax.tree.map(lambda leaf: lax.convert_element_type(leaf, leaf.dtype) if is_weak(leaf) else leaf, params)


def served_shapes(params: ParamTree) -> ParamTree:
    """Returns shape, dtype and sharding of every array of a tree, which remain when the arrays are donated."""

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(describe, params)


def check_same_shapes(params: ParamTree, instead_of: ParamTree) -> None:
    """Raises InvalidParameterError unless two trees differ in values alone; the message names what differs.

    `instead_of` are arrays, or their `served_shapes`.
    """
    given, there = (
        {name: _described(leaf) for name, leaf in named_leaves(tree).items()} for tree in (params, instead_of)
    )
    _check_alike(given, there, params, instead_of)


@contextlib.contextmanager
def moving() -> Iterator[None]:
    """Raises ResourceExhaustedError where weights are moved within and the devices have too little memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as problem:
        raise ResourceExhaustedError(f"these weights cannot be moved to the devices that serve: {problem}") from problem


def brought_to(device: JaxDevice, params: ParamTree) -> ParamTree:
    """Returns parameters as whole arrays in a device's own memory; the tree itself if they lie there already.

    Arrays divided over devices are joined, and moved from device to device. Arrays in host memory, or in another order
    of axes than steps expect, are moved as well. Leaves that are no arrays, or deleted, stay as they are.

    Raises:
        UnsupportedError: an array lies on devices of other processes, too.
    """
    home = SingleDeviceSharding(device)

    def is_there(leaf: Any) -> bool:
        if not isinstance(leaf, jax.Array) or leaf.is_deleted() or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return True
        if leaf.sharding != home:
            return False
        return leaf.format.layout.major_to_minor == tuple(range(leaf.ndim))  # pyright: ignore[reportAttributeAccessIssue]

    def bring(leaf: Any) -> Any:
        if is_there(leaf):
            return leaf
        if not leaf.is_fully_addressable:
            raise UnsupportedError("these weights lie on devices of several processes, expected those of this one")
        moved = jax.device_put(joined(leaf, device), home)
        return moved if is_there(moved) else jax.device_put(moved, Format(None, home))

    return params if all(map(is_there, jax.tree.leaves(params))) else jax.tree.map(bring, params)


def laid_out_like(served: ParamTree, params: ParamTree, cfg: ModelConfig) -> ParamTree:
    """Returns parameters copied into the layout of the served ones; the tree itself if it has that layout, or none.

    The copy is one program, which the first call compiles.

    Raises:
        InvalidParameterError: they are not this model's, or not in the dtypes of the served ones.
        ResourceExhaustedError: there is no memory for the copy.
    """
    try:
        layout, given = layout_of(served), layout_of(params)
        there = served if layout == given else jax.eval_shape(lambda own: lay_out(own, cfg, given), served)
    except (LookupError, TypeError, AttributeError, UnsupportedError):  # `check_same_shapes` describes what differs
        return params
    if layout == given:
        return params
    _check_alike(_shapes_of(params), _shapes_of(there), params, there)
    try:
        return jax.block_until_ready(_convert(params, cfg, layout))
    except jax.errors.JaxRuntimeError as problem:
        raise ResourceExhaustedError(
            f"a copy of these weights in layout {layout!r} cannot be made: {problem}"
        ) from problem


def check_like_specs(params: ParamTree, specs: ParamTree, instead_of: ParamTree) -> None:
    """Raises InvalidParameterError unless a tree has the leaves of `specs`, in the dtypes of `instead_of`."""
    with contextlib.suppress(LookupError, TypeError, AttributeError):  # a tree without a layout is described below
        layout, wanted = layout_of(params), layout_of(instead_of)
        if layout != wanted:
            raise InvalidParameterError(
                f"these weights cannot be set: their layout is {layout!r}, expected {wanted!r} as on the mesh: "
                f"models.layout.lay_out(params, cfg, {wanted!r}) converts them"
            )
    given = _shapes_of(params)
    dtypes = {name: leaf.dtype for name, leaf in named_leaves(instead_of).items()}
    wanted = {name: f"{dtypes[name]}{list(spec.shape)}" for name, spec in named_leaves(specs).items()}
    check_no_problems("these weights cannot be set", differences(given, wanted, "is"))


def check_fits_config(params: ParamTree, cfg: ModelConfig, layout: str) -> None:
    """Raises InvalidParameterError unless a tree has a model's parameters in a layout, as arrays or quantised."""
    wanted = named_leaves(layout_specs(family(cfg).param_specs(cfg), cfg, layout))
    paths = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantised)[0]
    quantised = {name_of(path): leaf for path, leaf in paths if is_quantised(leaf)}
    for name, leaf in quantised.items():
        if not getattr(leaf.values, "ndim", 0):
            what = "missing" if leaf.values is None else "one number"
            raise InvalidParameterError(f"{name}.values is {what}, expected the matrix of a quantised weight")
    given = {name_of(path): list(leaf.shape) for path, leaf in paths}
    plain = {name_of(path): leaf.dtype for path, leaf in paths if not is_quantised(leaf)}
    problems = differences(given, {name: list(spec.shape) for name, spec in wanted.items()}, "has shape")
    problems += [
        f"{name} is {dtype}, expected floating-point numbers"
        for name, dtype in plain.items()
        if not jnp.issubdtype(dtype, jnp.floating)
    ]
    for name, leaf in quantised.items():
        if name in wanted and leaf.shape == wanted[name].shape:
            problems += _problems_of(name, leaf, wanted[name])
    check_no_problems(f"these are not the parameters of this {cfg.model_type}", problems)


def _problems_of(name: str, weight: QuantisedWeight[jax.Array], spec: ParamSpec) -> list[str]:
    """Says what is wrong with the parts of a quantised weight, given the spec of the plain one."""
    if len(spec.shape) - ("expert" in spec.axes) - ("layer" in spec.axes) < 2:
        return [f"{name} is quantised, which only matrices can be"]
    for part, leaf in named_leaves({name: weight}).items():
        if not getattr(leaf, "ndim", 0):
            return [f"{part} is one number, expected an array with numbers for every row"]
    try:
        formats = formats_of({name: weight})
        wanted = named_leaves(quantised_specs({name: spec}, formats))
    except InvalidParameterError as problem:
        return [f"{name}: {problem}"]
    groups, columns = formats[name].groups, spec.shape[-1]
    evenly = 8 if weight.high is not None else 2 if is_packed(weight) else 1
    if columns % (groups * evenly):
        size = {8: "groups of a multiple of eight", 2: "groups of an even size", 1: "equal groups"}[evenly]
        return [f"{name}.scales has {groups} groups, into which {columns} columns cannot be divided: expected {size}"]
    expected = {part: f"{own.dtype}{list(own.shape)}" for part, own in wanted.items()}
    return differences(_shapes_of({name: weight}), expected, "is")


def _check_alike(given: dict[str, str], wanted: dict[str, str], params: ParamTree, instead_of: ParamTree) -> None:
    """Raises InvalidParameterError unless two trees have the same structure, and equal descriptions of leaves."""
    kept, plain = (any(map(is_quantised, jax.tree.leaves(tree, is_leaf=is_quantised))) for tree in (instead_of, params))
    hint = ", as those served are kept in fewer bits (load with quantize='none' to set others)" * (kept and not plain)
    check_no_problems(f"these weights cannot be set{hint}", differences(given, wanted, "is"))
    if jax.tree.structure(params) != jax.tree.structure(instead_of):
        raise InvalidParameterError("these weights cannot be set: their tree has another structure")


def _shapes_of(params: ParamTree) -> dict[str, str]:
    return {name: _shape_and_dtype(leaf) for name, leaf in named_leaves(params).items()}


def _described(leaf: object) -> str:
    found = _shape_and_dtype(leaf)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return found
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or leaf.sharding is None:
        return found
    return f"{found} on {', '.join(sorted(str(device) for device in leaf.sharding.device_set))}"


def _shape_and_dtype(leaf: object) -> str:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return f"a {type(leaf).__name__}"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "an array that was donated or deleted"
    return f"{leaf.dtype}{list(leaf.shape)}"

"""Checks of weights that are to be served, or to replace the served ones in compiled steps."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from ferrum_jax.config import DTYPES, ModelConfig
from ferrum_jax.contract.checks import check_no_problems, differences
from ferrum_jax.contract.errors import InvalidParameterError, ResourceExhaustedError, UnsupportedError
from ferrum_jax.models.layout import lay_out, layout_of, layout_specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamSpec, ParamTree, name_of, named_leaves
from ferrum_jax.ops.quantised import (
    FLOAT4,
    LARGEST,
    NARROW,
    QuantisedWeight,
    is_packed,
    is_quantised,
    values_dtype,
)
from ferrum_jax.sharding.devices import JaxDevice
from ferrum_jax.sharding.mesh import joined

_convert = jax.jit(lay_out, static_argnames=("cfg", "layout"))


def served_shapes(params: ParamTree) -> ParamTree:
    """Returns shape, dtype and sharding of every array of a tree, which remain when the arrays are donated."""

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)

    return jax.tree.map(describe, params)


def check_same_shapes(params: ParamTree, instead_of: ParamTree) -> None:
    """Raises InvalidParameterError unless two trees differ in values alone; the message names what differs.

    `instead_of` are arrays, or their `served_shapes`.
    """
    given, there = (
        {name: _described(leaf) for name, leaf in named_leaves(tree).items()} for tree in (params, instead_of)
    )
    _check_alike(given, there, params, instead_of)


def brought_to(device: JaxDevice, params: ParamTree) -> ParamTree:
    """Returns parameters as whole arrays in a device's own memory; the tree itself if they lie there already.

    Arrays divided over devices are joined, and moved from device to device. Arrays in host memory, or in another order
    of axes than steps expect, are moved as well. Leaves that are no arrays, or deleted, stay as they are.

    Raises:
        UnsupportedError: an array lies on devices of other processes, too.
    """
    home = SingleDeviceSharding(device)

    def is_there(leaf: Any) -> bool:
        if not isinstance(leaf, jax.Array) or leaf.is_deleted():
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
    if 0 in (leaf.values.ndim for leaf in quantised.values()):
        raise InvalidParameterError("the values of a quantised weight are one number, expected a matrix")
    given = {name_of(path): list(leaf.shape) for path, leaf in paths}
    plain = {name_of(path): leaf.dtype for path, leaf in paths if not is_quantised(leaf)}
    problems = differences(given, {name: list(spec.shape) for name, spec in wanted.items()}, "has shape")
    problems += [
        f"{name} is {dtype}, expected floating-point numbers"
        for name, dtype in plain.items()
        if not jnp.issubdtype(dtype, jnp.floating)
    ]
    for name, leaf in quantised.items():
        if name in wanted:
            problems += _problems_of(name, leaf, wanted[name])
    check_no_problems(f"these are not the parameters of this {cfg.model_type}", problems)


def _problems_of(name: str, weight: QuantisedWeight[jax.Array], spec: ParamSpec) -> list[str]:
    """Says what is wrong with the parts of a quantised weight."""
    if len(spec.shape) - ("expert" in spec.axes) - ("layer" in spec.axes) < 2:
        return [f"{name} is quantised, which only matrices can be"]
    dtype, scales, high = weight.values.dtype.name, weight.scales, weight.high
    parts: dict[str, Any] = {
        part: leaf for part, leaf in (("scales", scales), ("offsets", weight.offsets)) if leaf is not None
    }
    if dtype not in (known := (*LARGEST, *NARROW, "uint8")):
        return [f"{name}.values are {dtype}, expected {' or '.join(known)}"]
    if dtype in NARROW:
        more = parts if high is None else {**parts, "high": high}
        return [f"{name}.{part} is unknown, as values in {dtype} have none" for part in more]
    if scales is None:
        return [f"{name}.scales is missing, which values in {dtype} need"]
    if high is not None:
        columns = weight.shape[-1]
        shapes = [(*weight.shape[:-1], columns * more // 8) for more in (1, 2)]
        if dtype != "uint8" or high.dtype != jnp.uint8 or high.shape not in shapes:
            expected = f"uint8 {' or '.join(str(list(shape)) for shape in shapes)} beside values in uint8"
            return [f"{name}.high is {high.dtype}{list(high.shape)}, expected {expected}"]
    if (is_float4 := values_dtype(weight) == FLOAT4) and weight.offsets is not None:
        return [f"{name}.offsets is unknown, as values in {FLOAT4} have none"]
    inner = [_problem_of_inner(f"{name}.{part}", leaf, dtype) for part, leaf in parts.items() if is_quantised(leaf)]
    if any(inner):
        return [problem for problem in inner if problem]
    problems = [
        f"{name}.{part} is {leaf.dtype}, expected {' or '.join(DTYPES)}"
        for part, leaf in parts.items()
        if not is_quantised(leaf) and leaf.dtype.name not in DTYPES and not is_float4
    ]
    *rows, columns = weight.shape
    groups = scales.shape[-1] if scales.shape else 0
    evenly = 8 if high is not None else 2 if is_packed(weight) else 1
    if scales.shape != (*rows, groups) or not groups or columns % (groups * evenly):
        kind = {8: "groups of a multiple of eight", 2: "groups of an even size", 1: "groups"}[evenly]
        expected = f"[{', '.join(map(str, rows))}, G], where G {kind} divide {columns} columns"
        problems.append(f"{name}.scales has shape {list(scales.shape)}, expected {expected}")
    elif weight.offsets is not None and weight.offsets.shape != scales.shape:
        problems.append(
            f"{name}.offsets has shape {list(weight.offsets.shape)}, expected {list(scales.shape)} as the scales"
        )
    return problems


def _problem_of_inner(name: str, weight: QuantisedWeight[Any], of: str) -> str | None:
    """Says what is wrong with scales or offsets, of values in `of`, that are quantised themselves."""
    values, scales = weight.values, weight.scales
    is_bare = weight.offsets is None and weight.high is None
    if of not in ("int8", "uint8") or values.dtype != jnp.int8 or not is_bare:
        return f"{name} is quantised, which must be to int8, without offsets, and for integers of eight bits or fewer"
    if scales is None or is_quantised(scales) or scales.dtype.name not in DTYPES:
        return f"{name}.scales is missing or of another type, expected {' or '.join(DTYPES)}"
    count = scales.shape[-1] if scales.shape else 0
    if not values.ndim or scales.shape != (*values.shape[:-1], count) or not count or values.shape[-1] % count:
        return f"{name}.scales has shape {list(scales.shape)}, which does not fit values of {list(values.shape)}"
    return None


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
    return f"{'a weakly typed ' * leaf.weak_type}{leaf.dtype}{list(leaf.shape)}"

"""How a model is divided over the devices of a mesh: the part of every parameter that each device holds.

Heads, feed-forward widths and the vocabulary are divided over the axes `expert` and `model` together. Experts are
divided by number over `expert`, and the width of each over `model`. A size that does not divide evenly is padded with
zeros, which change no result. Where there are fewer key/value heads than devices, several devices copy one of them and
share its query heads.

On the mesh a leaf is the concatenation of the devices' parts. Weights are fused within each part, so that a device's
own queries, keys and values are adjacent. Everything here follows from a leaf's `ParamSpec`. Functions that take arrays
take NumPy arrays and JAX arrays, which may be traced.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import ConfigError, UnsupportedError
from ferrum_jax.models.specs import ParamSpec, ParamTree, is_spec, is_weight_spec, name_of
from ferrum_jax.ops.quantised import QuantisedWeight, is_packed, pack, pack_high, unpack_high
from ferrum_jax.ops.shards import Shards
from ferrum_jax.sharding.mesh import EXPERT, MODEL

PADDING = -1  # as a run's first index: the run is zeros, not numbers of the model
Run = tuple[int, int]  # first index, or PADDING, and length
Runs = tuple[Run, ...]
Reader = Callable[[tuple[Runs, ...]], Any]  # in place of an array in a file: reads runs of every dimension
Leaf = Any  # an array or a Reader, or a QuantisedWeight of them
Spec = ParamSpec | QuantisedWeight[ParamSpec]
_UNITS = {"mlp": 1, "mlp_pairs": 2, "vocab": 1}  # by logical axis: adjacent rows that stay together on one device


@dataclass(frozen=True)
class DimSplit:
    """How one dimension is divided: the runs of each device, the devices in row-major order of the mesh axes."""

    axes: tuple[str, ...]
    parts: tuple[Runs, ...]

    @property
    def whole(self) -> Runs:
        """Runs of the whole dimension on the mesh: the devices' parts one after another."""
        return _merged([run for part in self.parts for run in part])


@dataclass(frozen=True, kw_only=True)
class Division:
    """A model on `expert * model` devices. Made by `divide`."""

    cfg: ModelConfig
    local: ModelConfig  # `cfg` with the number of heads on one device
    expert: int
    model: int
    query_heads: tuple[Runs, ...]  # by device, counted in heads
    key_heads: tuple[Runs, ...]

    @property
    def shards(self) -> Shards:
        """The mesh axes and head counts that the forward needs."""
        return Shards(
            axes=(EXPERT, MODEL),
            expert_axis=EXPERT if self.expert > 1 else None,
            num_query_heads=self.cfg.num_attention_heads,
            num_key_heads=sum(count for runs in self.key_heads for start, count in runs if start != PADDING),
        )


def divide(cfg: ModelConfig, *, expert: int = 1, model: int = 1) -> Division:
    """Divides a model over the axes of a mesh.

    Raises:
        ConfigError: there are more devices than attention heads, or more on the axis `expert` than the model has
            experts (1 if it is dense).
    """
    devices, heads, keys = expert * model, cfg.num_attention_heads, cfg.num_key_value_heads
    if devices > heads:
        raise ConfigError(
            f"the mesh axes expert and model have {expert} * {model} = {devices} devices, this {cfg.model_type} has "
            f"{heads} attention heads: at most {heads} devices can share it"
        )
    most = 1 if cfg.experts is None else cfg.experts.num_experts
    if expert > most:
        raise ConfigError(f"the mesh axis expert has {expert} devices, this {cfg.model_type} has {most} experts")
    group = heads // keys  # query heads that share a key head
    if devices <= keys:
        own_keys, own_group = -(-keys // devices), group
        key_heads = tuple(_chunk(keys, own_keys, at) for at in range(devices))
        query_heads = tuple(_chunk(heads, own_keys * group, at) for at in range(devices))
    else:
        copies = devices // keys
        own_keys, own_group = 1, -(-group // copies)
        pairs = [_heads_of(at, keys, copies, group, own_group) for at in range(devices)]
        key_heads, query_heads = tuple(key for key, _ in pairs), tuple(query for _, query in pairs)
    local = replace(cfg, num_attention_heads=own_keys * own_group, num_key_value_heads=own_keys)
    return Division(cfg=cfg, local=local, expert=expert, model=model, query_heads=query_heads, key_heads=key_heads)


def _heads_of(device: int, keys: int, copies: int, group: int, own_group: int) -> tuple[Runs, Runs]:
    """Returns the key head and the query heads of a device, where several devices copy one key head."""
    key, share = divmod(device, copies)
    queries = _chunk(group, own_group, share)
    if key >= keys or queries[0][0] == PADDING:
        return ((PADDING, 1),), ((PADDING, own_group),)
    return ((key, 1),), tuple((start if start == PADDING else start + key * group, count) for start, count in queries)


def _chunk(size: int, length: int, at: int) -> Runs:
    """Returns chunk number `at` of the indices 0 to size - 1 in chunks of `length`, padded at the end."""
    count = min(max(size - at * length, 0), length)
    runs = [(at * length, count)] if count else []
    return tuple(runs + ([(PADDING, length - count)] if count < length else []))


def dim_splits(spec: ParamSpec, division: Division) -> tuple[DimSplit | None, ...]:
    """Returns how each dimension of a leaf is divided; None where every device holds all of it."""
    axes = (MODEL,) if EXPERT in spec.axes else (EXPERT, MODEL)

    def split(logical: str, size: int) -> DimSplit | None:
        if logical == "fused":
            parts = [split(*part) for part in spec.parts]
            starts = accumulate((part_size for _, part_size in spec.parts), initial=0)
            moved = [_moved(one, start) for one, start in zip(parts, starts, strict=False)]
            merged = [_merged([run for one in moved for run in one[at]]) for at in range(len(moved[0]))]
            return DimSplit(axes, tuple(merged))
        if logical == EXPERT:
            length = -(-size // division.expert)
            return DimSplit((EXPERT,), tuple(_chunk(size, length, at) for at in range(division.expert)))
        count = math.prod(getattr(division, name) for name in axes)
        if logical == "sum":  # one device holds it, the others zeros
            return DimSplit(axes, (((0, size),), *(((PADDING, size),) for _ in range(count - 1))))
        if logical in ("heads", "kv_heads"):
            of_devices, total = (
                (division.query_heads, division.cfg.num_attention_heads)
                if logical == "heads"
                else (division.key_heads, division.cfg.num_key_value_heads)
            )
            return DimSplit(axes, tuple(_scaled(runs, size // total) for runs in of_devices))
        if (unit := _UNITS.get(logical)) is not None:
            length = -(-(size // unit) // count)
            return DimSplit(axes, tuple(_scaled(_chunk(size // unit, length, at), unit) for at in range(count)))
        return None

    return tuple(split(logical, size) for logical, size in zip(spec.axes, spec.shape, strict=True))


def _moved(split: DimSplit | None, start: int) -> list[Runs]:
    assert split is not None
    return [tuple((at if at == PADDING else at + start, count) for at, count in runs) for runs in split.parts]


def _scaled(runs: Runs, unit: int) -> Runs:
    return tuple((start if start == PADDING else start * unit, count * unit) for start, count in runs)


def _merged(runs: Sequence[Run]) -> Runs:
    """Joins adjacent runs of indices and adjacent runs of padding; drops empty runs."""
    found: list[Run] = []
    for start, count in runs:
        before, length = found[-1] if found else (0, 0)
        if found and (start == PADDING) == (before == PADDING) and (start in (PADDING, before + length)):
            found[-1] = before, length + count
        elif count:
            found.append((start, count))
    return tuple(found)


def take(array: Any, dim: int, runs: Runs) -> Any:
    """Concatenates runs of one dimension, with zeros for padding; returns the array itself if they are all of it."""
    if runs == ((0, array.shape[dim]),):
        return array
    xp, pieces = array.__array_namespace__(), []
    for start, count in runs:
        if start == PADDING:
            pieces.append(xp.zeros((*array.shape[:dim], count, *array.shape[dim + 1 :]), array.dtype))
        else:
            pieces.append(array[(slice(None),) * dim + (slice(start, start + count),)])
    return pieces[0] if len(pieces) == 1 else xp.concatenate(pieces, dim)


# A quantised weight's columns are divided in whole groups of one scale each. Where a device's columns would end inside
# a group, all groups are split first: the same numbers with more scales.


def group_size(columns: int, groups: int, split: DimSplit, *, unit: int) -> int:
    """Returns how many columns share one scale on the mesh; `unit` columns share bytes, so that they stay together.

    Raises:
        UnsupportedError: columns that share a byte would lie on different devices.
    """
    size = columns // groups
    edges = [number for part in split.parts for start, count in part for number in (max(start, 0), count)]
    found = math.gcd(size, *edges)
    if found % unit:
        raise UnsupportedError(
            f"packed weights in groups of {size} columns cannot be divided: a device's share of {columns} columns is "
            f"{sum(count for _, count in split.parts[0])}, {unit} must divide it and a group's size; quantize='none' "
            "dequantises them"
        )
    return found


def regroup(weight: QuantisedWeight[Any], size: int) -> QuantisedWeight[Any]:
    """Splits a quantised weight's groups into groups of `size` columns, or joins groups that were split so.

    The numbers stay the same, and there are more scales or fewer.
    """
    assert weight.scales is not None
    before = weight.shape[-1] // weight.scales.shape[-1]
    if before == size:
        return weight
    xp, values, high = weight.values.__array_namespace__(), weight.values, weight.high
    if is_packed(weight):
        columns, groups = weight.shape[-1], weight.scales.shape[-1]
        both = values.reshape(*values.shape[:-1], groups, 1, -1)
        wide = xp.concatenate((both & np.uint8(15), both >> np.uint8(4)), -2)
        if high is not None:
            wide = wide | unpack_high(high, groups, columns) << np.uint8(4)
        wide = wide.reshape(*values.shape[:-1], -1)
        values = pack(wide, columns // size)
        if high is not None:
            high = pack_high(wide, columns // size, 4 + high.shape[-1] * 8 // columns)

    def resized(leaf: Any) -> Any:
        if isinstance(leaf, QuantisedWeight):  # with more columns for each of its own scales
            return replace(leaf, values=resized(leaf.values))
        return xp.repeat(leaf, before // size, axis=-1) if size < before else leaf[..., :: size // before]

    offsets = None if weight.offsets is None else resized(weight.offsets)
    return QuantisedWeight(values=values, scales=resized(weight.scales), offsets=offsets, high=high)


def _take_columns(weight: QuantisedWeight[Any], split: DimSplit, runs: Runs) -> QuantisedWeight[Any]:
    last = weight.values.ndim - 1
    if weight.scales is None:
        return QuantisedWeight(values=take(weight.values, last, runs))
    packed, columns, groups = is_packed(weight), weight.shape[-1], weight.scales.shape[-1]
    if groups == 1 and not packed and weight.offsets is None:  # an offset would make zeros of padding something else
        return replace(weight, values=take(weight.values, last, runs))
    size = group_size(columns, groups, split, unit=8 if weight.high is not None else 2 if packed else 1)
    weight = regroup(weight, size)
    of_groups = tuple((start if start == PADDING else start // size, count // size) for start, count in runs)
    bytes_of = _scaled(of_groups, size // 2 if packed else size)
    split = _in_groups(split, size)

    def taken(leaf: Any) -> Any:
        if isinstance(leaf, QuantisedWeight):
            return _take_columns(leaf, split, of_groups)
        return None if leaf is None else take(leaf, last, of_groups)

    values, high = take(weight.values, last, bytes_of), None
    if weight.high is not None:
        high = take(weight.high, last, _scaled(of_groups, size * weight.high.shape[-1] // columns))
    return QuantisedWeight(values=values, scales=taken(weight.scales), offsets=taken(weight.offsets), high=high)


def _in_groups(split: DimSplit, size: int) -> DimSplit:
    """Returns how groups of `size` columns are divided, given how columns are."""
    parts = (tuple((at if at == PADDING else at // size, count // size) for at, count in part) for part in split.parts)
    return DimSplit(split.axes, tuple(parts))


def _weight_spec(spec: QuantisedWeight[ParamSpec]) -> ParamSpec:
    """Spec of a quantised weight's values with one column for each number, packed or not."""
    return replace(spec.values, shape=spec.shape)


def _is_reader(leaf: Any) -> bool:
    return callable(leaf) and not hasattr(leaf, "shape")  # an nnx.Variable is an array that can be called


def _taken(leaf: Leaf, spec: Spec, division: Division, runs: Callable[[DimSplit, int], Runs]) -> Leaf:
    """Takes the runs `runs(split, size)` of every divided dimension; `size` is the dimension's size in the model."""
    if isinstance(spec, QuantisedWeight):
        if _is_reader(leaf.values):
            return QuantisedWeight(values=_taken(leaf.values, spec.values, division, runs))
        weight = _weight_spec(spec)
        *rows, columns = dim_splits(weight, division)
        for dim, split in enumerate(rows):
            if split is not None:
                own = runs(split, weight.shape[dim])
                leaf = jax.tree.map(lambda part, dim=dim, own=own: take(part, dim, own), leaf)
        return leaf if columns is None else _take_columns(leaf, columns, runs(columns, weight.shape[-1]))
    found = dim_splits(spec, division)
    if _is_reader(leaf):
        sizes = zip(spec.shape, found, strict=True)
        return leaf(tuple(((0, size),) if split is None else runs(split, size) for size, split in sizes))
    for dim, split in enumerate(found):
        if split is not None:
            leaf = take(leaf, dim, runs(split, spec.shape[dim]))
    return leaf


def part_of(leaf: Leaf, spec: Spec, division: Division, coordinates: Mapping[str, int]) -> Leaf:
    """Returns the part of a checkpoint's leaf that a device at these coordinates of the mesh holds."""

    def part(split: DimSplit, _: int) -> Runs:
        at = 0
        for axis in split.axes:
            at = at * getattr(division, axis) + coordinates[axis]
        return split.parts[at]

    return _taken(leaf, spec, division, part)


def on_mesh(leaf: Leaf, spec: Spec, division: Division) -> Leaf:
    """Returns a checkpoint's leaf as it lies on the mesh: the devices' parts one after another."""
    return _taken(leaf, spec, division, lambda split, _: split.whole)


def from_mesh(leaf: Leaf, spec: Spec, division: Division) -> Leaf:
    """Undoes `on_mesh`."""
    return _rejoined(_taken(leaf, spec, division, inverse), spec)


def _rejoined(leaf: Leaf, spec: Any) -> Leaf:
    """Joins the groups of a quantised leaf that the mesh has split, those of its scales first."""
    if not isinstance(spec, QuantisedWeight) or spec.scales is None:
        return leaf
    leaf = replace(leaf, scales=_rejoined(leaf.scales, spec.scales), offsets=_rejoined(leaf.offsets, spec.offsets))
    return regroup(leaf, leaf.shape[-1] // spec.scales.shape[-1])


def inverse(split: DimSplit, size: int) -> Runs:
    """Returns the runs on the mesh that hold the model's numbers, in the model's order; of copies the first."""
    placed, at = [], 0
    for start, count in split.whole:
        if start != PADDING:
            placed.append((start, at, count))
        at += count
    found, done = [], 0
    for start, where, count in sorted(placed):
        skipped = done - start
        if skipped < count:
            found.append((where + skipped, count - skipped))
            done = start + count
    assert done == size
    return _merged(found)


def is_plain(spec: Spec, division: Division) -> bool:
    """Whether a leaf on the mesh equals the checkpoint's: the same numbers and, if quantised, as many scales."""
    weight = _weight_spec(spec) if isinstance(spec, QuantisedWeight) else spec
    sizes = zip(dim_splits(weight, division), weight.shape, strict=True)
    if any(split is not None and split.whole != ((0, size),) for split, size in sizes):
        return False  # in another order, with padding or with copies
    trees = spec, specs_on_mesh({"": spec}, division)
    own, its = (jax.tree.leaves(tree, is_leaf=is_spec) for tree in trees)
    return [part.shape for part in own] == [part.shape for part in its]


def specs_on_mesh(specs: ParamTree, division: Division) -> ParamTree:
    """Specs of the leaves as they lie on the mesh."""

    def on_mesh(path: tuple[Any, ...], spec: Any) -> Spec:
        try:
            return _spec_on_mesh(spec, division)
        except UnsupportedError as problem:
            raise UnsupportedError(f"{name_of(path)}: {problem}") from None

    return jax.tree_util.tree_map_with_path(on_mesh, specs, is_leaf=is_weight_spec)


@functools.lru_cache(maxsize=4096)  # pure, and bounded: most layers have equal specs, and tracing takes a millisecond
def _spec_on_mesh(spec: Spec, division: Division) -> Spec:
    """Spec of a leaf as `on_mesh` returns it."""
    shapes = jax.tree.map(lambda own: jax.ShapeDtypeStruct(own.shape, own.dtype or "float32"), spec, is_leaf=is_spec)
    there = jax.eval_shape(functools.partial(on_mesh, spec=spec, division=division), shapes)
    return jax.tree.map(lambda own, leaf: replace(own, shape=leaf.shape), spec, there, is_leaf=is_spec)


def specs_of_one(specs: ParamTree, division: Division) -> ParamTree:
    """Specs of the parts that one device holds."""

    def part(spec: ParamSpec, axes: PartitionSpec) -> ParamSpec:
        each = ((names,) if isinstance(names, str) else names or () for names in axes)
        counts = [math.prod(getattr(division, name) for name in names) for names in each]
        return replace(spec, shape=tuple(size // count for size, count in zip(spec.shape, counts, strict=True)))

    there, divided = specs_on_mesh(specs, division), partitions(specs, division)
    return jax.tree.map(part, there, divided, is_leaf=is_spec)


def partitions(specs: ParamTree, division: Division) -> ParamTree:
    """The `PartitionSpec` of every array, in a tree like the parameters."""

    def of(spec: Spec) -> Any:
        weight = _weight_spec(spec) if isinstance(spec, QuantisedWeight) else spec
        axes = [None if split is None else split.axes for split in dim_splits(weight, division)]
        return _partition(spec, axes)

    return jax.tree.map(of, specs, is_leaf=is_weight_spec)


def _partition(spec: Spec | None, axes: Sequence[Any]) -> Any:
    if not isinstance(spec, QuantisedWeight):
        return None if spec is None else PartitionSpec(*axes)
    is_bare = spec.offsets is None and not is_packed(spec)
    has_one = spec.scales is not None and spec.scales.shape[-1] == 1 and is_bare
    own = (*axes[:-1], None) if has_one else axes  # the mesh divides no group
    scales, offsets, high = _partition(spec.scales, own), _partition(spec.offsets, own), _partition(spec.high, axes)
    return QuantisedWeight(values=PartitionSpec(*axes), scales=scales, offsets=offsets, high=high)

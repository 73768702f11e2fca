"""A model's parameters on its devices: host arrays are put there, and trees are divided over the devices or joined."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ferrum_jax.config import ModelConfig
from ferrum_jax.models import division as divided
from ferrum_jax.models.division import Division, Leaf, Spec
from ferrum_jax.models.specs import ParamSpec, ParamTree, is_spec, is_weight_spec, num_bytes, shapes
from ferrum_jax.sharding.mesh import Placement, joined, place_on_mesh


@dataclass(frozen=True, eq=False)
class ModelPlacement:
    """The devices of one model, and how it is divided over them."""

    placement: Placement
    division: Division | None = None  # None: the whole model is on one device

    @classmethod
    def of(cls, cfg: ModelConfig, placement: Placement) -> "ModelPlacement":
        """Divides a model over the devices of a placement; raises ConfigError if there are too many devices."""
        if placement.mesh is None:
            return cls(placement)
        return cls(placement, divided.divide(cfg, **placement.sizes))

    @classmethod
    def on_mesh(cls, cfg: ModelConfig, sizes: Mapping[str, int], first: Any) -> "ModelPlacement":
        """Divides a model over the devices of the first replica on a mesh; raises as `place_on_mesh` and `of`."""
        return cls.of(cfg, place_on_mesh(sizes, first)[0])

    @classmethod
    def on_one(cls, device: Any) -> "ModelPlacement":
        """Places a model on one device."""
        return cls(Placement((device,)))

    def specs(self, specs: ParamTree) -> ParamTree:
        """Specs of the arrays as they lie on the devices."""
        return specs if self.division is None else divided.specs_on_mesh(specs, self.division)

    def shapes(self, specs: ParamTree, dtype: str) -> ParamTree:
        """Shapes, dtypes and shardings of the arrays on the devices, for lowering."""
        found, placed = shapes(self.specs(specs), dtype), self.shardings(specs)
        return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), found, placed)

    def num_bytes(self, specs: ParamTree, dtype: str) -> int:
        """Bytes of the parameters on each device; `specs` are the undivided ones."""
        return num_bytes(specs if self.division is None else divided.specs_of_one(specs, self.division), dtype)

    def shardings(self, specs: ParamTree) -> ParamTree:
        """Shardings of the arrays on the devices, in a tree like the parameters; `specs` are the undivided ones."""
        if self.division is None:
            whole = self.placement.sharding()
            return jax.tree.map(lambda _: whole, specs, is_leaf=is_spec)
        return jax.tree.map(self.placement.sharding, divided.partitions(specs, self.division))

    def stored_shardings(self, specs: ParamTree) -> ParamTree:
        """Shardings to read a checkpoint's arrays with: final ones, or even ones for arrays that `divide` changes."""
        if self.division is None:
            return self.shardings(specs)
        count, axes, division = len(self.placement.devices), self.placement.axes, self.division

        def even(leaf: ParamSpec) -> Any:
            divisible = [size % count == 0 for size in leaf.shape]
            at = divisible.index(True) if any(divisible) else None
            return self.placement.sharding(PartitionSpec() if at is None else PartitionSpec(*(None,) * at, axes))

        def one(spec: Spec, final: Any) -> Any:
            return final if divided.is_plain(spec, division) else jax.tree.map(even, spec, is_leaf=is_spec)

        return jax.tree.map(one, specs, self.shardings(specs), is_leaf=is_weight_spec)

    def put(self, get: Callable[[Callable[[Leaf, Spec], Leaf]], Leaf], spec: Spec) -> Leaf:
        """Puts one leaf on its devices.

        Args:
            get: returns the leaf as NumPy arrays. It is given a function that takes one device's part of an array, and
                applies it to each array that the leaf is made of. Called once for each device of this process.
            spec: the undivided spec of the leaf.
        """
        if self.division is None:
            return jax.device_put(get(lambda leaf, _: leaf), self.placement.first)
        found, division = [], self.division
        for device, coordinates in self.local_devices():
            part = get(lambda leaf, own, at=coordinates: divided.part_of(leaf, own, division, at))
            found.append(jax.device_put(part, device))
        shapes = jax.tree.map(lambda own: own.shape, self.specs({"": spec}), is_leaf=is_spec)[""]
        return jax.tree.map(
            lambda sharding, shape, *parts: jax.make_array_from_single_device_arrays(shape, sharding, list(parts)),
            self.shardings({"": spec})[""],
            shapes,
            *found,
        )

    def put_tree(self, tree: ParamTree, specs: ParamTree) -> ParamTree:
        """Puts a tree of NumPy arrays on the devices."""
        if self.division is None:
            return jax.device_put(tree, self.placement.first)
        return jax.tree.map(
            lambda spec, leaf: self.put(lambda part: part(leaf, spec), spec), specs, tree, is_leaf=is_weight_spec
        )

    def local_devices(self) -> list[tuple[Any, Mapping[str, int]]]:
        """Devices of the mesh that belong to this process, with their coordinates."""
        mesh = self.placement.mesh
        assert mesh is not None
        process = jax.process_index()
        return [
            (device, dict(zip(mesh.axis_names, at, strict=True)))
            for at, device in np.ndenumerate(mesh.devices)
            if device.process_index == process
        ]

    def copied(self, params: ParamTree) -> ParamTree:
        """Copies the parameters of another replica, divided in the same way, to these devices."""
        if self.division is None:
            return jax.device_put(params, self.placement.first)
        return jax.tree.map(lambda leaf: jax.device_put(leaf, self.placement.sharding(leaf.sharding.spec)), params)

    def without_padding(self, array: Any, axis: int, logical: str) -> Any:
        """Drops padding and copies from an axis of heads and returns the heads in the model's order.

        `logical` is `heads` or `kv_heads`.
        """
        if self.division is None:
            return array
        cfg = self.division.cfg
        size = cfg.num_attention_heads if logical == "heads" else cfg.num_key_value_heads
        (split,) = divided.dim_splits(ParamSpec((size,), (logical,)), self.division)
        assert split is not None
        return divided.take(array, axis, divided.inverse(split, size))

    def divide(self, params: ParamTree, specs: ParamTree) -> ParamTree:
        """Divides arrays in the checkpoint's form over the devices; leaves that are there already are shared."""
        if self.division is None:
            return params
        return self._converted(params, specs, divided.on_mesh, self.shardings(specs))

    def join(self, params: ParamTree, specs: ParamTree) -> ParamTree:
        """Undoes `divide`: returns arrays in the checkpoint's form, with shardings that the compiler chooses.

        Leaves already in that form are shared, the others are copies.
        """
        if self.division is None:
            return params
        return self._converted(params, specs, divided.from_mesh)

    def _converted(self, params: ParamTree, specs: ParamTree, convert: Any, *shardings: ParamTree) -> ParamTree:
        division = self.division
        assert division is not None

        def one(spec: Spec, leaf: Leaf, own: Any = None) -> Leaf:
            is_plain = divided.is_plain(spec, division)
            if own is None and is_plain:
                return leaf
            is_here = all(getattr(part.sharding, "mesh", None) == self.placement.mesh for part in jax.tree.leaves(leaf))
            if not is_here:
                leaf = jax.tree.map(joined, leaf)
            if is_plain:
                return jax.device_put(leaf, own)
            if not is_here:
                leaf = jax.device_put(leaf, self.placement.sharding())  # one leaf at a time, whole on each device
            return jax.jit(functools.partial(convert, spec=spec, division=division), out_shardings=own)(leaf)

        return jax.tree.map(one, specs, params, *shardings, is_leaf=is_weight_spec)

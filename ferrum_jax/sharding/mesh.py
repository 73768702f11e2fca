"""Meshes of devices, and where one model's arrays lie: on one device, or on the devices of a mesh.

A mesh has up to three axes, of size 1 where they are absent: `data` has replicas of the model, each with a KV of its
own; `expert` and `model` divide one replica (models/division.py). Devices next to each other on the axis `model`
should have the quickest connection.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ferrum_jax.config.engine import MESH_AXES
from ferrum_jax.contract.errors import ConfigError, DeviceError
from ferrum_jax.sharding.devices import JaxDevice, free_bytes, process_of

_, EXPERT, MODEL = MESH_AXES
WHOLE = PartitionSpec()  # every device has all of an array


def leave_mesh() -> contextlib.AbstractContextManager[Any] | None:
    """Leaves the mesh that this thread has set by `jax.set_mesh`, until the end of the context returned.

    A runner's programs are for its own devices, and JAX refuses them inside another mesh. None without a mesh.
    """
    return None if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(Mesh(np.empty((), object), ()))


@contextlib.contextmanager
def outside_meshes() -> Iterator[None]:
    """As `leave_mesh`, for a function or a block."""
    with leave_mesh() or contextlib.nullcontext():
        yield


@dataclass(frozen=True, eq=False)
class Placement:
    """The devices of one model, or of one of its replicas."""

    devices: tuple[JaxDevice, ...]
    mesh: Mesh | None = None  # of the axes `expert` and `model`; None: the model is on one device, undivided
    num_sharing: int = 1  # devices of all replicas: those of a CPU share its memory

    @property
    def first(self) -> JaxDevice:
        """The first device of this process, which stands for all of them in reports of a model."""
        return self.local[0]

    @property
    def local(self) -> tuple[JaxDevice, ...]:
        """The devices of this process; all, where it has none of them."""
        return tuple(one for one in self.devices if process_of(one) == jax.process_index()) or self.devices

    @property
    def is_shared(self) -> bool:
        """True where other processes have devices of it, too."""
        return len(self.local) < len(self.devices)

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis; none on one device."""
        return {} if self.mesh is None else dict(self.mesh.shape)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that divide a model, outermost first; none on one device."""
        return () if self.mesh is None else tuple(self.mesh.axis_names)

    def sharding(self, spec: PartitionSpec = WHOLE) -> jax.sharding.Sharding:
        """Returns the sharding of an array that is divided by a spec."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.first)
        return NamedSharding(self.mesh, spec)

    def place(self, shapes: Any, specs: Any = WHOLE) -> Any:
        """Returns a tree of shapes with their shardings; `specs` is one `PartitionSpec` or a tree of them."""
        if isinstance(specs, PartitionSpec):
            specs = jax.tree.map(lambda _: WHOLE, shapes) if specs == WHOLE else jax.tree.map(lambda _: specs, shapes)
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding(spec)),
            shapes,
            specs,
        )

    def put(self, tree: Any) -> Any:
        """Puts host arrays whole on every device; every process gives the same ones."""
        whole = self.sharding(WHOLE)
        if not self.is_shared:
            with jax.ensure_compile_time_eval():  # within a function that JAX traces
                return jax.device_put(tree, whole)
        # device_put would compare the processes' arrays
        return jax.tree.map(lambda leaf: jax.make_array_from_callback(leaf.shape, whole, lambda at: leaf[at]), tree)

    def spread(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Returns a function that every device runs on its own parts of the arguments; on one device, `function`.

        The specs are those of the arguments and the results, or of trees of them. Every device computes by itself what
        is whole on all: only collectives inside `function` move numbers between devices.
        """
        if self.mesh is None:
            return function
        spread = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        spread.__name__ = getattr(function, "__name__", "spread")
        return spread

    def free_bytes(self, *, is_needed: bool = True) -> int:
        """Memory that is free on this process's fullest device; devices of a CPU share the machine's."""
        if self.first.platform == "cpu":
            return free_bytes(self.first) // self.num_sharing
        return min(free_bytes(device, is_needed=is_needed) for device in self.local)


def joined(array: jax.Array, device: JaxDevice | None = None) -> jax.Array:
    """Returns an array whole on one device, its parts joined by collectives on the mesh where they lie.

    `jax.device_put` of a divided array may take it through the host (JAX 0.12). An array with parts in other processes
    is returned as it is.
    """
    if not array.is_fully_addressable:
        return array
    if isinstance(array.sharding, NamedSharding) and not array.is_fully_replicated:
        array = jax.jit(_same, out_shardings=NamedSharding(array.sharding.mesh, WHOLE))(array)
    if not array.is_fully_replicated:
        return array
    shards = array.addressable_shards
    return next((one.data for one in shards if one.device == device), shards[0].data)


def _same(array: jax.Array) -> jax.Array:
    return array


def place_on_mesh(mesh: Mapping[str, int] | Mesh | None, first: JaxDevice) -> list[Placement]:
    """Places the replicas of a model on a mesh: its own devices, or as many of the kind of `first` as it needs.

    Raises:
        ConfigError: it has an axis of an unknown name with more than one device.
        DeviceError: there are fewer devices than it needs.
    """
    given = dict(mesh.shape if isinstance(mesh, Mesh) else mesh or {})
    others = {name: size for name, size in given.items() if name not in MESH_AXES and size != 1}
    if others:
        raise ConfigError(f"the mesh has the axes {others}, expected {', '.join(MESH_AXES[:-1])} or {MESH_AXES[-1]}")
    sizes = {name: given.get(name, 1) for name in MESH_AXES}
    if isinstance(mesh, Mesh):
        names = [name for name in MESH_AXES if name in mesh.axis_names]
        order = [mesh.axis_names.index(name) for name in names]
        rest = [at for at in range(mesh.devices.ndim) if at not in order]
        devices = mesh.devices.transpose(*order, *rest).reshape(tuple(sizes.values()))
    else:
        devices = _devices(sizes, first)
    replicas = []
    for block in devices:  # [expert, model]
        own = None if block.size == 1 else Mesh(block, (EXPERT, MODEL))
        replicas.append(Placement(tuple(block.ravel()), own, num_sharing=devices.size))
    return replicas


def _devices(sizes: Mapping[str, int], first: JaxDevice) -> np.ndarray:
    """Takes the devices of a mesh in their own order, beginning with `first`; all processes take the same."""
    of_kind = jax.devices(first.platform)
    found = of_kind[of_kind.index(first) :] if first in of_kind and jax.process_count() == 1 else of_kind
    needed = math.prod(sizes.values())
    if needed > len(found):
        asked = " * ".join(f"{name} {size}" for name, size in sizes.items())
        hint = "; jax_num_cpu_devices says how many a CPU is" if first.platform == "cpu" else ""
        raise DeviceError(
            f"the mesh {asked} needs {needed} devices, from {first} on there are {len(found)} of its kind{hint}"
        )
    return np.array(found[:needed], object).reshape(tuple(sizes.values()))

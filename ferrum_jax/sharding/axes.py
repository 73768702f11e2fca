"""Logical parameter axes to mesh axes, for research code that shards a checkpoint's parameters on a mesh of its own.

Serving divides models by models/division.py instead, which also pads and copies.
"""

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ferrum_jax.config.engine import MESH_AXES
from ferrum_jax.contract.errors import ConfigError
from ferrum_jax.sharding.mesh import EXPERT, MODEL

RULES: Mapping[str, str | None] = {
    "vocab": MODEL,
    "heads": MODEL,
    "kv_heads": MODEL,
    "mlp": MODEL,
    "mlp_pairs": MODEL,
    "expert": EXPERT,
    "router": None,
    "latent": None,
    "embed": None,
    "sum": None,
    "head": None,
    "fused": None,  # a division would separate the parts of fused products
    "layer": None,
    "adapter": None,
    "rank": None,
    "group": None,
}


def partition(
    name: str,
    shape: tuple[int, ...],
    logical_axes: tuple[str, ...],
    mesh: Mesh,
    rules: Mapping[str, str | None] = RULES,
) -> NamedSharding:
    """Returns the sharding of one parameter on a mesh, given the logical axis of each of its dimensions.

    `rules` name the mesh axis of each logical axis. None replicates, and so does `expert` or `model` on a mesh without.

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
            raise ConfigError(f"{name}: {logical} has {size}, which {mesh.shape[axis]} devices do not divide")
        axes.append(axis)
    return NamedSharding(mesh, PartitionSpec(*axes))

"""Logical parameter axes to mesh axes: how each dimension of a parameter is divided over devices."""

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ferrum_jax.contract.errors import ConfigError

TENSOR_PARALLEL: Mapping[str, str | None] = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert": None,  # every device has a part of each expert, divided like any feed-forward block
    "router": None,
    "latent": None,
    "embed": None,
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
    rules: Mapping[str, str | None] = TENSOR_PARALLEL,
) -> NamedSharding:
    """Returns the sharding of one parameter on a mesh, given the logical axis of each of its dimensions.

    `rules` name the mesh axis of each logical axis; None replicates.

    Raises:
        ConfigError: a rule is missing, names an axis the mesh lacks, or does not divide a dimension.
    """
    axes = []
    for size, logical in zip(shape, logical_axes, strict=True):
        if logical not in rules:
            raise ConfigError(f"{name}: no rule for the logical axis {logical!r}")
        axis = rules[logical]
        if axis is not None and axis not in mesh.shape:
            raise ConfigError(f"{name}: {logical} goes to {axis!r}, the mesh has {', '.join(mesh.shape)}")
        if axis is not None and size % mesh.shape[axis]:
            raise ConfigError(f"{name}: {logical} has {size}, which {mesh.shape[axis]} devices do not divide")
        axes.append(axis)
    return NamedSharding(mesh, PartitionSpec(*axes))

"""Orbax checkpoints: a parameter tree and its configuration in one folder."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax

from ferrum_jax.config import ModelConfig, RopeScaling
from ferrum_jax.contract.errors import AlreadyExistsError, ConfigError, InvalidFormatError
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree, named_leaves, num_parameters, shapes
from ferrum_jax.sharding.devices import JaxDevice
from ferrum_jax.weights.assemble import refuse_mismatched
from ferrum_jax.weights.folder import read_json

CONFIG = "ferrum_config.json"
PARAMS = "params"


def is_checkpoint(path: Path) -> bool:
    """Says whether a folder was written by `save`."""
    return (path / CONFIG).is_file()


def save(path: str | os.PathLike[str], params: ParamTree, cfg: ModelConfig) -> None:
    """Writes a checkpoint into a new folder; the configuration goes last, so a folder with one is whole."""
    import orbax.checkpoint as ocp  # here, as it takes a sixth of a second that other formats need not wait for

    folder = Path(path).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise AlreadyExistsError(f"{folder} is not empty, a checkpoint is not written over another")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / PARAMS, params)
    text = json.dumps(dataclasses.asdict(cfg), indent=1)
    (folder / f"{CONFIG}.part").write_text(text, encoding="utf-8")
    os.replace(folder / f"{CONFIG}.part", folder / CONFIG)


def read_config(folder: Path) -> ModelConfig:
    """Reads the configuration of a checkpoint."""
    fields: dict[str, Any] = read_json(folder / CONFIG)
    try:
        scaling = fields.pop("rope_scaling")
        fields["layer_windows"] = tuple(fields["layer_windows"])
        return ModelConfig(rope_scaling=RopeScaling(**scaling) if scaling else None, **fields)
    except (KeyError, TypeError, ConfigError) as problem:
        raise InvalidFormatError(f"{folder / CONFIG} is not a configuration of this version: {problem}") from None


class OrbaxSource:
    """A checkpoint that `save` wrote."""

    def __init__(self, folder: Path):
        self.path = folder.absolute()
        self.config = read_config(self.path)

    def restore(self, dtype: str, device: JaxDevice) -> ParamTree:
        """Reads all parameters, cast to `dtype`, onto `device`.

        Raises:
            InvalidFormatError: this is no whole checkpoint of the model its configuration describes.
        """
        import orbax.checkpoint as ocp

        placed = jax.sharding.SingleDeviceSharding(device)
        specs = family(self.config).param_specs(self.config)
        wanted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), shapes(specs, dtype)
        )
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                found = named_leaves(checkpointer.metadata(self.path / PARAMS).item_metadata.tree)
                # before any read: a restore that fails half-way leaves orbax's other reads running
                refuse_mismatched(
                    self.path / PARAMS, {name: tuple(leaf.shape) for name, leaf in found.items()}, named_leaves(specs)
                )
                return checkpointer.restore(self.path / PARAMS, wanted)
        except InvalidFormatError:
            raise
        except (ValueError, KeyError, OSError, AttributeError) as problem:
            cause = str(problem)[:300]  # pages of storage settings follow
            raise InvalidFormatError(
                f"{self.path / PARAMS} is no whole checkpoint of {num_parameters(specs):,} parameters: {cause}"
            ) from None

"""Orbax checkpoints: a parameter tree and its configuration in one folder.

The parts of a quantised weight are stored under its name, and the configuration lists the formats of quantised weights.
A list of checksums, BLAKE2b of every file below `params`, finds damage before any tensor is read. Checkpoints of
earlier versions have no such list and are not checked.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ferrum_jax.config import ExpertsConfig, LatentConfig, ModelConfig, RopeScaling
from ferrum_jax.contract.checks import differences
from ferrum_jax.contract.errors import (
    AlreadyExistsError,
    FerrumError,
    InvalidFormatError,
    InvalidParameterError,
    IOError,
)
from ferrum_jax.models.layout import CHECKPOINT, lay_out
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.quantisation import Format, formats_of, quantised_specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree, from_names, map_specs, named_leaves, num_parameters, shapes
from ferrum_jax.ops.quantised import is_quantised
from ferrum_jax.weights.assemble import check_problems, check_tensors
from ferrum_jax.weights.folder import read_json
from ferrum_jax.weights.safetensors_file import check_regular

CONFIG = "ferrum_config.json"
PARAMS = "params"
CHECKSUMS = "checksums.json"
CHUNK = 1 << 24  # bytes of a tensor that are compressed together, hence the smallest read for a device's part
GROUP = 1 << 27  # bytes of tensors that are read together; the host then has them twice
NUMBERS = 0  # marks the tensors to read in the tree for orbax
QUANTISED = "quantised"  # field of the configuration: formats by name


def is_checkpoint(path: Path) -> bool:
    """Whether a folder was written by `save`."""
    return os.path.isfile(path / CONFIG)  # not Path's, which raises if the folder must not be searched


def save(path: str | os.PathLike[str], params: ParamTree, cfg: ModelConfig) -> None:
    """Writes a checkpoint into a new folder; writes the configuration last, so that a folder with one is complete.

    Raises:
        AlreadyExistsError: the folder is not empty.
        IOError: it cannot be written.
    """
    import orbax.checkpoint as ocp  # imported here: it takes 0.17 s, which other formats do not need

    folder = Path(path).absolute()
    with writing(folder):
        if folder.exists() and any(folder.iterdir()):
            raise AlreadyExistsError(f"{folder} is not empty, a checkpoint is not written over another")
        folder.mkdir(parents=True, exist_ok=True)
    params = lay_out(params, cfg, CHECKPOINT)
    formats = {name: dataclasses.asdict(form) for name, form in formats_of(params).items()}
    stored = _stored(params)
    pieces = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), stored)

    def write() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / PARAMS, stored, save_args=pieces)

    with writing(folder):
        # A pool, whose end an interrupt waits for: Orbax's threads would write on in a folder that the caller removes.
        with ThreadPoolExecutor(1, "checkpoint") as pool:
            pool.submit(write).result()
        (folder / CHECKSUMS).write_text(json.dumps(_checksums(folder / PARAMS), indent=1), encoding="utf-8")
        text = json.dumps(dataclasses.asdict(cfg) | ({QUANTISED: formats} if formats else {}), indent=1)
        (folder / f"{CONFIG}.part").write_text(text, encoding="utf-8")
        os.replace(folder / f"{CONFIG}.part", folder / CONFIG)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Converts errors of writing a checkpoint into one IOError that names its folder."""
    try:
        yield
    except FerrumError:
        raise
    except (OSError, ValueError) as problem:  # tensorstore's errors are ValueErrors
        cause = str(problem)[:600]  # pages of storage settings follow
        raise IOError(f"cannot write the checkpoint {folder}: {cause}") from problem


def _checksums(folder: Path) -> dict[str, str]:
    """Returns the checksums of all files below a folder, by path relative to it."""

    def checksum(path: Path) -> tuple[str, str]:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, functools.partial(hashlib.blake2b, digest_size=16))
        return path.relative_to(folder).as_posix(), digest.hexdigest()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(checksum, _files(folder)))


def _files(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if not path.is_dir())
    for path in found:
        check_regular(path)
    return found


def read_config(folder: Path) -> ModelConfig:
    """Reads the configuration of a checkpoint."""
    fields: dict[str, Any] = read_json(folder / CONFIG)
    fields.pop(QUANTISED, None)
    try:
        for name, kind in (("rope_scaling", RopeScaling), ("experts", ExpertsConfig), ("latent", LatentConfig)):
            if (part := fields.pop(name, None)) is not None:
                fields[name] = kind(**_with_tuples(part))
        found = ModelConfig(**_with_tuples(fields))
        family(found).param_specs(found)  # asserts that no part is missing
        return found
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as problem:
        why = str(problem) or "a part is missing"
        raise InvalidFormatError(f"{folder / CONFIG} is not a configuration of this version: {why}") from None


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Converts JSON's lists to the tuples of a configuration."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in dict(fields).items()}


def read_formats(folder: Path) -> dict[str, Format]:
    """Reads the formats of a checkpoint's quantised weights."""
    try:
        found = read_json(folder / CONFIG).get(QUANTISED, {})
        return {name: _read_format(fields) for name, fields in found.items()}
    except (AttributeError, TypeError, InvalidParameterError) as problem:
        raise InvalidFormatError(f"{folder / CONFIG}: {QUANTISED} is not of this version: {problem}") from None


def _read_format(fields: Mapping[str, Any]) -> Format:
    own: Any = {name: _read_format(value) if isinstance(value, dict) else value for name, value in fields.items()}
    return Format(**own)


def _stored(tree: ParamTree) -> ParamTree:
    """Converts to the stored tree, in which a quantised weight is a dict of its parts."""

    def stored(leaf: Any) -> Any:
        if not is_quantised(leaf):
            return leaf
        return {name: stored(part) for name, part in vars(leaf).items() if part is not None}

    return jax.tree.map(stored, tree, is_leaf=is_quantised)


def _groups(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Divides tensors into groups of at most `GROUP` bytes; a larger tensor is a group of its own."""
    group: dict[str, jax.ShapeDtypeStruct] = {}
    size = 0
    for name, leaf in wanted.items():
        more = leaf.size * leaf.dtype.itemsize
        if group and size + more > GROUP:
            yield group
            group, size = {}, 0
        group[name] = leaf
        size += more
    yield group


class OrbaxSource:
    """A checkpoint that `save` wrote."""

    def __init__(self, folder: Path):
        self.path = folder.absolute()
        self.config = read_config(self.path)
        self.formats = read_formats(self.path)
        self._specs = quantised_specs(family(self.config).param_specs(self.config), self.formats)
        self._is_whole = False  # True once `_check_files` has passed

    def restore(self, dtype: str, placed: ModelPlacement | None, put: Callable[[Any], Any] | None = None) -> ParamTree:
        """Reads all parameters onto a model's devices, and casts those that are not quantised to `dtype`.

        If `placed` is None, it reads NumPy arrays, for which JAX needs no device on the host.
        A device of a mesh reads only its own part of leaves that are stored as they lie on the mesh. Other leaves are
        read evenly divided and converted on the devices, one at a time. On one device, `put` puts each leaf there.

        Raises:
            InvalidFormatError: this is not a complete checkpoint of the model in its configuration.
        """
        wanted = shapes(self._specs, dtype)
        if placed is not None:
            at = placed.stored_shardings(self._specs)
            wanted = jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), wanted, at)
        with self._reading():
            self._check_tensors()  # before any read: if a restore fails, orbax's other reads go on running
        found: dict[str, Any] = {}
        for group in _groups(named_leaves(wanted)):
            read = self._restore(group)
            found |= read if put is None else {name: put(read.pop(name)) for name in group}
        tree = from_names(self._specs, found)
        return tree if placed is None else placed.divide(tree, self._specs)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of every tensor, from the checkpoint's metadata."""
        return {name: tuple(leaf.shape) for name, leaf in self._metadata().items()}

    def _metadata(self) -> dict[str, Any]:
        """Returns the shape and dtype of every tensor."""
        import orbax.checkpoint as ocp

        with self._reading(), ocp.StandardCheckpointer() as checkpointer:
            return named_leaves(checkpointer.metadata(self.path / PARAMS).item_metadata.tree)

    def _check_tensors(self) -> None:
        """Raises InvalidFormatError for shapes that are not the model's, and dtypes that are not the formats'."""
        found, wanted = self._metadata(), named_leaves(self._specs)
        check_tensors(self.path / PARAMS, {name: tuple(leaf.shape) for name, leaf in found.items()}, wanted)
        plain = named_leaves(family(self.config).param_specs(self.config))
        parts = {name: spec.dtype for name, spec in wanted.items() if name not in plain}  # of quantised weights
        stored = {name: found[name].dtype.name for name in parts}
        check_problems(self.path / PARAMS, differences(stored, parts, "is"))

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor, which must exist."""
        return self._restore({name: None})[name]

    def _restore(self, wanted: Mapping[str, jax.ShapeDtypeStruct | None]) -> dict[str, Any]:
        """Reads tensors: onto devices by the shardings of their shapes, or to the host if they have none."""
        import orbax.checkpoint as ocp

        def kind(name: str) -> Any:
            leaf = wanted.get(name)
            if leaf is None or leaf.sharding is None:
                return ocp.RestoreArgs(restore_type=np.ndarray, dtype=None if leaf is None else leaf.dtype)
            return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)

        item = map_specs(lambda name, _: NUMBERS if name in wanted else ocp.PLACEHOLDER, self._specs)
        kinds = map_specs(lambda name, _: kind(name), self._specs)
        with self._reading(), ocp.PyTreeCheckpointer() as checkpointer:
            args = ocp.args.PyTreeRestore(item=_stored(item), restore_args=_stored(kinds))
            found = named_leaves(checkpointer.restore(self.path / PARAMS, args=args))
        return {name: found[name] for name in wanted}

    def reader(self, name: str) -> None:
        """Returns None: no tensor can be read in parts."""

    def _check_files(self) -> None:
        """Raises InvalidFormatError if a file is not regular, or a listed one is missing or has another checksum."""
        if not (listed := self.path / CHECKSUMS).exists():
            _files(self.path / PARAMS)
            return
        wanted, found = read_json(listed), _checksums(self.path / PARAMS)
        for name, checksum in wanted.items():
            if name not in found:
                raise InvalidFormatError(f"{self.path / PARAMS / name} is missing, which {CHECKSUMS} lists")
            if found[name] != checksum:
                raise InvalidFormatError(f"{self.path / PARAMS / name} is damaged: {CHECKSUMS} has another checksum")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Checks the files once, and converts orbax's errors for a damaged checkpoint to InvalidFormatError."""
        try:
            if not self._is_whole:
                self._check_files()
                self._is_whole = True
            yield
        except (FerrumError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as problem:  # noqa: BLE001  # orbax documents none of its errors
            cause = f"{type(problem).__name__}: {problem}"[:300]  # pages of storage settings follow
            raise InvalidFormatError(
                f"{self.path / PARAMS} is no whole checkpoint of {num_parameters(self._specs):,} parameters: {cause}"
            ) from None

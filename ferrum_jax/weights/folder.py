"""Hugging Face folders: `config.json` and one or many safetensors shards, read one tensor at a time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # makes NumPy know bfloat16
import numpy as np
from safetensors import SafetensorError, safe_open

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import (
    ConfigError,
    FerrumError,
    InvalidFormatError,
    IOError,
    NotFoundError,
    UnsupportedError,
)
from ferrum_jax.models.quantisation import Formats

INDEX = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        NotFoundError: there is no such file.
        IOError: it cannot be read.
        InvalidFormatError: it holds no JSON object.
    """
    try:
        value = json.loads(read_text(path))
    except ValueError as problem:
        if isinstance(problem, FerrumError):
            raise
        raise InvalidFormatError(f"{path} is not JSON: {problem}") from None
    except RecursionError:
        raise InvalidFormatError(f"{path} is JSON that is nested too deeply to be read") from None
    if not isinstance(value, dict):
        raise InvalidFormatError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def read_text(path: Path) -> str:
    """Reads a text in UTF-8.

    Raises:
        NotFoundError: there is no such file.
        IOError: it cannot be read.
        InvalidFormatError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{path} does not exist") from None
    except OSError as problem:
        raise IOError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except UnicodeDecodeError as problem:
        raise InvalidFormatError(f"{path} is not UTF-8: {problem}") from None


class SafetensorsSource:
    """The tensors of a folder. A shard is opened anew for each tensor, so that no more than one stays in memory."""

    def __init__(self, folder: Path):
        self.path = folder
        self.formats: Formats = {}  # none: a checkpoint that says it is quantised is refused
        self.config = _read_config(folder / "config.json")
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for shard in _shards(folder):
            self._scan(shard)
        _refuse_incomplete(folder, self._file_of)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, from the headers."""
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor."""
        return read_tensor(self._file_of[name], name)

    def _scan(self, path: Path) -> None:
        for name, shape in read_header(path).items():
            if name in self._file_of:
                raise InvalidFormatError(f"{path}: tensor {name} is also in {self._file_of[name].name}")
            self._file_of[name] = path
            self._shapes[name] = shape


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a safetensors file, none of which is read."""
    shapes = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in DTYPES:
                    raise UnsupportedError(
                        f"{path}: tensor {name} is {tensor.get_dtype()}, supported are {', '.join(DTYPES)}"
                    )
                shapes[name] = tuple(tensor.get_shape())
    except FileNotFoundError:
        raise NotFoundError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as problem:
        raise InvalidFormatError(f"{path} is not a whole safetensors file: {problem}") from None
    return shapes


def read_tensor(path: Path, name: str) -> np.ndarray:
    """Reads one tensor of a safetensors file."""
    try:
        with safe_open(path, framework="numpy") as file:
            return file.get_tensor(name)
    except (SafetensorError, OSError) as problem:
        raise InvalidFormatError(f"{path}: tensor {name} cannot be read: {problem}") from None


def _read_config(path: Path) -> ModelConfig:
    try:
        return ModelConfig.from_hf(read_json(path))
    except (ConfigError, UnsupportedError) as problem:
        raise type(problem)(f"{path}: {problem}") from None


def _shards(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        names = _weight_map(folder).values()
        return [folder / name for name in sorted(set(names))]
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise NotFoundError(f"{folder} holds no model.safetensors and no {INDEX}")
    if len(found) > 1:
        raise NotFoundError(f"{folder} holds {len(found)} safetensors files but no {INDEX}")
    return found


def _weight_map(folder: Path) -> dict[str, str]:
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise InvalidFormatError(f"{folder / INDEX} has no weight_map of tensor names to files")
    outside = [name for name in listed.values() if name in ("", "..") or Path(name).name != name]
    if outside:
        raise InvalidFormatError(f"{folder / INDEX} names {outside[0]!r}, which is not a file of this folder")
    return listed


def _refuse_incomplete(folder: Path, found: Mapping[str, Path]) -> None:
    if (folder / INDEX).exists():
        for name, shard in _weight_map(folder).items():
            if name not in found:
                raise InvalidFormatError(f"{folder / shard}: tensor {name} is missing, which {INDEX} promises")

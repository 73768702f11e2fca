"""Reading of one safetensors file: its header, and its tensors one by one."""

import itertools
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # makes NumPy know bfloat16
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ferrum_jax.contract.errors import InvalidFormatError, IOError, NotFoundError, UnsupportedError
from ferrum_jax.models.division import PADDING, Runs

FLOATS = ("F64", "F32", "F16", "BF16")
NARROW = ("I64", "I32", "I8", "U8", "F8_E4M3", "F8_E8M0")  # dtypes of quantised weights only
_EIGHT_BITS = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


class Entry(NamedTuple):
    """One tensor of a header: where it is, its dtype and its shape."""

    path: Path
    name: str  # in that file
    dtype: str  # safetensors' name
    shape: tuple[int, ...]


def text_name(stored: str) -> str | None:
    """Returns a tensor's name in the language model alone, given its name in a multimodal checkpoint.

    Such a checkpoint has `language_model.` before or after `model.`. None: the tensor is not of the language model.
    """
    before, found, rest = stored.rpartition("language_model.")
    if found and before in ("", "model."):
        return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
    return stored if stored.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")) else None


def read_entries(path: Path, supported: Collection[str] | None = FLOATS) -> dict[str, Entry]:
    """Returns every tensor of the header, by name; reads no tensor.

    Raises:
        NotFoundError: there is no such file.
        IOError: it cannot be read.
        UnsupportedError: a tensor has a dtype that is not among those `supported`, unless they are None.
        InvalidFormatError: this is not a whole safetensors file.
    """
    check_regular(path)
    entries = {}
    try:
        path.open("rb").close()  # `safe_open` says of every problem that there is no such file
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                tensor = file.get_slice(name)
                entries[name] = Entry(path, name, tensor.get_dtype(), tuple(tensor.get_shape()))
                if supported is not None:
                    check_dtype(entries[name], supported)
    except FileNotFoundError:
        raise NotFoundError(f"{path} does not exist") from None
    except (SafetensorError, IsADirectoryError) as problem:
        raise InvalidFormatError(f"{path} is not a whole safetensors file: {problem}") from None
    except OSError as problem:
        raise IOError(f"{path} cannot be read: {problem.strerror or problem}") from None
    return entries


def check_regular(path: Path) -> None:
    """Raises InvalidFormatError for a pipe, socket or device, from which a read might block forever.

    A path that must not be looked at passes: reading it says why it cannot be.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise InvalidFormatError(f"{path} is no regular file")


def check_dtype(entry: Entry, supported: Collection[str]) -> None:
    """Raises UnsupportedError unless a tensor's dtype is supported."""
    if entry.dtype not in supported:
        raise UnsupportedError(
            f"{entry.path}: tensor {entry.name} is {entry.dtype}, supported are {', '.join(supported)}"
        )


def read_tensor(entry: Entry) -> NDArray[Any]:
    """Reads one tensor."""
    path, name = entry.path, entry.name
    try:
        with safe_open(path, framework="numpy") as file:
            kind = _EIGHT_BITS.get(entry.dtype)
            if kind is None:
                return file.get_tensor(name)
        return _read_bytes(path, name).view(kind)
    except (SafetensorError, OSError) as problem:
        raise InvalidFormatError(f"{path}: tensor {name} cannot be read: {problem}") from None


def read_runs(entry: Entry, runs: Sequence[Runs]) -> NDArray[Any]:
    """Reads runs of every dimension of a tensor, with zeros for padding; only these runs are in memory."""
    path, name = entry.path, entry.name
    shape = tuple(sum(count for _, count in own) for own in runs)
    try:
        with safe_open(path, framework="numpy") as file:
            tensor = file.get_slice(name)
            ranges = [list(_placed(own)) for own in runs]
            if all(len(own) == 1 and own[0][1] == slice(0, size) for own, size in zip(ranges, shape, strict=True)):
                return tensor[tuple(source for (source, _) in (own[0] for own in ranges))]
            found = None
            for pieces in itertools.product(*ranges):
                part = tensor[tuple(source for source, _ in pieces)]
                if found is None:
                    found = np.zeros(shape, part.dtype)
                found[tuple(there for _, there in pieces)] = part
            return np.zeros(shape, tensor[tuple(slice(0, 0) for _ in runs)].dtype) if found is None else found
    except (SafetensorError, OSError) as problem:
        raise InvalidFormatError(f"{path}: tensor {name} cannot be read: {problem}") from None


def _placed(runs: Runs) -> Iterator[tuple[slice, slice]]:
    """Yields for each run its place in the tensor and its place in the result."""
    at = 0
    for start, count in runs:
        if start != PADDING:
            yield slice(start, start + count), slice(at, at + count)
        at += count


def _read_bytes(path: Path, name: str) -> NDArray[np.uint8]:
    """Reads the bytes of a tensor whose dtype NumPy does not have; safetensors has verified the header before.

    A file begins with the length of its header, a JSON object, as a little-endian integer of 64 bits.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
        start, end = entry["data_offsets"]
        file.seek(8 + length + start)
        return np.frombuffer(file.read(end - start), np.uint8).reshape(entry["shape"])

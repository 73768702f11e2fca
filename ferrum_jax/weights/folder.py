"""Hugging Face folders: `config.json` and one or more safetensors files, read one tensor at a time."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ferrum_jax.config import ModelConfig
from ferrum_jax.config.families import MULTIMODAL, says_tied
from ferrum_jax.contract.errors import (
    ConfigError,
    FerrumError,
    InvalidFormatError,
    IOError,
    NotFoundError,
    UnsupportedError,
)
from ferrum_jax.models.division import Reader, Runs
from ferrum_jax.models.quantisation import Formats
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import named_leaves
from ferrum_jax.ops.quantised import QuantisedWeight
from ferrum_jax.weights.assemble import stored_apart, stored_axes
from ferrum_jax.weights.codes import (
    Codes,
    decode,
    decode_stack,
    native_format,
    read_codes,
    stack_to_leaf,
    to_leaf,
)
from ferrum_jax.weights.packed import PackedWeight, find_stacks, find_weights, is_unread
from ferrum_jax.weights.safetensors_file import (
    FLOATS,
    NARROW,
    Entry,
    check_dtype,
    check_regular,
    read_entries,
    read_runs,
    read_tensor,
    text_name,
)
from ferrum_jax.weights.scheme import MXFP4, Scheme, read_scheme, split_packing

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 1 << 12  # rows compared at a time
_SIXTEEN_BITS = {"F16": "float16", "BF16": "bfloat16"}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        NotFoundError: there is no such file.
        IOError: it cannot be read.
        InvalidFormatError: it does not hold a JSON object.
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
    """Reads a text file in UTF-8.

    Raises:
        NotFoundError: there is no such file.
        IOError: it cannot be read.
        InvalidFormatError: it is not UTF-8, or not a regular file.
    """
    check_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{path} does not exist") from None
    except OSError as problem:
        raise IOError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except UnicodeDecodeError as problem:
        raise InvalidFormatError(f"{path} is not UTF-8: {problem}") from None


class SafetensorsSource:
    """The tensors of a folder. Each read opens the file again, so that at most one tensor is in memory."""

    def __init__(self, folder: Path):
        self.path = folder
        self.formats: Formats = {}  # none: quantised weights are dequantised by default
        self.config, self._scheme, fields = _read_config(folder / "config.json")
        is_multimodal = fields["model_type"] in MULTIMODAL
        self._entries = _text_entries(_read_shards(folder), is_multimodal=is_multimodal)
        if is_multimodal and not says_tied(fields) and not any(name.startswith("lm_head.") for name in self._entries):
            self.config = replace(self.config, tie_word_embeddings=True)
        self._specs = named_leaves(family(self.config).param_specs(self.config))
        self._axes = stored_axes(self._specs)
        if self.config.tie_word_embeddings and HEAD in self._entries and EMBEDDINGS not in self._entries:
            self._entries[EMBEDDINGS] = self._entries.pop(HEAD)  # tied, and stored under the head's name only
        for entry in self._entries.values():
            check_dtype(entry, FLOATS if self._scheme is None else FLOATS + NARROW)
        self._packed = {} if self._scheme is None else self._find_packed(self._scheme)
        self._shapes = self._plain_shapes() | {name: weight.shape for name, weight in self._packed.items()}
        if self.config.tie_word_embeddings and self._has_own_head():  # as transformers does
            self.config = replace(self.config, tie_word_embeddings=False)
            self._specs = named_leaves(family(self.config).param_specs(self.config))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of every tensor, from the headers, with axes in the parameters' order."""
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor; dequantises a quantised one to a dtype that holds its numbers exactly."""
        if name not in self._packed:
            tensor = read_tensor(self._entries[name])
            return tensor.transpose(self._axes[name]) if name in self._axes else tensor
        assert self._scheme is not None
        with self._naming(name):
            is_stack = self._scheme.packing == MXFP4
            return decode_stack(self._read_parts(name)) if is_stack else decode(self._read_codes(name))

    def reader(self, name: str) -> Reader | None:
        """Returns what reads parts of a tensor; None for a quantised one or one with another order of axes."""
        if name in self._packed or name in self._axes or name not in self._entries:
            return None
        return partial(read_runs, self._entries[name])

    def stored_dtypes(self) -> dict[str, str]:
        """Returns the dtype of every 16-bit tensor; stacks of experts stored one by one are listed, too."""
        found = {name: self._entries[name].dtype for name in self._shapes if name not in self._packed}
        for name, parts in stored_apart(self._specs, found).items():
            kinds = {found.get(part) for part in parts}
            if len(kinds) == 1 and (kind := kinds.pop()) is not None:
                found[name] = kind
        return {name: _SIXTEEN_BITS[kind] for name, kind in found.items() if kind in _SIXTEEN_BITS}

    def native_formats(self, *, skip: bool = False) -> Formats:
        """Returns the formats of the quantised weights in their native quantisation.

        Raises:
            UnsupportedError: a weight has no native format, unless `skip` leaves such weights out.
        """
        found, scheme = {}, self._scheme
        for name, weight in self._packed.items():
            assert scheme is not None
            try:
                found[name] = native_format(f"{self.path}: {name}", weight, self._entries, scheme)
            except UnsupportedError:
                if not skip:
                    raise
        for name, parts in stored_apart(self._specs, {}).items():
            form, *others = {found.pop(part, None) for part in parts}
            if not others and form is not None:
                found[name] = form
            elif others and not skip:
                raise UnsupportedError(
                    f"{self.path}: the experts of {name} have different formats, and no native one as a stack; without "
                    "quantize='keep' they are dequantised"
                )
        return found

    def read_native(self, name: str) -> QuantisedWeight[np.ndarray]:
        """Reads one quantised weight in its native quantisation."""
        assert self._scheme is not None
        form = native_format(name, self._packed[name], self._entries, self._scheme)
        with self._naming(name):
            if self._scheme.packing == MXFP4:
                return stack_to_leaf(self._read_parts(name))
            return to_leaf(self._read_codes(name), self._scheme, form)

    def _read_codes(self, name: str) -> Codes:
        assert self._scheme is not None
        return read_codes(self._read_parts(name), self._scheme, self._packed[name].shape)

    def _read_parts(self, name: str) -> dict[str, np.ndarray]:
        tensors = self._packed[name].tensors
        return {part: read_tensor(self._entries[tensor]) for part, tensor in tensors.items()}

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except InvalidFormatError as problem:
            raise InvalidFormatError(f"{self.path}: {name}: {problem}") from None

    def _has_own_head(self) -> bool:
        """Whether the head differs from the embeddings; reads both, some rows at a time, if both exist."""
        embeddings, head = self._shapes.get(EMBEDDINGS), self._shapes.get(HEAD)
        if head is None or embeddings != self._specs[EMBEDDINGS].shape:
            return False
        if head != embeddings:
            return True
        if not self._packed.keys().isdisjoint((EMBEDDINGS, HEAD)):
            return not np.array_equal(self.read(EMBEDDINGS), self.read(HEAD))
        size, width = head
        for start in range(0, size, _ROWS):
            runs: tuple[Runs, ...] = (((start, min(_ROWS, size - start)),), ((0, width),))
            ours, other = (read_runs(self._entries[name], runs) for name in (EMBEDDINGS, HEAD))
            if not np.array_equal(ours, other):
                return True
        return False

    def _find_packed(self, scheme: Scheme) -> dict[str, PackedWeight]:
        if scheme.packing == MXFP4:
            return find_stacks(self.path, self._entries)
        return find_weights(self.path, self._entries, scheme, lambda name: read_tensor(self._entries[name]))

    def _plain_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the plain tensors, without the zero biases that GPTQ adds to products without bias."""
        parts = {tensor for weight in self._packed.values() for tensor in weight.tensors.values()}
        found = {}
        for name, entry in self._entries.items():
            if name in parts or (self._packed and is_unread(name)):
                continue
            check_dtype(entry, FLOATS)
            module, _, last = name.rpartition(".")
            added = last == "bias" and f"{module}.weight" in self._packed and name not in self._specs
            if not (added and not read_tensor(entry).any()):
                axes, shape = self._axes.get(name), entry.shape
                found[name] = tuple(shape[i] for i in axes) if axes and len(axes) == len(shape) else shape
        return found


def _read_config(path: Path) -> tuple[ModelConfig, Scheme | None, Mapping[str, Any]]:
    """Reads the model's configuration and that of quantised weights; returns also the file's fields."""
    fields, packing = split_packing(read_json(path))
    try:
        cfg = ModelConfig.from_hf(fields)
        return cfg, None if packing is None else read_scheme(packing), fields
    except (ConfigError, UnsupportedError) as problem:
        raise type(problem)(f"{path}: {problem}") from None


def _shards(folder: Path) -> list[Path]:
    if listed := _weight_map(folder):
        return [folder / name for name in sorted(set(listed.values()))]
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickled = "; its .bin files are not read: save the model as safetensors" * any(folder.glob("*.bin"))
        raise NotFoundError(f"{folder} holds no {WHOLE} and no {INDEX}{pickled}")
    if len(found) > 1:
        raise NotFoundError(f"{folder} holds {len(found)} safetensors files but no {INDEX}")
    return found


def _weight_map(folder: Path) -> dict[str, str]:
    """Returns the file of every tensor, from the index; empty without an index.

    If `model.safetensors` exists and the index does not name it, the index belongs to an older checkpoint in the same
    folder, and is ignored: transformers writes the whole file and leaves the index.
    """
    if not (folder / INDEX).exists():
        return {}
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise InvalidFormatError(f"{folder / INDEX} has no weight_map of tensor names to files")
    outside = [name for name in listed.values() if name in ("", "..") or Path(name).name != name]
    if outside:
        raise InvalidFormatError(f"{folder / INDEX} names {outside[0]!r}, which is not a file of this folder")
    if (folder / WHOLE).exists() and WHOLE not in listed.values():
        return {}
    return listed


def _read_shards(folder: Path) -> dict[str, Entry]:
    """Returns the tensors of all files of a folder, by the names that they have there."""
    found: dict[str, Entry] = {}
    for path in _shards(folder):
        for name, entry in read_entries(path, None).items():
            if name in found:
                raise InvalidFormatError(f"{path}: tensor {name} is also in {found[name].path.name}")
            found[name] = entry
    for name, shard in _weight_map(folder).items():
        if name not in found:
            raise InvalidFormatError(f"{folder / shard}: tensor {name} is missing, which {INDEX} promises")
    return found


def _text_entries(stored: Mapping[str, Entry], *, is_multimodal: bool) -> dict[str, Entry]:
    """Returns the tensors of the language model, by their names in a checkpoint of that model alone.

    Of a multimodal checkpoint the other tensors are ignored. One that was saved without a head, as by transformers'
    `AutoModel`, lacks the prefix `model.`.
    """
    if not is_multimodal and not any("language_model." in name for name in stored):
        prefix = "" if any(name.startswith("model.") for name in stored) else "model."
        return {name if name.startswith("lm_head.") else prefix + name: entry for name, entry in stored.items()}
    found: dict[str, Entry] = {}
    for name, entry in stored.items():
        own = text_name(name)
        if own in found:
            raise InvalidFormatError(f"{entry.path}: {name} and {found[own].name} are both {own}")
        if own is not None:
            found[own] = entry
    return found

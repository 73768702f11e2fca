"""An open GGUF file: its metadata and its tensors, as the `gguf` package reads them."""

import functools
import importlib.util
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ferrum_jax.contract.errors import InvalidFormatError, NotFoundError, UnsupportedError, safe_repr
from ferrum_jax.weights.safetensors_file import check_regular

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderField, ReaderTensor


class GgufFile:
    """A GGUF file whose header was read, or all parts of a split one; tensors stay on disk until they are accessed."""

    def __init__(self, path: Path):
        """Opens a file; of a split one, the first, which has the metadata, and the others beside it.

        Raises:
            NotFoundError: there is no such file.
            UnsupportedError: the gguf package is not installed.
            InvalidFormatError: it is not a whole GGUF file, or not the first part of one.
        """
        self.path = path
        self._reader = _read(path)
        self._others = self._other_parts()

    @functools.cached_property
    def tensors(self) -> "list[ReaderTensor]":
        """All tensors, with their GGUF names.

        Raises:
            NotFoundError: a part is missing.
            InvalidFormatError: a part is not whole, or parts do not belong together.
        """
        found = [*self._reader.tensors]
        for number, part in enumerate(self._others, start=1):
            reader = _read(part)
            own = [_number(reader, f"split.{name}", -1) for name in ("no", "count")]
            if own != [number, self._count]:
                raise InvalidFormatError(
                    f"{part} is part {own[0] + 1} of {own[1]}, expected {number + 1} of {self._count}"
                )
            found += reader.tensors
        if twice := [name for name, count in Counter(tensor.name for tensor in found).items() if count > 1]:
            raise InvalidFormatError(f"{self.path} and its other parts have {twice[0]} more than once")
        if (stated := _number(self._reader, "split.tensors.count", len(found))) != len(found):
            raise InvalidFormatError(f"{self.path} and its other parts have {len(found)} tensors, expected {stated}")
        return found

    @property
    def _count(self) -> int:
        return _number(self._reader, "split.count", 1)

    def _other_parts(self) -> list[Path]:
        """Returns the paths of the other parts, which llama.cpp's `gguf-split` numbers."""
        if self._count <= 1:
            return []
        name = re.fullmatch(r"(.*)-00001(-of-)(\d{5})(\.gguf)", self.path.name, re.IGNORECASE)
        if name is None or int(name[3]) != self._count or _number(self._reader, "split.no", 0) != 0:
            raise InvalidFormatError(
                f"{self.path} is one of {self._count} parts: give the first, whose name ends in "
                f"-00001-of-{self._count:05}.gguf, with the others beside it"
            )
        ending = "".join(name.groups()[1:])
        return [self.path.with_name(f"{name[1]}-{at:05}{ending}") for at in range(2, self._count + 1)]

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """The key-value pairs, with arrays as lists."""
        try:
            return {key: field.contents() for key, field in self._reader.fields.items()}
        except RecursionError:
            raise InvalidFormatError(f"{self.path} has metadata that are nested too deeply") from None
        except (ValueError, IndexError, UnicodeDecodeError) as problem:
            raise InvalidFormatError(f"{self.path} has metadata that cannot be read: {problem}") from None


def _number(reader: "GGUFReader", key: str, default: int) -> int:
    """Returns an integer of the metadata, or the default where there is none."""
    field = reader.fields.get(key)
    try:
        found = default if field is None else field.contents()
    except (RecursionError, ValueError, IndexError):
        found = None
    if not isinstance(found, int):
        raise InvalidFormatError(f"{key} is {safe_repr(found)}, expected a number")
    return found


def _read(path: Path) -> "GGUFReader":
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedError(f"{path}: reading GGUF needs the package gguf, the extra `gguf`")
    from gguf import GGUFReader

    class PlainReader(GGUFReader):
        """Reads through a plain array: slicing a memmap 100,000 times takes half of the time to open a file."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

        def _get(
            self,
            offset: int,
            dtype: npt.DTypeLike,
            count: int = 1,
            override_order: Literal["I", "S", "<"] | None = None,
        ) -> npt.NDArray[Any]:
            """Raises ValueError past the end of the file, where a damaged count would loop over empty arrays."""
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data)}, byte {end} was to be read")
            order = override_order or self.byte_order
            values = self.data[int(offset) : end].view(dtype)
            return values if order == "I" else values.view(values.dtype.newbyteorder(order))

        def _build_tensors(self, start_offs: int, fields: "list[ReaderField]") -> None:
            """Builds the tensors; raises ValueError that names the first tensor that cannot be read."""
            try:
                super()._build_tensors(start_offs, fields)
            except (ValueError, KeyError, OverflowError):
                for field in fields:
                    try:
                        super()._build_tensors(start_offs, [field])
                    except (ValueError, KeyError, OverflowError) as problem:
                        raise ValueError(f"tensor {field.name}: {problem}") from None
                raise

    check_regular(path)
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist")
    try:
        reader = PlainReader(path)
    except RecursionError:
        raise InvalidFormatError(f"{path} has metadata that are nested too deeply") from None
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, OSError, MemoryError) as problem:
        raise InvalidFormatError(f"{path} is not a whole GGUF file: {problem}") from None
    if reader.byte_order == "S":
        raise UnsupportedError(f"{path} is a big-endian GGUF file, only little-endian ones are read")
    return reader

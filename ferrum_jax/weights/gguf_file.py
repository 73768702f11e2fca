"""An open GGUF file: its metadata and its tensors, as the `gguf` package reads them."""

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ferrum_jax.contract.errors import InvalidFormatError, NotFoundError, UnsupportedError
from ferrum_jax.weights.safetensors_file import check_regular

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderField, ReaderTensor


class GgufFile:
    """A GGUF file whose header was read; tensors stay on disk until their data is accessed."""

    def __init__(self, path: Path):
        """Opens a file.

        Raises:
            NotFoundError: there is no such file.
            UnsupportedError: the gguf package is not installed.
            InvalidFormatError: it is not a whole GGUF file.
        """
        self.path = path
        self._reader = _read(path)

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """The key-value pairs, with arrays as lists."""
        try:
            return {key: field.contents() for key, field in self._reader.fields.items()}
        except RecursionError:
            raise InvalidFormatError(f"{self.path} has metadata that are nested too deeply") from None
        except (ValueError, IndexError, UnicodeDecodeError) as problem:
            raise InvalidFormatError(f"{self.path} has metadata that cannot be read: {problem}") from None

    @property
    def tensors(self) -> "list[ReaderTensor]":
        """All tensors, with their GGUF names."""
        return self._reader.tensors


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

"""GGUF files: their configuration, and their tensors, dequantised by the `gguf` package or in native quantisation.

The layouts of blocks are those of ggml's `ggml-common.h`. In native quantisation, values of two and three bits are
stored in four, and those of IQ4 as the bytes that their table has. The scales of a block of 256 count a number of the
block's own; they stay integers.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import ConfigError, InvalidFormatError, UnsupportedError
from ferrum_jax.models.quantisation import Format, Formats
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import named_leaves
from ferrum_jax.ops.quantised import (
    FLOAT4,
    PACKED,
    POWERS,
    UINT4,
    UINT5,
    UINT6,
    UINTS,
    QuantisedWeight,
    pack,
    pack_high,
)
from ferrum_jax.weights.codes import check_powers
from ferrum_jax.weights.gguf_config import ARCHITECTURES, FREQUENCIES, Header, read_config
from ferrum_jax.weights.gguf_file import GgufFile
from ferrum_jax.weights.huge_pages import stack_in_turn

if TYPE_CHECKING:
    from gguf import ReaderTensor

SHARED_GATE = ".shared_expert_gate.weight"
UNQUANTISED = "F32", "F16", "BF16"
DEQUANTISED = "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "TQ1_0", "TQ2_0"  # never kept
SUPER = 256  # numbers of a K block

Bytes = NDArray[np.uint8]
Counts = tuple[NDArray[Any], NDArray[np.float16]]  # integers [blocks, groups], and what they count [blocks, 1]
Parts = tuple[NDArray[Any], NDArray[Any] | Counts, NDArray[Any] | Counts | None]  # values, scales and offsets


class GgufSource:
    """The tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, path: Path):
        self.path = path
        self.formats: Formats = {}  # none: quantised weights are dequantised by default
        self.file = GgufFile(path)
        _ = self.file.tensors  # a part that is missing or damaged says so itself
        try:
            header = Header(self.file)
            # Hugging Face has one setting for the biases of all four projections; a file may have any of the biases.
            out_bias = header.has("blk.0.attn_output.bias")
            self.config = replace(ModelConfig.from_hf(read_config(header)), attention_out_bias=out_bias)
            self._architecture = ARCHITECTURES[header.architecture]
        except (ConfigError, UnsupportedError) as problem:
            raise type(problem)(f"{path}: {problem}") from None
        except (TypeError, ValueError, ZeroDivisionError, IndexError) as problem:
            raise InvalidFormatError(f"{path} has metadata that describe no model: {problem}") from None
        self._names = named_leaves(family(self.config).param_specs(self.config))
        self._tensors = self._by_hf_name(header.architecture)
        self._shapes = {name: self._shape_of(tensors) for name, tensors in self._tensors.items()}
        for name, shape in self._shapes.items():
            if name.endswith(SHARED_GATE) and len(shape) == 1:  # a gate with one row is stored as a vector
                self._shapes[name] = (1, *shape)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of every tensor, from the header."""
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        """Dequantises one tensor to float32."""
        from gguf.quants import dequantize

        def make(tensor: "ReaderTensor", shape: tuple[int, ...]) -> np.ndarray:
            # Copied, as a view of float32 data would keep the whole file mapped while the parameters live.
            data = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            return data.astype(np.float32, copy=tensor.tensor_type.name == "F32")

        return self._take(name, make)

    def reader(self, name: str) -> None:
        """Returns None: no tensor can be read in parts."""

    def stored_dtypes(self) -> dict[str, str]:
        """Returns the dtype of every 16-bit tensor."""
        names = {"F16": "float16", "BF16": "bfloat16"}
        alike = {name: kinds[0] for name, kinds in self._kinds.items() if len(set(kinds)) == 1}
        return {name: names[kind] for name, kind in alike.items() if kind in names}

    def native_formats(self, *, skip: bool = False) -> Formats:
        """Returns the formats of the quantised matrices in their native quantisation.

        Raises:
            UnsupportedError: a parameter is made of tensors of different types, unless `skip` leaves it out.
        """
        found = {}
        for name, shape in self._shapes.items():
            if 0 in shape:  # reading it says what was expected
                continue
            kinds = sorted(set(self._kinds_of(name)))
            form, *others = {native_format(kind, shape[-1]) if len(shape) > 1 else None for kind in kinds}
            if not others and form is not None:
                found[name] = form
            elif others and not skip:
                raise UnsupportedError(
                    f"{self.path}: {name} is made of tensors in {' and '.join(kinds)}, which have no native format "
                    "together; without quantize='keep' they are dequantised"
                )
        return found

    def read_native(self, name: str) -> QuantisedWeight[np.ndarray]:
        """Reads one quantised matrix, or a stack of experts, in its native quantisation."""

        def make(tensor: "ReaderTensor", shape: tuple[int, ...]) -> QuantisedWeight[np.ndarray]:
            kind = tensor.tensor_type.name
            *experts, rows, columns = shape
            if not experts:
                return to_leaf(kind, tensor.data, (rows, columns))
            return stack_in_turn((to_leaf(kind, own, (rows, columns)) for own in tensor.data), len(tensor.data))

        return self._take(name, make)

    @functools.cached_property
    def _kinds(self) -> dict[str, list[str]]:
        """GGUF types of every parameter's tensors; raises UnsupportedError before any tensor is read."""
        return {name: self._kinds_of(name) for name in self._names if name in self._tensors}

    def _kinds_of(self, name: str) -> list[str]:
        for tensor in self._tensors[name]:
            if (kind := tensor.tensor_type.name) not in (types := (*UNQUANTISED, *_KINDS, *DEQUANTISED)):
                raise UnsupportedError(f"{self.path}: tensor {tensor.name} is {kind}, supported are {', '.join(types)}")
        return [tensor.tensor_type.name for tensor in self._tensors[name]]

    def _shape_of(self, tensors: "Sequence[ReaderTensor]") -> tuple[int, ...]:
        """Returns the shape of a parameter, rows first; of two tensors whose rows alternate, `[E, 2 F, ...]`."""
        shape, *others = [tuple(int(size) for size in reversed(tensor.shape)) for tensor in tensors]
        if not others:
            return shape
        if len(shape) < 2 or any(other != shape for other in others):
            found = " and ".join(f"{one.name} has shape {list(map(int, reversed(one.shape)))}" for one in tensors)
            raise InvalidFormatError(f"{self.path}: {found}, expected stacks of one shape")
        return shape[0], len(tensors) * shape[1], *shape[2:]

    def _take(self, name: str, make: Callable[["ReaderTensor", tuple[int, ...]], Any]) -> Any:
        """Reads a parameter's tensors by `make(tensor, shape)`; converts to Hugging Face's rows and offset of norms."""
        tensors, shape, count = self._tensors[name], self._shapes[name], len(self._kinds[name])
        if count > 1:
            shape = (shape[0], shape[1] // count, *shape[2:])
        found = []
        for tensor in tensors:
            try:
                if tensor.tensor_type.name == "MXFP4":
                    check_powers(tensor.data.reshape(-1, _KINDS["MXFP4"].num_bytes)[:, 0])
                found.append(make(tensor, shape))
            except (ValueError, IndexError) as problem:
                raise InvalidFormatError(f"{self.path}: tensor {tensor.name} cannot be read: {problem}") from None
        made = found[0] if count == 1 else jax.tree.map(_alternate, *found)
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        module = name.split(".")[-2]
        if self._architecture.interleaves and module in heads:
            return jax.tree.map(lambda values: _unpermute(values, heads[module]), made)
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            return made - np.float32(self._architecture.norm_offset)
        return made

    def _by_hf_name(self, architecture: str) -> dict[str, "tuple[ReaderTensor, ...]"]:
        """Returns the tensors that each parameter is made of: one, or two whose rows alternate."""
        from gguf import MODEL_ARCH, get_tensor_name_map

        by_gguf_name = {tensor.name: (tensor,) for tensor in self.file.tensors if tensor.name not in FREQUENCIES}
        names = get_tensor_name_map(MODEL_ARCH[architecture.upper().replace("-", "_")], self.config.num_hidden_layers)
        found = {}
        for layer, (part, stored) in itertools.product(
            range(self.config.num_hidden_layers), self._architecture.parts.items()
        ):
            given = [by_gguf_name.pop(f"blk.{layer}.{name}", ()) for name in stored]
            if all(given):
                found[f"model.layers.{layer}.{part}"] = tuple(tensor for tensors in given for tensor in tensors)
        for module in dict.fromkeys(name.rsplit(".", 1)[0] for name in self._names):
            gguf_name = names.get_name(module)
            for leaf in ("weight", "bias"):
                tensor = by_gguf_name.pop(f"{gguf_name}.{leaf}", None)
                if tensor is not None:
                    found[f"{module}.{leaf}"] = tensor
        return found | by_gguf_name


def _alternate(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Joins two stacks `[E, F, ...]` to `[E, 2 F, ...]`, row by row in turn."""
    return np.stack([first, second], axis=2).reshape(first.shape[0], -1, *first.shape[2:])


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the interleaving of rotary pairs that llama.cpp's conversion applies to Llama's q and k."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])  # [heads, H/2, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


class _Kind(NamedTuple):
    group_size: int
    values: str
    scales: str | None  # None: integers that count a number of each K block
    has_offsets: bool
    num_bytes: int  # of a block
    split: Callable[[Bytes], Parts]


def native_format(kind: str, columns: int) -> Format | None:
    """Returns the native format of a matrix of a GGUF type; None if the type is not quantised."""
    if kind not in _KINDS:
        return None
    found = _KINDS[kind]
    scales = found.scales or Format("int8", columns // SUPER, "float16")
    return Format(found.values, columns // found.group_size, scales, scales if found.has_offsets else None)


def to_leaf(kind: str, data: Bytes, shape: tuple[int, int]) -> QuantisedWeight[np.ndarray]:
    """Converts the bytes of a matrix's blocks to the quantised leaf `[F, D]`."""
    found = _KINDS[kind]
    values, scales, offsets = found.split(np.ascontiguousarray(data).reshape(-1, found.num_bytes))
    values, groups = values.reshape(shape), shape[1] // found.group_size

    def part(given: NDArray[Any] | Counts | None) -> Any:
        if not isinstance(given, tuple):
            return None if given is None else np.array(given.reshape(shape[0], groups), found.scales)
        counts, units = given
        return QuantisedWeight(
            values=counts.reshape(shape[0], groups).astype(np.int8),
            scales=np.array(units.reshape(shape[0], -1), np.float16),
        )

    if found.values not in PACKED:
        return QuantisedWeight(values=values.astype(np.int8), scales=part(scales), offsets=part(offsets))
    high = pack_high(values, groups, bits) if (bits := UINTS.get(found.values, 4)) > 4 else None
    return QuantisedWeight(values=pack(values, groups), scales=part(scales), offsets=part(offsets), high=high)


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """Reads one half-precision number of each block: `[blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _nibbles(data: Bytes) -> Bytes:
    """Splits bytes `[..., n]` into their low, then their high bits: `[..., 2 n]`."""
    return np.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=-1)


def _pairs_in_runs(data: Bytes, run: int = 32) -> Bytes:
    """Splits each run of 32 bytes into its lowest pairs of bits, the next, and so on: `[blocks, n / 32, 4, 32]`."""
    return data.reshape(len(data), -1, 1, run) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)


def _fifth(data: Bytes) -> Bytes:
    """Reads 32 bits of each block, each shifted to the place of a fifth bit."""
    return np.unpackbits(data, axis=-1, bitorder="little") << np.uint8(4)


def _q2_k(blocks: Bytes) -> Parts:
    scales, least = blocks[:, :16] & np.uint8(15), blocks[:, :16] >> np.uint8(4)
    return _pairs_in_runs(blocks[:, 16:80]), (scales, _half(blocks, 80)), (least, -_half(blocks, 82))


def _q3_k(blocks: Bytes) -> Parts:
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # [blocks, 8, 32]; 0: minus 4
    values = _pairs_in_runs(blocks[:, 32:96]).reshape(-1, 8, 32) | third << np.uint8(2)
    high = _pairs_in_runs(blocks[:, 104:108], 4).reshape(-1, 16)
    scales = (_nibbles(blocks[:, 96:104]) | high << np.uint8(4)).astype(np.int8) - 32
    return values + np.uint8(4), (scales, _half(blocks, 108)), None


def _q4_k(blocks: Bytes) -> Parts:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # [blocks, 8, 32]
    return _k_nibbles(blocks[:, 48:]) | high << np.uint8(4), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = _pairs_in_runs(blocks[:, 128:192])
    scales = blocks[:, 192:208].view(np.int8), _half(blocks, 208)
    return low | high << np.uint8(4), scales, None


def _k_nibbles(data: Bytes) -> Bytes:
    return _nibbles(data.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _k_scales(blocks: Bytes) -> tuple[Counts, Counts]:
    """Reads six-bit scales and offsets of eight groups from twelve bytes."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return (scales, _half(blocks, 0)), (least, -_half(blocks, 2))


def _q5_0(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 6:]) | _fifth(blocks[:, 2:6]), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 8:]) | _fifth(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _iq4_xs(blocks: Bytes) -> Parts:
    high = _pairs_in_runs(blocks[:, 2:4], 2)  # [blocks, 1, 4, 2]: of groups 0 and 4, 1 and 5, and so on
    high = high.reshape(-1, 4, 2).swapaxes(1, 2).reshape(-1, 8)
    low = np.stack([blocks[:, 4:8] & np.uint8(15), blocks[:, 4:8] >> np.uint8(4)], axis=-1).reshape(-1, 8)
    scales = (low | high << np.uint8(4)).astype(np.int8) - 32
    return _IQ4[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))], (scales, _half(blocks, 0)), None


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_KINDS = {
    "Q4_0": _Kind(32, UINT4, "float16", False, 18, lambda b: (_nibbles(b[:, 2:]), _half(b, 0), None)),
    "Q4_1": _Kind(32, UINT4, "float16", True, 20, lambda b: (_nibbles(b[:, 4:]), _half(b, 0), _half(b, 2))),
    "Q5_0": _Kind(32, UINT5, "float16", False, 22, _q5_0),
    "Q5_1": _Kind(32, UINT5, "float16", True, 24, _q5_1),
    "Q8_0": _Kind(32, "int8", "float16", False, 34, lambda b: (b[:, 2:].view(np.int8), _half(b, 0), None)),
    "Q2_K": _Kind(16, UINT4, None, True, 84, _q2_k),
    "Q3_K": _Kind(16, UINT4, None, False, 110, _q3_k),
    "Q4_K": _Kind(32, UINT4, None, True, 144, _q4_k),
    "Q5_K": _Kind(32, UINT5, None, True, 176, _q5_k),
    "Q6_K": _Kind(16, UINT6, None, False, 210, _q6_k),
    "IQ4_NL": _Kind(32, "int8", "float16", False, 18, lambda b: (_IQ4[_nibbles(b[:, 2:])], _half(b, 0), None)),
    "IQ4_XS": _Kind(32, "int8", None, False, 136, _iq4_xs),
    "MXFP4": _Kind(32, FLOAT4, POWERS, False, 17, lambda b: (_nibbles(b[:, 1:]), b[:, :1], None)),
}

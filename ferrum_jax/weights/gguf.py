"""GGUF files, dequantised through the `gguf` package or in their native quantisation, with their configuration."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import ConfigError, InvalidFormatError, UnsupportedError
from ferrum_jax.models.quantisation import Formats
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import named_leaves
from ferrum_jax.ops.quantised import QuantisedWeight
from ferrum_jax.weights.gguf_blocks import native_format, to_leaf
from ferrum_jax.weights.gguf_config import ARCHITECTURES, FREQUENCIES, Header, read_config
from ferrum_jax.weights.gguf_file import GgufFile

if TYPE_CHECKING:
    from gguf import ReaderTensor

SHARED_GATE = ".shared_expert_gate.weight"
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


class GgufSource:
    """The tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, path: Path):
        self.path = path
        self.formats: Formats = {}  # none: quantised weights are dequantised unless asked for
        self.file = GgufFile(path)
        try:
            header = Header(self.file)
            # Hugging Face has one switch for the biases of all four projections, a file may have any of them.
            out_bias = header.has("blk.0.attn_output.bias")
            self.config = replace(ModelConfig.from_hf(read_config(header)), attention_out_bias=out_bias)
            self._architecture = ARCHITECTURES[header.architecture]
        except (ConfigError, UnsupportedError) as problem:
            raise type(problem)(f"{path}: {problem}") from None
        except (TypeError, ValueError, ZeroDivisionError, IndexError) as problem:
            raise InvalidFormatError(f"{path} has metadata that describe no model: {problem}") from None
        self._names = named_leaves(family(self.config).param_specs(self.config))
        self._tensors = self._by_hf_name(header.architecture)
        self._shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}
        for name, shape in self._shapes.items():
            if name.endswith(SHARED_GATE) and len(shape) == 1:  # a gate with one row is stored as a vector
                self._shapes[name] = (1, *shape)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, from the header."""
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        """Dequantises one tensor to float32."""
        from gguf.quants import dequantize

        tensor, kind = self._tensors[name], self._kinds[name]

        def make(shape: tuple[int, ...]) -> np.ndarray:
            # A view of float32 data would keep the whole file mapped as long as the parameters live.
            data = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            return data.astype(np.float32, copy=kind == "F32")

        return self._take(name, make)

    def slices(self, name: str) -> None:
        """No tensor is read in parts."""

    def stored_dtypes(self) -> dict[str, str]:
        """Dtype of every tensor of 16 bits."""
        names = {"F16": "float16", "BF16": "bfloat16"}
        return {name: names[kind] for name, kind in self._kinds.items() if kind in names}

    def native_formats(self, *, skip: bool = False) -> Formats:
        """Formats of the quantised matrices in their native quantisation; with `skip`, of those that have one.

        Raises:
            UnsupportedError: there are quantised experts.
        """
        found = {}
        for name, shape in self._shapes.items():
            if len(shape) < 2 or (form := native_format(self._kind_of(name), shape[-1])) is None:
                continue
            if len(shape) > 2:
                if skip:
                    continue
                raise UnsupportedError(
                    f"{self.path}: experts, such as {name}, have no native format; without quantize='keep' they are "
                    "dequantised"
                )
            found[name] = form
        return found

    def read_native(self, name: str) -> QuantisedWeight[np.ndarray]:
        """Reads one quantised matrix in its native quantisation."""
        kind, data = self._kinds[name], self._tensors[name].data
        return self._take(name, lambda shape: to_leaf(kind, data, shape))

    @functools.cached_property
    def _kinds(self) -> dict[str, str]:
        """Type of every tensor of the model; raises for an unsupported one before any tensor is read."""
        return {name: self._kind_of(name) for name in self._names if name in self._tensors}

    def _kind_of(self, name: str) -> str:
        tensor = self._tensors[name]
        if (kind := tensor.tensor_type.name) not in TYPES:
            raise UnsupportedError(f"{self.path}: tensor {tensor.name} is {kind}, supported are {', '.join(TYPES)}")
        return kind

    def _take(self, name: str, make: Callable[[Any], Any]) -> Any:
        """Reads one tensor with `make`, given its shape, and brings its rows into Hugging Face's order."""
        try:
            made = make(self._shapes[name])
        except (ValueError, IndexError) as problem:
            stored = self._tensors[name].name
            raise InvalidFormatError(f"{self.path}: tensor {stored} cannot be read: {problem}") from None
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        module = name.split(".")[-2]
        if self._architecture.interleaves and module in heads:
            return jax.tree.map(lambda values: _unpermute(values, heads[module]), made)
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            return made - np.float32(self._architecture.norm_offset)
        return made

    def _by_hf_name(self, architecture: str) -> dict[str, "ReaderTensor"]:
        from gguf import MODEL_ARCH, get_tensor_name_map

        by_gguf_name = {tensor.name: tensor for tensor in self.file.tensors if tensor.name not in FREQUENCIES}
        names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], self.config.num_hidden_layers)
        found = {}
        for module in dict.fromkeys(name.rsplit(".", 1)[0] for name in self._names):
            gguf_name = names.get_name(module)
            for leaf in ("weight", "bias"):
                tensor = by_gguf_name.pop(f"{gguf_name}.{leaf}", None)
                if tensor is not None:
                    found[f"{module}.{leaf}"] = tensor
        return found | by_gguf_name


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the interleaving of rotary pairs that llama.cpp's conversion applies to Llama's q and k."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])  # [heads, H/2, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)

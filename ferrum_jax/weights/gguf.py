"""GGUF files, dequantised through the `gguf` package or kept; the configuration comes out of the file itself."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import ConfigError, InvalidFormatError, UnsupportedError
from ferrum_jax.models.layers import rope
from ferrum_jax.models.quantisation import Formats
from ferrum_jax.models.quantised import QuantisedWeight
from ferrum_jax.weights.gguf_blocks import choose_format, keep
from ferrum_jax.weights.gguf_file import GgufFile

if TYPE_CHECKING:
    from gguf import ReaderTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufSource:
    """The tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, path: Path):
        self.path = path
        self.formats: Formats = {}  # a file's own quantisation is undone as it is read, unless it is asked for
        self.file = GgufFile(path)
        try:
            # One switch of Hugging Face stands for all four projections, and a file may have biases on any.
            out_bias = any(tensor.name == "blk.0.attn_output.bias" for tensor in self.file.tensors)
            self.config = replace(ModelConfig.from_hf(self._hf_config()), attention_out_bias=out_bias)
        except (ConfigError, UnsupportedError) as problem:
            raise type(problem)(f"{path}: {problem}") from None
        except (TypeError, ValueError, ZeroDivisionError, IndexError) as problem:
            raise InvalidFormatError(f"{path} has metadata that describe no model: {problem}") from None
        self._tensors = self._by_hf_name()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, from the header."""
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """Dequantises one tensor to float32."""
        from gguf.quants import dequantize

        tensor, kind = self._tensors[name], self._kind_of(name)
        # Float32 as it lies would be a view, and with it all of the file stay mapped as long as the parameters.
        return self._take(
            name,
            lambda shape: (
                dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32, copy=kind == "F32")
            ),
        )

    def kept_formats(self) -> Formats:
        """Says how the quantised matrices are kept, if they are."""
        formats = {
            name: choose_format(self._kind_of(name), shape[1])
            for name, shape in self.shapes().items()
            if len(shape) == 2
        }
        return {name: form for name, form in formats.items() if form is not None}

    def read_kept(self, name: str) -> QuantisedWeight[np.ndarray]:
        """Reads one quantised matrix as it is kept."""
        kind, data = self._kind_of(name), self._tensors[name].data
        return self._take(name, lambda shape: keep(kind, data, shape))

    def _kind_of(self, name: str) -> str:
        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        if kind not in TYPES:
            raise UnsupportedError(f"{self.path}: tensor {tensor.name} is {kind}, supported are {', '.join(TYPES)}")
        return kind

    def _take(self, name: str, make: Callable[[Any], Any]) -> Any:
        """Makes an array or a leaf of one tensor, given its shape, with the rows in Hugging Face's order."""
        try:
            made = make(self.shapes()[name])
        except (ValueError, IndexError) as problem:
            raise InvalidFormatError(
                f"{self.path}: tensor {self._tensors[name].name} cannot be read: {problem}"
            ) from None
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        module = name.split(".")[-2]
        if self._field("general.architecture") == "llama" and module in heads:
            return jax.tree.map(lambda values: _unpermute(values, heads[module]), made)
        return made

    def _field(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(key, default)

    def _by_hf_name(self) -> dict[str, "ReaderTensor"]:
        from gguf import MODEL_ARCH, get_tensor_name_map

        by_gguf_name = {tensor.name: tensor for tensor in self.file.tensors}
        architecture = MODEL_ARCH[str(self._field("general.architecture")).upper()]
        names = get_tensor_name_map(architecture, self.config.num_hidden_layers)
        found = {}
        for module in _modules(self.config):
            gguf_name = names.get_name(module)
            for leaf in ("weight", "bias"):
                tensor = by_gguf_name.pop(f"{gguf_name}.{leaf}", None)
                if tensor is not None:
                    found[f"{module}.{leaf}"] = tensor
        by_gguf_name.pop("rope_freqs.weight", None)
        return found | by_gguf_name

    def _hf_config(self) -> dict[str, Any]:
        arch = self._field("general.architecture")
        if arch not in ARCHITECTURES:
            raise UnsupportedError(f"architecture {arch!r}, supported are {', '.join(ARCHITECTURES)}")

        def need(key: str) -> Any:
            value = self._field(f"{arch}.{key}")
            if value is None:
                raise ConfigError(f"no field {arch}.{key}")
            return value

        self._refuse_ignored(arch)
        names = {tensor.name for tensor in self.file.tensors}
        embeddings = next((t for t in self.file.tensors if t.name == "token_embd.weight"), None)
        if embeddings is None:
            raise ConfigError("no tensor token_embd.weight")
        window = self._field(f"{arch}.attention.sliding_window")
        heads = need("attention.head_count")
        return {
            "model_type": "mistral" if arch == "llama" and window else arch,
            "vocab_size": int(embeddings.shape[1]),
            "hidden_size": need("embedding_length"),
            "intermediate_size": need("feed_forward_length"),
            "num_hidden_layers": need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field(f"{arch}.attention.head_count_kv", heads),
            "head_dim": self._field(f"{arch}.attention.key_length") or need("embedding_length") // heads,
            "max_position_embeddings": need("context_length"),
            "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._field(f"{arch}.rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(arch),
            "tie_word_embeddings": "output.weight" not in names,
            "attention_bias": "blk.0.attn_q.bias" in names,
            "sliding_window": window,
            "use_sliding_window": bool(window),
            "max_window_layers": 0,
            "num_experts": self._field(f"{arch}.expert_count"),
        }

    def _refuse_ignored(self, arch: str) -> None:
        """Raises on settings that would make the forward wrong if they were left out."""
        width = self._field(f"{arch}.attention.key_length")
        if width is None:
            width = self._field(f"{arch}.embedding_length", 0) // (self._field(f"{arch}.attention.head_count") or 1)
        for key in ("rope.dimension_count", "attention.value_length"):
            if self._field(f"{arch}.{key}", width) != width:
                raise UnsupportedError(
                    f"{self.path}: {arch}.{key} is {self._field(f'{arch}.{key}')}, heads have {width}: "
                    "other widths are not implemented"
                )
        if self._field(f"{arch}.attention.scale") is not None:
            raise UnsupportedError(f"{self.path}: {arch}.attention.scale is not implemented")

    def _rope_scaling(self, arch: str) -> dict[str, Any] | None:
        kind = self._field(f"{arch}.rope.scaling.type", "none")
        factor = self._field(f"{arch}.rope.scaling.factor", 1.0)
        original = self._field(f"{arch}.rope.scaling.original_context_length")
        factors = next((t for t in self.file.tensors if t.name == "rope_freqs.weight"), None)
        if factors is not None:
            return self._llama3_scaling(arch, np.asarray(factors.data, np.float32).ravel())
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}

    def _llama3_scaling(self, arch: str, factors: np.ndarray) -> dict[str, Any]:
        """Finds the llama3 scaling whose per-pair divisors these are; any other divisors are refused."""
        theta = float(self._field(f"{arch}.rope.freq_base", 10000.0))
        plain = rope.default_frequencies(2 * len(factors), theta)
        scaling = {"rope_type": "llama3", "factor": float(factors.max())} | LLAMA3_SCALING
        expected = plain / rope.llama3_frequencies(plain, scaling["factor"], 1.0, 4.0, 8192)
        if not np.allclose(expected, factors, rtol=1e-3):
            raise UnsupportedError("rope_freqs.weight is not the llama3 scaling of Llama 3.1 and later")
        return scaling


def _modules(cfg: ModelConfig) -> list[str]:
    parts = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    layers = [f"model.layers.{i}.{part}" for i in range(cfg.num_hidden_layers) for part in parts]
    return ["model.embed_tokens", "model.norm", "lm_head", *layers]


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the interleaving of rotary pairs that llama.cpp's conversion applies to Llama's q and k."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])  # [heads, H/2, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)

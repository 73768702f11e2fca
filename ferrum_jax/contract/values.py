"""Plain descriptions of a model, its numbers and where it runs."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ferrum_jax.contract.errors import InvalidParameterError, safe_repr


class DataType(enum.Enum):
    """Number formats of weights, activations and caches."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    INT4 = "int4"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    UINT4 = "uint4"
    BOOL = "bool"

    @property
    def size_in_bytes(self) -> float:
        """Bytes one element takes; half a byte for the 4-bit formats, which are packed in pairs."""
        bits = self.value.strip("abcdefghijklmnopqrstuvwxyz")
        return int(bits or 8) / 8

    @property
    def is_quantized(self) -> bool:
        """True of the formats that only make sense beside a scale."""
        return self in (DataType.FP8, DataType.INT8, DataType.INT4, DataType.UINT4)


@dataclass(frozen=True)
class Device:
    """Where something runs: `cpu`, `cuda:N`, `tpu:N` or `rocm:N`; `kind` may be given as such a text, as to `parse`."""

    kind: str
    index: int = 0

    def __post_init__(self):
        if isinstance(self.kind, str) and ":" in self.kind and self.index == 0:
            given = Device.parse(self.kind)
            object.__setattr__(self, "kind", given.kind)
            object.__setattr__(self, "index", given.index)
        if not isinstance(self.kind, str) or self.kind not in ("cpu", "cuda", "tpu", "rocm"):
            raise InvalidParameterError(f"device kind {safe_repr(self.kind)}: expected cpu, cuda, tpu or rocm")
        if isinstance(self.index, bool) or not isinstance(self.index, int) or self.index < 0:
            raise InvalidParameterError(f"device index {safe_repr(self.index)}: expected an integer of at least 0")
        if self.kind == "cpu" and self.index:
            raise InvalidParameterError(f"device cpu:{self.index}: the cpu device has no index")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `cpu`, `cuda:0` and the like; a missing index is 0."""
        found = re.fullmatch(r"(cpu|cuda|tpu|rocm)(?::(\d{1,9}))?", text) if isinstance(text, str) else None
        if found is None:
            raise InvalidParameterError(f"device {safe_repr(text)}: expected cpu, cuda:N, tpu:N or rocm:N")
        return cls(found[1], int(found[2] or 0))

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True, kw_only=True)
class LlmRuntimeConfig:
    """What a scheduler needs to know of a decoder-only model; its architecture stays private."""

    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int  # positions


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Identity and size of a loaded model."""

    model_id: str
    model_type: str
    num_parameters: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_sequence_length: int  # positions
    dtype: DataType
    device: Device
    version: str | None = None
    license: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def estimated_size(self) -> int:
        """Bytes the model takes: its parameters and a fifth more for buffers."""
        return int(self.num_parameters * self.dtype.size_in_bytes * 1.2)

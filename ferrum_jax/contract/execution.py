"""What an executor can do, how it is configured, and how it is doing."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ferrum_jax.contract.values import DataType, Device, ModelInfo


class AttentionType(enum.Enum):
    """Forms of attention an executor may run."""

    MultiHead = "multi_head"
    MultiQuery = "multi_query"
    GroupedQuery = "grouped_query"
    Flash = "flash"
    Paged = "paged"
    SlidingWindow = "sliding_window"


class ExecutorType(enum.Enum):
    """Kinds of executor a factory may build."""

    Sequential = "sequential"
    Batch = "batch"
    ContinuousBatch = "continuous_batch"
    Speculative = "speculative"
    PipelineParallel = "pipeline_parallel"
    TensorParallel = "tensor_parallel"


class ExecutorState(enum.Enum):
    """Where an executor is in its life."""

    Initializing = "initializing"
    Ready = "ready"
    Busy = "busy"
    Error = "error"
    Shutdown = "shutdown"


@dataclass(frozen=True, kw_only=True)
class MemoryRequirements:
    """Bytes a model takes, by cause."""

    parameter_memory: int  # bytes
    activation_memory_per_token: int  # bytes
    kv_cache_memory_per_token: int  # bytes per layer
    overhead_memory: int  # bytes

    def calculate_total_memory(self, batch_size: int, sequence_length: int, num_layers: int) -> int:
        """Bytes for `batch_size` sequences of `sequence_length` positions."""
        tokens = batch_size * sequence_length
        per_token = self.activation_memory_per_token + self.kv_cache_memory_per_token * num_layers
        return self.parameter_memory + per_token * tokens + self.overhead_memory


@dataclass(frozen=True, kw_only=True)
class ExecutorCapabilities:
    """What was built, as it was built."""

    max_batch_size: int
    max_sequence_length: int  # positions
    attention_mechanisms: tuple[AttentionType, ...]
    supports_dynamic_batching: bool
    supports_continuous_batching: bool
    supports_speculative_decoding: bool
    supports_tensor_parallelism: bool
    supports_pipeline_parallelism: bool
    supported_dtypes: tuple[DataType, ...]
    supported_devices: tuple[Device, ...]
    memory_requirements: MemoryRequirements


@dataclass(frozen=True, kw_only=True)
class ExecutorMemoryUsage:
    """Memory an executor holds."""

    allocated_bytes: int
    used_bytes: int
    peak_bytes: int
    utilization_percent: float


@dataclass(frozen=True, kw_only=True)
class ExecutorStatus:
    """Live counters of an executor."""

    state: ExecutorState
    is_ready: bool
    current_batch_size: int
    prefill_operations: int
    decode_operations: int
    avg_prefill_time_ms: float
    avg_decode_time_ms: float
    memory_usage: ExecutorMemoryUsage
    last_operation: float | None = None  # time.monotonic() seconds


@dataclass(frozen=True, kw_only=True)
class ExecutorMetrics:
    """Latencies and rates of an executor over its life."""

    total_operations: int
    prefill_operations: int
    decode_operations: int
    avg_prefill_latency: float  # ms
    avg_decode_latency: float  # ms
    p95_prefill_latency: float  # ms
    p95_decode_latency: float  # ms
    throughput_tps: float  # tokens per second
    memory_efficiency: float  # 0 to 1
    batch_utilization: float  # 0 to 1


@dataclass(frozen=True, kw_only=True)
class ExecutorAttentionConfig:
    """How attention should run."""

    attention_type: AttentionType = AttentionType.GroupedQuery
    enable_flash_attention: bool = False
    enable_paged_attention: bool = True
    block_size: int | None = None  # positions; None: chosen for the backend
    sliding_window_size: int | None = None  # positions


@dataclass(frozen=True, kw_only=True)
class ExecutorMemoryConfig:
    """How memory should be used."""

    enable_memory_pooling: bool = True
    memory_pool_size: int | None = None  # bytes; None: from free memory
    enable_kv_cache_sharing: bool = False
    max_memory_usage: float = 0.9  # of what is free


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """What the compiler may do."""

    enable_cuda_graphs: bool = False
    enable_kernel_fusion: bool = True
    enable_mixed_precision: bool = False
    optimization_level: int = 2  # 0 to 3
    custom_flags: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """Everything a factory needs to build an executor; a field that cannot be honoured is an error there."""

    model_info: ModelInfo
    device: Device
    dtype: DataType
    max_batch_size: int
    max_sequence_length: int  # positions
    attention_config: ExecutorAttentionConfig = ExecutorAttentionConfig()
    memory_config: ExecutorMemoryConfig = ExecutorMemoryConfig()
    optimization_config: OptimizationConfig = OptimizationConfig()
    executor_options: Mapping[str, Any] = field(default_factory=dict)

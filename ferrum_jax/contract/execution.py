"""`ModelExecutor` and its kin, what a scheduler or a server calls: what they can do, are told and report."""

import abc
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.contract.handles import KvCacheHandle
from ferrum_jax.contract.slots import KvSlotCapacitySnapshot, KvSlotRequest, KvSlotReservation
from ferrum_jax.contract.tensors import (
    DecodeInput,
    DecodeOutput,
    PrefillInput,
    PrefillOutput,
    SpeculativeDecodeOutput,
    UnifiedBatch,
)
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
    block_size: int | None = None  # positions; None: 128, or the capacity if that is smaller
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


class ModelExecutor(abc.ABC):
    """Tensors in, tensors out: no text, no sampling. The six abstract methods suffice; defaults refuse or loop."""

    @abc.abstractmethod
    def info(self) -> ModelInfo:
        """Identity and size of the model."""

    @abc.abstractmethod
    def capabilities(self) -> ExecutorCapabilities:
        """What was built."""

    @abc.abstractmethod
    def status(self) -> ExecutorStatus:
        """How the executor is doing now; answers in every state."""

    @abc.abstractmethod
    def metrics(self) -> ExecutorMetrics:
        """Latencies and rates so far; answers in every state."""

    @abc.abstractmethod
    async def prefill(self, input: PrefillInput) -> PrefillOutput:
        """Reads a prompt, or the next chunk of one."""

    @abc.abstractmethod
    async def decode(self, input: DecodeInput) -> DecodeOutput:
        """Appends one token to a live sequence."""

    async def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """Reads several prompts, one output per input; the default runs them one by one."""
        return [await self.prefill(item) for item in inputs]

    async def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Appends one token to each of several sequences; the default runs them one by one."""
        return [await self.decode(item) for item in inputs]

    async def unified_decode(self, batch: UnifiedBatch) -> list[Any]:
        """Runs decode rows and chunks together: `[vocab]`, a token id, or None where a chunk is not final."""
        raise UnsupportedError(f"{type(self).__name__} has no unified decode")

    async def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Appends several tokens to one sequence; output i is the distribution after token i."""
        raise UnsupportedError(f"{type(self).__name__} cannot verify")

    async def truncate_kv(self, handle: KvCacheHandle, new_len: int) -> None:
        """Rolls a sequence back to `new_len` positions; the default succeeds, for an executor that keeps no KV."""
        return None

    async def forward(self, input_ids: Any) -> Any:
        """Returns `[batch, seq, vocab]` logits of `[batch, seq]` tokens and keeps no sequence."""
        raise UnsupportedError(f"{type(self).__name__} has no forward without a cache")

    async def warmup(self) -> None:
        """Gets ready for calls, so that the first is no slower than the next."""
        return None

    async def shutdown(self) -> None:
        """Frees what the executor holds; twice is no error, any other call after it is."""
        return None

    def release_cache(self, cache_id: str) -> None:
        """Frees a sequence; an unknown id is no error."""
        return None

    def kv_capacity(self) -> int | None:
        """Longest sequence one id can reach, in positions; None where the executor does not know."""
        return None

    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation | None:
        """Makes positions writable, all or nothing; None where there is no account of blocks."""
        return None

    def kv_slot_capacity_snapshot(self) -> KvSlotCapacitySnapshot | None:
        """Counts the pool's blocks; None where there is no account of blocks."""
        return None

    def cache_metrics_snapshot(self) -> Mapping[str, Any] | None:
        """Counters of KV reuse and batching; None where there are none."""
        return None

    def lora_metrics_snapshot(self) -> Mapping[str, Any] | None:
        """Counters of LoRA; None where there are none."""
        return None

    def supports_native_unified_decode(self) -> bool:
        """True if `unified_decode` is one forward rather than several."""
        return False


class BatchModelExecutor(ModelExecutor):
    """An executor whose batches are forwards of their own."""

    @abc.abstractmethod
    async def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """Reads several prompts together, all or nothing."""

    @abc.abstractmethod
    async def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Appends one token to each of several sequences together, all or nothing."""

    @abc.abstractmethod
    def optimal_batch_size(self) -> int:
        """Rows that a batch should have now."""

    @abc.abstractmethod
    def supports_batch_size(self, batch_size: int) -> bool:
        """True if a batch of that many rows is one forward."""


class SpeculativeExecutor(ModelExecutor):
    """An executor that checks drafted tokens in one forward."""

    @abc.abstractmethod
    async def speculative_decode(
        self, input: DecodeInput, draft_tokens: Sequence[int], acceptance_threshold: float
    ) -> SpeculativeDecodeOutput:
        """Appends the input's token and as many of the drafted ones after it as the model agrees with.

        Args:
            input: the newest token, not in the KV yet, and the sequence it belongs to.
            draft_tokens: what a draft expects to follow that token, in order.
            acceptance_threshold: a draft token is accepted when its probability is at least this share of the
                largest one: 1.0 is exact greedy verification, 0.0 accepts everything. The first that is not
                accepted ends the run.
        """


class ModelExecutorFactory(abc.ABC):
    """Builds executors from a configuration; a field that cannot be honoured is an error."""

    @abc.abstractmethod
    async def create_executor(self, config: ExecutorConfig) -> ModelExecutor:
        """Loads the model of a configuration behind an executor, which owns it."""

    @abc.abstractmethod
    async def create_batch_executor(self, config: ExecutorConfig) -> BatchModelExecutor:
        """As `create_executor`, for an executor that batches."""

    @abc.abstractmethod
    def supported_types(self) -> tuple[ExecutorType, ...]:
        """Kinds of executor that can be built."""

    @abc.abstractmethod
    def validate_config(self, config: ExecutorConfig) -> None:
        """Raises for every field that cannot be honoured, before any weight is read."""


class ExecutorRegistry(abc.ABC):
    """Executors by name."""

    @abc.abstractmethod
    def register(self, name: str, executor: ModelExecutor) -> None:
        """Adds an executor; a name that is taken is AlreadyExists."""

    @abc.abstractmethod
    def get(self, name: str) -> ModelExecutor | None:
        """Returns the executor of a name, or None."""

    @abc.abstractmethod
    def remove(self, name: str) -> ModelExecutor | None:
        """Removes an executor, still running, and returns it; None for an unknown name."""

    @abc.abstractmethod
    def list_names(self) -> list[str]:
        """Names in the order they were registered."""

    @abc.abstractmethod
    def get_metrics(self, name: str) -> ExecutorMetrics | None:
        """Returns the metrics of the executor of a name, or None."""

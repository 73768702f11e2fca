"""The contract: values, errors and abstract classes. Imports no JAX and holds no state."""

from ferrum_jax.contract import errors as errors
from ferrum_jax.contract.answers import Captured, TokenScores
from ferrum_jax.contract.decoding import (
    DecodedRun,
    DecodeRun,
    FullLogits,
    GreedyArgmax,
    GreedyRepetitionPenalty,
    LogitsReturnPolicy,
    Sampling,
    TokenSelectionMask,
)
from ferrum_jax.contract.errors import *  # noqa: F403
from ferrum_jax.contract.errors import IOError as IOError
from ferrum_jax.contract.errors import TimeoutError as TimeoutError
from ferrum_jax.contract.execution import (
    AttentionType,
    BatchModelExecutor,
    ExecutorAttentionConfig,
    ExecutorCapabilities,
    ExecutorConfig,
    ExecutorMemoryConfig,
    ExecutorMemoryUsage,
    ExecutorMetrics,
    ExecutorRegistry,
    ExecutorState,
    ExecutorStatus,
    ExecutorType,
    MemoryRequirements,
    ModelExecutor,
    ModelExecutorFactory,
    OptimizationConfig,
    SpeculativeExecutor,
)
from ferrum_jax.contract.handles import BlockTable, KvCacheHandle
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.slots import (
    ActiveLoraAdapter,
    KvSlotAllocation,
    KvSlotCapacitySnapshot,
    KvSlotRequest,
    KvSlotReservation,
)
from ferrum_jax.contract.tensors import (
    DecodeInput,
    DecodeOutput,
    PrefillInput,
    PrefillOutput,
    SpeculativeDecodeOutput,
    UnifiedBatch,
    UnifiedBatchItem,
)
from ferrum_jax.contract.values import DataType, Device, LlmRuntimeConfig, ModelInfo

__all__ = [
    "ActiveLoraAdapter", "AttentionType", "BatchModelExecutor", "BlockTable", "Captured", "DataType", "DecodeInput",
    "DecodeOutput", "DecodeRun", "DecodedRun", "DecoderOnlyLLM", "Device", "ExecutorAttentionConfig",
    "ExecutorCapabilities", "ExecutorConfig", "ExecutorMemoryConfig", "ExecutorMemoryUsage", "ExecutorMetrics",
    "ExecutorRegistry", "ExecutorState", "ExecutorStatus", "ExecutorType", "FullLogits", "GreedyArgmax",
    "GreedyRepetitionPenalty", "KvCacheHandle", "KvSlotAllocation", "KvSlotCapacitySnapshot", "KvSlotRequest",
    "KvSlotReservation", "LlmRuntimeConfig", "LogitsReturnPolicy", "MemoryRequirements", "ModelExecutor",
    "ModelExecutorFactory", "ModelInfo", "OptimizationConfig", "PrefillInput", "PrefillOutput", "Sampling",
    "SpeculativeDecodeOutput", "SpeculativeExecutor", "TokenScores", "TokenSelectionMask", "UnifiedBatch",
    "UnifiedBatchItem",
]  # fmt: skip
__all__ += errors.__all__

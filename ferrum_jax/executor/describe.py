"""Reports of a loaded model: sizes, code that serves it, capabilities, memory and counters."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.execution import AttentionType, ExecutorCapabilities, ExecutorMemoryUsage, MemoryRequirements
from ferrum_jax.contract.values import DataType, Device, LlmRuntimeConfig, ModelInfo
from ferrum_jax.executor.device import DeviceState
from ferrum_jax.executor.pipeline import Pipeline
from ferrum_jax.executor.sizing import EnginePlan
from ferrum_jax.models.backends import obstacle_of_kernels
from ferrum_jax.models.layout import layout_of
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree, num_parameters
from ferrum_jax.ops import native
from ferrum_jax.ops.quantised import FLOAT4, UINT4, UINT5, UINT6, activation_dtype, is_quantised, values_dtype
from ferrum_jax.sharding.devices import JaxDevice

_DTYPES = {
    "float32": DataType.FP32,
    "float16": DataType.FP16,
    "bfloat16": DataType.BF16,
    "int8": DataType.INT8,
    "float8_e4m3fn": DataType.FP8,
    UINT4: DataType.INT4,
    FLOAT4: DataType.INT4,  # the contract has no floats of four bits
    UINT5: DataType.INT8,  # nor integers of five and six bits: the next larger
    UINT6: DataType.INT8,
}


def runtime_config(cfg: ModelConfig) -> LlmRuntimeConfig:
    """Sizes a scheduler needs."""
    return LlmRuntimeConfig(
        hidden_size=cfg.hidden_size,
        num_layers=cfg.num_hidden_layers,
        num_kv_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        vocab_size=cfg.vocab_size,
        max_seq_len=cfg.max_seq_len,
    )


def model_info(name: str, cfg: ModelConfig, device: DeviceState) -> ModelInfo:
    """Identity and size of a model as it was loaded; `max_sequence_length` is the model's own.

    `dtype` is that of most of its parameters; scales of quantised weights are no parameters.
    """
    sizes: Counter[str] = Counter()
    for leaf in jax.tree.leaves(device.params, is_leaf=is_quantised):
        sizes[values_dtype(leaf) if is_quantised(leaf) else leaf.dtype.name] += math.prod(leaf.shape)
    return ModelInfo(
        model_id=name,
        model_type=cfg.model_type,
        num_parameters=num_parameters(family(cfg).param_specs(cfg)),
        hidden_size=cfg.hidden_size,
        num_layers=cfg.num_hidden_layers,
        num_heads=cfg.num_attention_heads,
        num_kv_heads=cfg.num_key_value_heads,
        vocab_size=cfg.vocab_size,
        max_sequence_length=cfg.max_seq_len,
        dtype=_DTYPES[sizes.most_common(1)[0][0]],
        device=contract_device(device.placed.placement.first),
    )


def serving(name: str, cfg: ModelConfig, plan: EnginePlan, replicas: Sequence[DeviceState]) -> dict[str, Any]:
    """Says which code computes a model's steps, in what dtypes, and what weights and KV take on each device."""
    weights: Counter[str] = Counter()
    params, placement = replicas[0].params, replicas[0].placed.placement
    for leaf in jax.tree.leaves(params):
        weights[leaf.dtype.name] += _bytes_of_one(leaf)
    dtype, attention = activation_dtype(params).name, plan.cache.attention
    uses_kernels = attention == "cpu"
    obstacle = obstacle_of_kernels(cfg, dtype) or f"attention={attention!r}, the kernels are those of attention='cpu'"
    return {
        "model": name,
        "model_type": cfg.model_type,
        "device": str(placement.first),
        "mesh": ({"data": len(replicas)} if len(replicas) > 1 else {}) | placement.sizes,
        "dtype": dtype,
        "kv_dtype": plan.cache.dtype,
        "layout": layout_of(params),
        "attention": attention,
        "kernels": native.instruction_set() if uses_kernels else None,
        "no_kernels_because": obstacle if placement.first.platform == "cpu" and not uses_kernels else None,
        "weight_bytes": dict(weights),
        "kv_bytes": plan.cache.num_bytes,
        "max_seqs": plan.max_seqs,
        "kv_capacity": plan.kv_capacity,
    }


def capabilities(cfg: ModelConfig, plan: EnginePlan, replicas: Sequence[DeviceState]) -> ExecutorCapabilities:
    """Capabilities: continuous batches over a paged KV; fixed memory is that of all devices, the KV's of a replica."""
    params, placement = replicas[0].params, replicas[0].placed.placement
    devices = [device for one in replicas for device in one.placed.placement.devices]
    dtype = activation_dtype(params).name
    return ExecutorCapabilities(
        max_batch_size=plan.max_seqs,
        max_sequence_length=plan.kv_capacity,
        attention_mechanisms=_attention(cfg),
        supports_dynamic_batching=True,
        supports_continuous_batching=True,
        supports_speculative_decoding=True,
        supports_tensor_parallelism=len(placement.devices) > 1,
        supports_pipeline_parallelism=False,
        supported_dtypes=(_DTYPES[dtype],),
        supported_devices=tuple(dict.fromkeys(map(contract_device, devices))),
        memory_requirements=MemoryRequirements(
            parameter_memory=sum(_num_bytes(one.params) for one in replicas),
            activation_memory_per_token=_activation_bytes(cfg, params),
            kv_cache_memory_per_token=plan.cache.bytes_per_layer * len(placement.devices),
            overhead_memory=sum(_num_bytes(one.adapters.stacks) for one in replicas),
        ),
    )


def memory_usage(pipelines: Sequence[Pipeline]) -> ExecutorMemoryUsage:
    """Counts parameters, stacks of adapters and KV of all devices; of the KV, used is what sequences hold.

    The peak is what this process's devices report, and never less than what is allocated.
    """
    allocated = used = peak = 0
    for one in pipelines:
        placement, cache, table = one.device.placed.placement, one.plan.cache, one.table
        weights = _num_bytes(one.device.params) + _num_bytes(one.device.adapters.stacks)
        blocks = (table.pool.num_blocks - table.pool.num_free) * cache.bytes_per_position * cache.block_size
        held = blocks + len(table.cache_ids) * cache.window_bytes
        own = weights + len(placement.devices) * cache.num_bytes
        allocated += own
        used += weights + len(placement.devices) * held
        reported = sum((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in placement.local)
        peak += max(int(reported), own)
    return ExecutorMemoryUsage(
        allocated_bytes=allocated, used_bytes=used, peak_bytes=peak, utilization_percent=100.0 * used / allocated
    )


def cache_metrics(pipelines: Sequence[Pipeline]) -> dict[str, Any]:
    """Counters of prefix reuse of all replicas, in the contract's names, and of bytes copied to the host."""
    table, cache = pipelines[0].table, pipelines[0].plan.cache
    tables, counts = [one.table for one in pipelines], [one.prefixes for one in pipelines]
    entries = sum(len(one.prefixes) for one in tables if one.prefixes is not None)
    return {
        "position": "real-kv-reuse",
        "enabled": table.prefixes is not None,
        "hits": sum(one.hits for one in counts),
        "misses": sum(one.misses for one in counts),
        "evictions": sum(one.evictions for one in counts) + sum(one.pool.evictions for one in tables),
        "saved_prefill_tokens": sum(one.saved_tokens for one in counts),
        "entries": entries,
        "bytes": entries * cache.bytes_per_position * cache.block_size,
        "block_size": cache.block_size,
        "kv_dtype": cache.dtype,
        "device_to_host_bytes": sum(one.device.fetched_bytes for one in pipelines),
        "last_step_device_to_host_bytes": sum(one.device.last_fetched_bytes for one in pipelines),
    }


def contract_device(device: JaxDevice) -> Device:
    """Names a JAX device as the contract does."""
    kinds = {"gpu": "rocm" if "amd" in device.device_kind.lower() else "cuda"}
    kind = kinds.get(device.platform, device.platform)
    return Device(kind, 0 if kind == "cpu" else device.id)


def _attention(cfg: ModelConfig) -> tuple[AttentionType, ...]:
    heads, kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
    kind = AttentionType.GroupedQuery if 1 < kv_heads < heads else AttentionType.MultiHead
    kinds = [AttentionType.MultiQuery if kv_heads == 1 < heads else kind, AttentionType.Paged, AttentionType.Flash]
    if any(window is not None for window in cfg.layer_windows):
        kinds.append(AttentionType.SlidingWindow)
    return tuple(kinds)


def _num_bytes(tree: Any) -> int:
    """Bytes of all arrays on all devices."""
    return sum(_bytes_of_one(leaf) * len(leaf.sharding.device_set) for leaf in jax.tree.leaves(tree))


def _bytes_of_one(leaf: jax.Array) -> int:
    """Bytes of an array's part on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _activation_bytes(cfg: ModelConfig, params: ParamTree) -> int:
    """Bytes of one token's widest layer and of its logits, which are float32."""
    width = activation_dtype(params).itemsize
    return (2 * cfg.hidden_size + 3 * cfg.intermediate_size) * width + 4 * cfg.vocab_size

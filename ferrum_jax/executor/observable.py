"""The methods of a runner that only read: sizes, the code that serves, counters, and a sequence's keys and values."""

import math
from collections import Counter
from typing import Any

import jax
from numpy.typing import NDArray

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import check_cache_id, check_int
from ferrum_jax.contract.errors import RequestValidationError
from ferrum_jax.contract.execution import AttentionType, ExecutorCapabilities, ExecutorMemoryUsage, MemoryRequirements
from ferrum_jax.contract.handles import BlockTable
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.slots import KvSlotCapacitySnapshot
from ferrum_jax.contract.values import DataType, Device, LlmRuntimeConfig, ModelInfo
from ferrum_jax.executor.adapters import Adapters
from ferrum_jax.executor.counters import DecodeBatchCounters
from ferrum_jax.executor.device import DeviceState
from ferrum_jax.executor.lifecycle import Lifecycle
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


class Observable(DecoderOnlyLLM):
    """The part of `ModelRunner` that only reads."""

    name: str
    model_config: ModelConfig
    plan: EnginePlan
    _life: Lifecycle
    _device: DeviceState
    _pipeline: Pipeline
    _adapters: Adapters
    _decode_batches: DecodeBatchCounters

    def _holder(self, cache_id: str) -> "Observable":
        """Returns the runner whose devices hold a sequence: of several replicas, one; any, for an unknown id."""
        return self

    @property
    def _pipelines(self) -> list[Pipeline]:
        """One for each replica."""
        return [self._pipeline]

    def kv_capacity(self) -> int:
        """Longest sequence one id can reach, in positions; it waits for no other call."""
        self._life.check_ready()
        return self.plan.kv_capacity

    def kv_cache(self, cache_id: str, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copies one layer's keys (rotated) and values of a live sequence: `[positions, kv_heads, head_dim]` each."""
        with self._life.lock, self._life:
            key, index = check_cache_id(cache_id), check_int("layer", layer, 0)
            holder, pool_layer = self._holder(key), self.plan.pool_layer_of(index)
            if (live := holder._pipeline.table.live.get(key)) is None:
                raise RequestValidationError(f"{key!r} is unknown, it has no keys and values")
            return holder._device.gather(pool_layer, holder._pipeline.table.table[live.slot], live.length)

    def kv_len(self, cache_id: str) -> int | None:
        """Positions held for `cache_id`, or None for an unknown id."""
        with self._life.lock, self._life:
            live = self._holder(check_cache_id(cache_id))._pipeline.table.live.get(cache_id)
            return None if live is None else live.length

    def kv_block_table(self, cache_id: str) -> BlockTable | None:
        """Returns the blocks of a sequence's positions, without reserved ones; None for an unknown id."""
        with self._life.lock, self._life:
            table = self._holder(check_cache_id(cache_id))._pipeline.table
            if (live := table.live.get(cache_id)) is None:
                return None
            blocks = tuple(live.blocks[: table.num_blocks(live.length)])
            return BlockTable(physical_blocks=blocks, sequence_length=live.length, block_size=table.block_size)

    def kv_slot_capacity_snapshot(self) -> KvSlotCapacitySnapshot:
        """Counts the pool's blocks; a block that no sequence holds is free, even with a known prefix in it."""
        with self._life.lock, self._life:
            pools = [one.table.pool for one in self._pipelines]
            total, free = sum(one.num_blocks for one in pools), sum(one.num_free for one in pools)
            return KvSlotCapacitySnapshot(block_size=self.plan.cache.block_size, total_blocks=total, free_blocks=free)

    def cache_metrics_snapshot(self) -> dict[str, Any]:
        """Counters of KV reuse, of decode batches and of bytes copied to the host."""
        with self._life.lock, self._life:
            table, cache = self._pipelines[0].table, self.plan.cache
            tables, counts = [one.table for one in self._pipelines], [one.prefixes for one in self._pipelines]
            devices = [one.device for one in self._pipelines]
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
                "device_to_host_bytes": sum(one.fetched_bytes for one in devices),
                "last_step_device_to_host_bytes": sum(one.last_fetched_bytes for one in devices),
                "source": type(self).__name__,
                "decode_batch": self._decode_batches.snapshot(),
            }

    def lora_metrics_snapshot(self) -> dict[str, Any]:
        """Counters of adapters; an application is one row of one call through one projection."""
        with self._life.lock, self._life:
            each = [one.adapters for one in self._pipelines]
            bound = {cache_id for one in each for cache_id in one.bound}  # an id may be bound on several replicas
            return {
                "enabled": self.plan.loras is not None,
                "adapter_count": len({name for one in each for name in one.loaded}),
                "position": "real-inference",
                "active_cache_bindings": len(bound),
                "projection_applications": sum(one.projection_applications for one in each),
                "source": type(self).__name__,
            }

    @property
    def config(self) -> LlmRuntimeConfig:
        """Sizes a scheduler needs; answers in every state."""
        cfg = self.model_config
        return LlmRuntimeConfig(
            hidden_size=cfg.hidden_size,
            num_layers=cfg.num_hidden_layers,
            num_kv_heads=cfg.num_key_value_heads,
            head_dim=cfg.head_dim,
            vocab_size=cfg.vocab_size,
            max_seq_len=cfg.max_seq_len,
        )

    def model_info(self) -> ModelInfo:
        """Identity and size of the model as it was loaded; `max_sequence_length` is the model's own.

        `dtype` is that of most of its parameters; scales of quantised weights are no parameters.
        """
        with self._life.lock, self._life:
            cfg, device = self.model_config, self._pipelines[0].device
            sizes: Counter[str] = Counter()
            for leaf in jax.tree.leaves(device.params, is_leaf=is_quantised):
                sizes[values_dtype(leaf) if is_quantised(leaf) else leaf.dtype.name] += math.prod(leaf.shape)
            return ModelInfo(
                model_id=self.name,
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

    def describe(self) -> dict[str, Any]:
        """Which code computes the steps (`attention`, `kernels`), in what dtypes, and what weights and KV take.

        Bytes are those of one device, of one replica.
        """
        with self._life.lock, self._life:
            cfg, plan, device = self.model_config, self.plan, self._pipelines[0].device
            params, placement, weights = device.params, device.placed.placement, Counter[str]()
            for leaf in jax.tree.leaves(params):
                weights[leaf.dtype.name] += _bytes_of_one(leaf)
            dtype, attention, count = activation_dtype(params).name, plan.cache.attention, len(self._pipelines)
            uses_kernels = attention == "cpu"
            obstacle = obstacle_of_kernels(cfg, dtype)
            obstacle = obstacle or f"attention={attention!r}, the kernels are those of attention='cpu'"
            return {
                "model": self.name,
                "model_type": cfg.model_type,
                "device": str(placement.first),
                "mesh": ({"data": count} if count > 1 else {}) | placement.sizes,
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

    def capabilities(self) -> ExecutorCapabilities:
        """Continuous batches over a paged KV; fixed memory is that of all devices, the KV's of a replica."""
        with self._life.lock, self._life:
            each, plan = [one.device for one in self._pipelines], self.plan
            params, placement = each[0].params, each[0].placed.placement
            devices = [device for one in each for device in one.placed.placement.devices]
            return ExecutorCapabilities(
                max_batch_size=plan.max_seqs,
                max_sequence_length=plan.kv_capacity,
                attention_mechanisms=_attention(self.model_config),
                supports_dynamic_batching=True,
                supports_continuous_batching=True,
                supports_speculative_decoding=True,
                supports_tensor_parallelism=len(placement.devices) > 1,
                supports_pipeline_parallelism=False,
                supported_dtypes=(_DTYPES[activation_dtype(params).name],),
                supported_devices=tuple(dict.fromkeys(map(contract_device, devices))),
                memory_requirements=MemoryRequirements(
                    parameter_memory=sum(_num_bytes(one.params) for one in each),
                    activation_memory_per_token=_activation_bytes(self.model_config, params),
                    kv_cache_memory_per_token=plan.cache.bytes_per_layer * len(placement.devices),
                    overhead_memory=sum(_num_bytes(one.adapters.stacks) for one in each),
                ),
            )

    def memory_usage(self) -> ExecutorMemoryUsage:
        """Counts parameters, stacks of adapters and KV of all devices; of the KV, used is what sequences hold.

        The peak is what this process's devices report, and never less than what is allocated.
        """
        with self._life.lock, self._life:
            allocated = used = peak = 0
            for one in self._pipelines:
                placement, cache, table = one.device.placed.placement, one.plan.cache, one.table
                weights = _num_bytes(one.device.params) + _num_bytes(one.device.adapters.stacks)
                blocks = (table.pool.num_blocks - table.pool.num_free) * cache.bytes_per_position * cache.block_size
                held = blocks + len(table.live) * cache.window_bytes
                own = weights + len(placement.devices) * cache.num_bytes
                allocated += own
                used += weights + len(placement.devices) * held
                reported = sum((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in placement.local)
                peak += max(int(reported), own)
            return ExecutorMemoryUsage(
                allocated_bytes=allocated,
                used_bytes=used,
                peak_bytes=peak,
                utilization_percent=100.0 * used / allocated,
            )


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

"""The methods of a runner that only read: sizes, counters, and the keys and values of a sequence."""

from typing import Any

from numpy.typing import NDArray

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import check_cache_id, check_int
from ferrum_jax.contract.errors import RequestValidationError
from ferrum_jax.contract.execution import ExecutorCapabilities, ExecutorMemoryUsage
from ferrum_jax.contract.handles import BlockTable
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.slots import KvSlotCapacitySnapshot
from ferrum_jax.contract.values import ModelInfo
from ferrum_jax.executor import describe
from ferrum_jax.executor.adapters import Adapters
from ferrum_jax.executor.counters import DecodeBatchCounters
from ferrum_jax.executor.device import DeviceState
from ferrum_jax.executor.lifecycle import Lifecycle
from ferrum_jax.executor.pipeline import Pipeline
from ferrum_jax.executor.sizing import EnginePlan


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
            if (live := holder._pipeline.table.get(key)) is None:
                raise RequestValidationError(f"{key!r} is unknown, it has no keys and values")
            return holder._device.gather(pool_layer, holder._pipeline.table.table[live.slot], live.length)

    def kv_len(self, cache_id: str) -> int | None:
        """Positions held for `cache_id`, or None for an unknown id."""
        with self._life.lock, self._life:
            live = self._holder(check_cache_id(cache_id))._pipeline.table.get(cache_id)
            return None if live is None else live.length

    def kv_block_table(self, cache_id: str) -> BlockTable | None:
        """Returns the blocks of a sequence's positions, without reserved ones; None for an unknown id."""
        with self._life.lock, self._life:
            table = self._holder(check_cache_id(cache_id))._pipeline.table
            if (live := table.get(cache_id)) is None:
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
            return describe.cache_metrics(self._pipelines) | {
                "source": type(self).__name__,
                "decode_batch": self._decode_batches.snapshot(),
            }

    def lora_metrics_snapshot(self) -> dict[str, Any]:
        """Counters of adapters; an application is one row of one call through one projection."""
        with self._life.lock, self._life:
            each = [one.adapters for one in self._pipelines]
            bound = {cache_id for one in each for cache_id in one.bound_ids}  # an id may be bound on several replicas
            return each[0].metrics() | {
                "active_cache_bindings": len(bound),
                "projection_applications": sum(one.projection_applications for one in each),
                "source": type(self).__name__,
            }

    def model_info(self) -> ModelInfo:
        """Identity and size of the model as it was loaded."""
        with self._life.lock, self._life:
            return describe.model_info(self.name, self.model_config, self._pipelines[0].device)

    def describe(self) -> dict[str, Any]:
        """Which code computes the steps (`attention`, `kernels`), in what dtypes, and what weights and KV take."""
        with self._life.lock, self._life:
            return describe.serving(self.name, self.model_config, self.plan, [one.device for one in self._pipelines])

    def capabilities(self) -> ExecutorCapabilities:
        """Capabilities of this model on its devices."""
        with self._life.lock, self._life:
            return describe.capabilities(self.model_config, self.plan, [one.device for one in self._pipelines])

    def memory_usage(self) -> ExecutorMemoryUsage:
        """Bytes of the parameters and the KV, and how much of them is in use."""
        with self._life.lock, self._life:
            return describe.memory_usage(self._pipelines)

"""What a runner tells of itself."""

from typing import Any

from numpy.typing import NDArray

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import checked_id, checked_int
from ferrum_jax.contract.execution import ExecutorCapabilities, ExecutorMemoryUsage
from ferrum_jax.contract.handles import BlockTable
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.slots import KvSlotCapacitySnapshot
from ferrum_jax.contract.values import LlmRuntimeConfig, ModelInfo
from ferrum_jax.executor import describe
from ferrum_jax.executor.adapters import Adapters
from ferrum_jax.executor.counters import DecodeBatchCounters
from ferrum_jax.executor.device import DeviceKv
from ferrum_jax.executor.lifecycle import Lifecycle, serialised
from ferrum_jax.executor.sequences import Sequences
from ferrum_jax.executor.sizing import EnginePlan
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.sharding.devices import JaxDevice


class Described(DecoderOnlyLLM):
    """The part of a runner that only looks: sizes, lengths, counters."""

    model_config: ModelConfig
    plan: EnginePlan
    device: JaxDevice
    name: str
    _life: Lifecycle
    _device: DeviceKv
    _sequences: Sequences
    _adapters: Adapters
    _decode_batches: DecodeBatchCounters

    @property
    def params(self) -> ParamTree:
        """The parameters that are served; raises CancelledError after `close`."""
        self._life.refuse_closed()
        return self._device.params

    @property
    def config(self) -> LlmRuntimeConfig:
        """Sizes a scheduler needs; answers in every state."""
        return describe.runtime_config(self.model_config)

    @property
    def loop_tokens(self) -> int:
        """Tokens that one device call of `decode_n` gives each row; 0 where there are no loops."""
        return self.plan.ladders.loop_tokens

    @serialised
    def kv_capacity(self) -> int:
        """Longest sequence one id can reach, in positions."""
        return self.plan.kv_capacity

    @serialised
    def kv_cache(self, cache_id: str, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copies one layer's keys (turned by RoPE) and values of a live sequence: `[positions, kv_heads, head_dim]`."""
        return self._sequences.gather(checked_id(cache_id), checked_int("layer", layer, 0))

    @serialised
    def kv_len(self, cache_id: str) -> int | None:
        """Positions held for `cache_id`, or None for an unknown id."""
        live = self._sequences.slots.get(checked_id(cache_id))
        return None if live is None else live.length

    @serialised
    def kv_block_table(self, cache_id: str) -> BlockTable | None:
        """Where a sequence's positions lie, reserved ones left out; None for an unknown id."""
        slots = self._sequences.slots
        live = slots.get(checked_id(cache_id))
        if live is None:
            return None
        blocks = tuple(live.blocks[: slots.num_blocks(live.length)])
        return BlockTable(physical_blocks=blocks, sequence_length=live.length, block_size=slots.block_size)

    @serialised
    def kv_slot_capacity_snapshot(self) -> KvSlotCapacitySnapshot:
        """Counts the pool's blocks; those that only a prefix could want are free."""
        pool = self._sequences.slots.pool
        return KvSlotCapacitySnapshot(
            block_size=self.plan.cache.block_size, total_blocks=pool.num_blocks, free_blocks=pool.num_free
        )

    @serialised
    def cache_metrics_snapshot(self) -> dict[str, Any]:
        """Counters of KV reuse, of decode batches and of what crossed to the host."""
        return describe.cache_metrics(self._sequences) | {
            "source": type(self).__name__,
            "decode_batch": self._decode_batches.snapshot(),
        }

    @serialised
    def lora_metrics_snapshot(self) -> dict[str, Any]:
        """Counters of adapters; an application is one row of one call through one projection."""
        return self._adapters.metrics() | {"source": type(self).__name__}

    @serialised
    def model_info(self) -> ModelInfo:
        """Identity and size of the model as it was loaded."""
        return describe.model_info(self.name, self.model_config, self.plan, self.params, self.device)

    @serialised
    def capabilities(self) -> ExecutorCapabilities:
        """What was built for this model on this device."""
        return describe.capabilities(self.model_config, self.plan, self.params, self.device)

    @serialised
    def memory_usage(self) -> ExecutorMemoryUsage:
        """Bytes of the parameters and the KV, and how much of them is in use."""
        return describe.memory_usage(self._sequences.slots, self.plan, self.model_config, self.params, self.device)

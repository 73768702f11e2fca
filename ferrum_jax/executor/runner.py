"""`ModelRunner`: the `DecoderOnlyLLM` contract over compiled steps."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile import buckets
from ferrum_jax.compile.buckets import StepPlan
from ferrum_jax.compile.steps import StepCache
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import (
    checked_id,
    checked_int,
    checked_rows,
    checked_tokens,
    refuse_mismatch,
    refuse_repeated,
)
from ferrum_jax.contract.errors import CancelledError, DeviceError, RequestValidationError, UnsupportedError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.contract.llm import DecoderOnlyLLM, DecodeRow, Logits, UnifiedRow
from ferrum_jax.contract.slots import ActiveLoraAdapter, KvSlotCapacitySnapshot, KvSlotRequest, KvSlotReservation
from ferrum_jax.contract.values import LlmRuntimeConfig
from ferrum_jax.executor.counters import DecodeBatchCounters
from ferrum_jax.executor.device import DeviceKv, Row
from ferrum_jax.executor.sizing import EnginePlan
from ferrum_jax.kvcache.slots import SlotTable
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.progress import Track
from ferrum_jax.sharding.devices import JaxDevice

P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate["ModelRunner", P], R]
Work = tuple[str, NDArray[np.int32], bool]  # cache id, tokens, whether logits are wanted


def _serialised(method: Method[P, R]) -> Method[P, R]:
    """Lets one thread in at a time, and none after a device failure or `close`."""

    @functools.wraps(method)
    def guarded(self: "ModelRunner", *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            self._refuse_unless_ready()
            return method(self, *args, **kwargs)

    return guarded


class ModelRunner(DecoderOnlyLLM):
    """Live sequences of one model on one device.

    Calls from several threads are serialised. Whatever can refuse does so before anything changes; a device failure
    inside a step leaves the state Error, in which every call says so until `reset`.
    """

    def __init__(
        self,
        params: ParamTree,
        model_config: ModelConfig,
        plan: EnginePlan,
        *,
        device: JaxDevice,
        strict: bool = False,
    ):
        self.params = params
        self.model_config = model_config
        self.plan = plan
        self.device = device
        self._lock = threading.RLock()
        self._state = ExecutorState.Ready
        self._failure = ""
        self._device_kv = DeviceKv(params, model_config, plan.cache, device)
        self._steps = StepCache(self._device_kv.lower, strict=strict)
        self._slots = self._new_slots()
        self._decode_batches = DecodeBatchCounters()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def config(self) -> LlmRuntimeConfig:
        """Sizes a scheduler needs."""
        cfg = self.model_config
        return LlmRuntimeConfig(
            hidden_size=cfg.hidden_size,
            num_layers=cfg.num_hidden_layers,
            num_kv_heads=cfg.num_key_value_heads,
            head_dim=cfg.head_dim,
            vocab_size=cfg.vocab_size,
            max_seq_len=cfg.max_seq_len,
        )

    @property
    def state(self) -> ExecutorState:
        """Ready, Error or Shutdown."""
        return self._state

    @_serialised
    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        """Appends `tokens` (creating the sequence if it is unknown); gives the last one's logits, `[vocab]`."""
        array = self._tokens(cache_id, tokens)
        return _found(self._advance([(cache_id, array, True)])[0])

    @_serialised
    def decode(self, cache_id: str, token: int, pos: int) -> Logits:
        """Appends one token at position `pos`, which must be the cache's length; gives `[vocab]`."""
        return self._decode_rows([(cache_id, token, pos)], forced=False)[0]

    @_serialised
    def decode_batch(self, batch: Sequence[DecodeRow]) -> list[Logits]:
        """Decodes one token of each sequence in one forward, answers in the same order."""
        return self._decode_rows(batch, forced=False)

    @_serialised
    def decode_batch_with_full_logits(self, batch: Sequence[DecodeRow], force_full_logits: bool) -> list[Logits]:
        """As `decode_batch`, which always computes all logits; the flag is counted."""
        return self._decode_rows(batch, forced=bool(force_full_logits))

    @_serialised
    def forward_verify(self, cache_id: str, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends `tokens` and gives `[n, vocab]`: row i is the distribution after token i."""
        array = self._tokens(cache_id, tokens)
        plans = buckets.plan_verify(len(array), self.plan.ladders)
        return np.concatenate(self._run([(cache_id, array, True)], plans)[0])

    @_serialised
    def unified_forward(self, items: Sequence[UnifiedRow]) -> list[Logits | None]:
        """Runs decode rows and chunks of prompts in one forward; None exactly where a chunk is not final."""
        work = []
        for cache_id, tokens, offset, is_final in checked_rows("items", items, "cache_id q_tokens pos_offset is_final"):
            array = self._tokens(cache_id, tokens)
            refuse_mismatch(cache_id, "pos_offset", offset, self._slots.length(cache_id))
            work.append((cache_id, array, bool(is_final)))
        refuse_repeated(cache_id for cache_id, _, _ in work)
        return self._advance(work)

    @_serialised
    def release(self, cache_id: str) -> None:
        """Frees the sequence's slot and blocks; an unknown id is no error."""
        self._slots.release(checked_id(cache_id))

    @_serialised
    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        """Rolls the sequence back to `new_len` positions; past its end, or an unknown id, is no error."""
        self._slots.truncate(checked_id(cache_id), checked_int("new_len", new_len, 0))

    def reset(self) -> None:
        """Drops every sequence; keeps weights and compiled steps. Also the way back from the state Error."""
        with self._lock:
            self._refuse_closed()
            if self._state is ExecutorState.Error:
                self._device_kv.reallocate()
            self._slots = self._new_slots()
            self._state, self._failure = ExecutorState.Ready, ""

    @_serialised
    def prepare(self, cache_id: str, max_tokens: int) -> None:
        """Takes the slot and compiles the steps that calls of up to `max_tokens` tokens will need."""
        length = self._slots.length(checked_id(cache_id))
        count = checked_int("max_tokens", max_tokens, 1)
        self._slots.refuse_growth([(cache_id, length)])
        self._refuse_past_capacity(cache_id, count)
        plans = [*buckets.plan([count], self.plan.ladders), *buckets.plan([1], self.plan.ladders)]
        self._steps.ensure(dict.fromkeys(plan.key for plan in plans))
        self._slots.grow([(cache_id, length)])

    @_serialised
    def prepare_kv_capacity(self, cache_id: str, capacity_hint: int) -> None:
        """Refuses a request whose whole length, `capacity_hint` positions, could never be served."""
        hint = checked_int("capacity_hint", capacity_hint, 0)
        self._refuse_past_capacity(checked_id(cache_id), hint)

    @_serialised
    def kv_capacity(self) -> int:
        """Longest sequence one id can reach, in positions."""
        return self.plan.kv_capacity

    @_serialised
    def kv_len(self, cache_id: str) -> int | None:
        """Positions held for `cache_id`, or None for an unknown id."""
        live = self._slots.get(checked_id(cache_id))
        return None if live is None else live.length

    @_serialised
    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation | None:
        """Not built yet."""
        raise UnsupportedError(f"{len(requests)} reservations: reserving KV slots is not built yet")

    @_serialised
    def kv_slot_capacity_snapshot(self) -> KvSlotCapacitySnapshot:
        """Counts the pool's blocks."""
        pool = self._slots.pool
        return KvSlotCapacitySnapshot(
            block_size=self.plan.cache.block_size, total_blocks=pool.num_blocks, free_blocks=pool.num_free
        )

    @_serialised
    def set_lora_adapter_for_cache(self, cache_id: str, adapter: ActiveLoraAdapter | None) -> None:
        """Clears the binding with None; binding an adapter is not built yet."""
        checked_id(cache_id)
        if adapter is not None:
            raise UnsupportedError(f"adapter {adapter.name!r} cannot be bound: LoRA is not built yet")

    @_serialised
    def load_lora(self, name: str, path: str) -> None:
        """Not built yet."""
        raise UnsupportedError(f"adapter {name!r} ({path}) cannot be loaded: LoRA is not built yet")

    @_serialised
    def unload_lora(self, name: str) -> None:
        """Not built yet."""
        raise UnsupportedError(f"adapter {name!r} cannot be dropped: LoRA is not built yet")

    @_serialised
    def cache_metrics_snapshot(self) -> dict[str, Any]:
        """Counters of KV reuse (there is none yet) and of decode batches."""
        return {
            "position": "real-kv-reuse",
            "source": type(self).__name__,
            "enabled": False,
            **dict.fromkeys(("hits", "misses", "evictions", "saved_prefill_tokens", "entries", "bytes"), 0),
            "block_size": self.plan.cache.block_size,
            "kv_dtype": self.plan.cache.dtype,
            "decode_batch": self._decode_batches.snapshot(),
        }

    @_serialised
    def lora_metrics_snapshot(self) -> dict[str, Any]:
        """Counters of LoRA: there is none yet."""
        counts = dict.fromkeys(("adapter_count", "active_cache_bindings", "projection_applications"), 0)
        return {"enabled": False, **counts, "position": "real-inference", "source": type(self).__name__}

    def warmup(self, *, progress: bool = True) -> None:
        """Compiles every declared step, after which legal calls compile nothing."""
        with self._lock:
            self._refuse_unless_ready()
            track = Track("compiling steps") if progress else None
            self._steps.warmup(self.plan.ladders.declared(), track)

    def compile_stats(self) -> dict[str, Any]:
        """Counts compiled steps: compiled, loaded, compile_seconds, compiles_after_warmup, steps."""
        return self._steps.stats()

    def close(self) -> None:
        """Frees the KV and the parameters; closing twice is no error, any other call after it is."""
        with self._lock:
            self._state = ExecutorState.Shutdown
            self._device_kv.drop()
            self.params = {}

    def _new_slots(self) -> SlotTable:
        return SlotTable(
            max_seqs=self.plan.max_seqs,
            kv_capacity=self.plan.kv_capacity,
            block_size=self.plan.cache.block_size,
            num_blocks=self.plan.cache.num_blocks,
        )

    def _refuse_closed(self) -> None:
        if self._state is ExecutorState.Shutdown:
            raise CancelledError("this runner is closed")

    def _refuse_unless_ready(self) -> None:
        self._refuse_closed()
        if self._state is ExecutorState.Error:
            raise DeviceError(f"a step failed on the device, only reset() helps: {self._failure}")

    def _refuse_past_capacity(self, cache_id: str, length: int) -> None:
        if length > self.kv_capacity():
            raise RequestValidationError(
                f"{cache_id!r} needs {length} positions, its KV capacity is {self.kv_capacity()}"
            )

    def _tokens(self, cache_id: str, tokens: Sequence[int]) -> NDArray[np.int32]:
        return checked_tokens(checked_id(cache_id), tokens, self.model_config.vocab_size)

    def _decode_rows(self, batch: Sequence[DecodeRow], *, forced: bool) -> list[Logits]:
        work = []
        for cache_id, token, pos in checked_rows("batch", batch, "cache_id token pos"):
            array = self._tokens(cache_id, [token])
            refuse_mismatch(cache_id, "pos", pos, self._slots.length(cache_id))
            work.append((cache_id, array, True))
        refuse_repeated(cache_id for cache_id, _, _ in work)
        logits = [_found(row) for row in self._advance(work)]
        if work:
            self._decode_batches.count(len(work), forced=forced)
        return logits

    def _advance(self, work: Sequence[Work]) -> list[Logits | None]:
        plans = buckets.plan([len(tokens) for _, tokens, _ in work], self.plan.ladders)
        return [pieces[-1] if pieces else None for pieces in self._run(work, plans)]

    def _run(self, work: Sequence[Work], plans: Sequence[StepPlan]) -> list[list[NDArray[np.float32]]]:
        """Runs checked work: takes blocks for all of it, steps, and then commits the lengths."""
        lengths = [self._slots.length(cache_id) for cache_id, _, _ in work]
        targets = [(w[0], length + len(w[1])) for w, length in zip(work, lengths, strict=True)]
        self._slots.refuse_growth(targets)
        executables = [self._steps.get(plan.key) for plan in plans]
        known = frozenset(self._slots.cache_ids)
        self._slots.grow(targets)
        rows, sequences = [], []
        for (cache_id, tokens, wanted), length in zip(work, lengths, strict=True):
            live = self._slots.get(cache_id)
            assert live is not None
            sequences.append(live)
            rows.append(Row(tokens, length, self._slots.table[live.slot], wanted))
        results: list[list[NDArray[np.float32]]] = [[] for _ in work]
        try:
            for plan, executable in zip(plans, executables, strict=True):
                for row, logits in self._device_kv.run(plan, executable, rows).items():
                    results[row].append(logits)
        except BaseException as problem:  # an interrupt, too, may have lost the KV
            if self._device_kv.is_lost:
                self._state, self._failure = ExecutorState.Error, str(problem) or type(problem).__name__
            self._slots.undo_growth(known, [cache_id for cache_id, _, _ in work])
            raise
        for live, (_, target) in zip(sequences, targets, strict=True):
            live.length = target
        return results


def _found(logits: Logits | None) -> Logits:
    assert logits is not None, "a row that wants logits got none"
    return logits

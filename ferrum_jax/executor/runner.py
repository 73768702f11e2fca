"""`ModelRunner`: the `DecoderOnlyLLM` contract over compiled steps."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.artifacts import Artifacts
from ferrum_jax.compile.buckets import AnyKey
from ferrum_jax.compile.steps import StepCache
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import checked_flag, checked_id, checked_int, refuse_none
from ferrum_jax.contract.decoding import DecodedRun, DecodeRun
from ferrum_jax.contract.errors import RequestValidationError, shown
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.contract.llm import DecodeRow, Logits, ScoreRow, UnifiedRow, VerifyRow
from ferrum_jax.contract.policy import LogitsReturnPolicy
from ferrum_jax.contract.scoring import TokenScores
from ferrum_jax.contract.slots import ActiveLoraAdapter, KvSlotRequest, KvSlotReservation
from ferrum_jax.contract.watching import Watched
from ferrum_jax.executor.adapters import Adapters
from ferrum_jax.executor.counters import DecodeBatchCounters
from ferrum_jax.executor.described import Described
from ferrum_jax.executor.device import Answer, DeviceKv, expected, expected_logits
from ferrum_jax.executor.kv_memory import KvMemory
from ferrum_jax.executor.lifecycle import Closing, Lifecycle, serialised
from ferrum_jax.executor.loops import Loops
from ferrum_jax.executor.sequences import Sequences
from ferrum_jax.executor.sizing import EnginePlan
from ferrum_jax.executor.weights import refuse_other_shapes
from ferrum_jax.executor.work import appended, appended_rows, scored_rows, unified_rows
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.models.watching import checked_watch
from ferrum_jax.ops.quantised import activation_dtype
from ferrum_jax.progress import Track
from ferrum_jax.sharding.devices import JaxDevice


class ModelRunner(Closing, Described):
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
        name: str = "",
        artifacts: Artifacts | None = None,
        memory: KvMemory | None = None,
    ):
        """Allocates the KV, unless `memory`, which is of the plan's size, has one ready."""
        self.params_version = 0  # how often they were set anew
        self.model_config = model_config
        self.plan = plan
        self.device = device
        self.name = name or model_config.model_type
        self.artifacts = artifacts
        self._device = DeviceKv(params, model_config, memory or KvMemory(plan.cache, device, artifacts))
        self._life = Lifecycle("runner", lambda: self._device.is_lost)
        self._steps = StepCache(self._lower, strict=strict, artifacts=artifacts)
        dtype = activation_dtype(params).name
        self._adapters = Adapters(model_config, plan.loras, dtype, device, self._steps)
        self._sequences = Sequences(self._device, self._steps, plan, self._adapters)
        self._vocab_size = model_config.vocab_size
        self._loops = Loops(self._sequences, self._vocab_size)
        self._decode_batches = DecodeBatchCounters()

    @property
    def state(self) -> ExecutorState:
        """Ready, Error or Shutdown; Initializing while the KV is freed."""
        is_paused = self._life.state is ExecutorState.Ready and self._life.paused
        return ExecutorState.Initializing if is_paused else self._life.state

    @serialised
    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        """Appends `tokens` (creating the sequence if it is unknown); gives the last one's logits, `[vocab]`."""
        return expected_logits(self._sequences.advance([appended(cache_id, tokens, self._vocab_size)])[0])

    @serialised
    def decode(self, cache_id: str, token: int, pos: int) -> Logits:
        """Appends one token at position `pos`, which must be the cache's length; gives `[vocab]`."""
        return expected_logits(self._decode([(cache_id, token, pos)])[0])

    @serialised
    def decode_batch(self, batch: Sequence[DecodeRow]) -> list[Logits]:
        """Decodes one token of each sequence in one forward, answers in the same order."""
        return self.decode_batch_with_full_logits(batch, False)

    @serialised
    def decode_batch_with_full_logits(self, batch: Sequence[DecodeRow], force_full_logits: bool) -> list[Logits]:
        """As `decode_batch`, which always computes all logits; the flag is counted."""
        forced, rows = checked_flag("force_full_logits", force_full_logits), self._decode(batch)
        self._count_decodes(len(rows), forced=forced)
        return [expected_logits(row) for row in rows]

    @serialised
    def decode_batch_with_logits_policy(
        self, batch: Sequence[DecodeRow], policies: Sequence[LogitsReturnPolicy]
    ) -> list[Logits | int]:
        """As `decode_batch`; of greedy rows only the token id crosses to the host."""
        refuse_none("policies", policies)
        rows = self._decode(batch, policies)
        self._count_decodes(len(rows))
        return [expected(row) for row in rows]

    @serialised
    def forward_verify(self, cache_id: str, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends `tokens` and gives `[n, vocab]`: row i is the distribution after token i."""
        return self._sequences.verify([appended(cache_id, tokens, self._vocab_size)])[0]

    @serialised
    def forward_verify_batch(self, rows: Sequence[VerifyRow]) -> list[NDArray[np.float32]]:
        """As `forward_verify` for several sequences, as many in one step as `verify_rows` allow."""
        return self._sequences.verify(appended_rows(rows, self._vocab_size))

    @serialised
    def score_batch(self, rows: Sequence[ScoreRow]) -> list[TokenScores]:
        """Appends tokens of several sequences; gives what the model says of the targets after each of them.

        As many rows run in one step as `verify_rows` allow, `verify_tokens` of each. Known prefixes are not reused.
        """
        return self._sequences.score(scored_rows(rows, self._vocab_size))

    @serialised
    def watch(
        self, cache_id: str, tokens: Sequence[int], *, hidden: Sequence[int] = (), attention_weights: Sequence[int] = ()
    ) -> Watched:
        """Appends `tokens`; gives what is asked of each. A step for other layers compiles when it is first needed."""
        row = appended(cache_id, tokens, self._vocab_size)
        wanted = checked_watch(hidden, attention_weights, self.model_config)
        return self._sequences.watch(row, wanted)

    @serialised
    def unified_forward(self, items: Sequence[UnifiedRow]) -> list[Logits | None]:
        """Runs decode rows and chunks of prompts in one forward; None exactly where a chunk is not final."""
        return [None if row is None else expected_logits(row) for row in self._unify(items)]

    @serialised
    def unified_forward_with_logits_policy(
        self, items: Sequence[UnifiedRow], policies: Sequence[LogitsReturnPolicy]
    ) -> list[Logits | int | None]:
        """As `unified_forward`; of greedy rows only the token id crosses to the host."""
        refuse_none("policies", policies)
        return [*self._unify(items, policies)]

    @serialised
    def decode_n(self, runs: Sequence[DecodeRun], *, until_one_ends: bool = False) -> list[DecodedRun]:
        """Decodes up to `max_tokens` tokens of each sequence, chosen on the device, `loop_tokens` in one call of it.

        What it gives is what `decode` token by token and `sampling.sample` give. The KV of all tokens is reserved
        first, so that a call that runs short of blocks changes nothing.
        """
        return self._loops.decode(runs, until_one_ends=checked_flag("until_one_ends", until_one_ends))

    @serialised
    def unified_forward_can_return_full_logits(self) -> bool:
        """Says that it can."""
        return True

    @serialised
    def release(self, cache_id: str) -> None:
        """Frees the sequence's slot and blocks; an unknown id is no error."""
        self._sequences.release(checked_id(cache_id))

    @serialised
    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        """Rolls the sequence back to `new_len` positions; past its end, or an unknown id, is no error."""
        self._sequences.truncate(checked_id(cache_id), checked_int("new_len", new_len, 0))

    @serialised
    def fork(self, cache_id: str, new_cache_id: str) -> None:
        """Makes `new_cache_id` a copy of a live sequence; the block both would write is copied when one does.

        Raises:
            RequestValidationError: `cache_id` is unknown, or `new_cache_id` is not.
            ResourceExhaustedError: no slot is free.
        """
        self._sequences.fork(checked_id(cache_id), checked_id(new_cache_id))

    def reset(self) -> None:
        """Drops every sequence and prefix; keeps weights and compiled steps. Also the way back from the state Error.

        Raises:
            ResourceExhaustedError: a lost KV cannot be allocated again; the state stays Error.
        """
        with self._life.lock:
            self._life.refuse_closed()
            if self._device.is_lost:
                self._device.reallocate()
            self._sequences.clear()
            self._life.state, self._life.paused = ExecutorState.Ready, ""

    @serialised
    def prepare(self, cache_id: str, max_tokens: int) -> None:
        """Takes the slot and compiles the steps for a prompt of `max_tokens` tokens and for decoding after it."""
        self._sequences.prepare(checked_id(cache_id), checked_int("max_tokens", max_tokens, 1))

    @serialised
    def prepare_kv_capacity(self, cache_id: str, capacity_hint: int) -> None:
        """Refuses a request whose whole length, `capacity_hint` positions, could never be served."""
        hint = checked_int("capacity_hint", capacity_hint, 0)
        self._sequences.slots.refuse_past_capacity(checked_id(cache_id), hint)

    @serialised
    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        """Makes `target_len` positions of each id writable, all or nothing.

        An id that is unknown gets a slot if it asks for at least one position. A block that is shared is copied now.

        Raises:
            RequestValidationError: a target is past the capacity.
            ResourceExhaustedError: slots or blocks are short, for the targets or for the admission targets.
        """
        return self._sequences.reserve(requests)

    @serialised
    def set_lora_adapter_for_cache(self, cache_id: str, adapter: ActiveLoraAdapter | None) -> None:
        """Binds one id to an adapter, which is loaded from its path if it is not there, or to none.

        An adapter that came this way makes room for another when no sequence is bound to it.

        Raises:
            RequestValidationError: the sequence holds positions of another adapter, or of none.
            NotFoundError, InvalidFormatError, UnsupportedError, …: it is not loaded and cannot be.
        """
        if adapter is not None and not isinstance(adapter, ActiveLoraAdapter):
            raise RequestValidationError(f"adapter {shown(adapter)}: expected an ActiveLoraAdapter or None")
        self._sequences.bind(checked_id(cache_id), adapter)

    def load_lora(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads an adapter in PEFT's format until `unload_lora`; nothing is compiled, and others run meanwhile.

        Raises:
            AlreadyExistsError: the name is in use.
            ResourceExhaustedError: all `max_loras` adapters are loaded by name or in use.
            NotFoundError, InvalidFormatError, UnsupportedError, RequestValidationError: as its files deserve.
        """
        with self._life.lock:
            self._life.refuse_unless_ready()
            self._adapters.refuse_without_room(name)
        read = self._adapters.read(path)  # which takes a while, and concerns nobody else
        with self._life.lock:
            self._life.refuse_unless_ready()
            self._sequences.install(name, read, path, is_pinned=True)

    @serialised
    def unload_lora(self, name: str) -> None:
        """Drops an adapter and its prefixes.

        Raises:
            NotFoundError, RequestValidationError: it is not loaded, or a sequence is bound to it.
        """
        self._sequences.unload(name)

    @serialised
    def warmup(self, *, progress: bool = True, load: bool = False) -> None:
        """Compiles every declared step, or finds it whole on disk.

        A step on disk is loaded when it is first used, also if it was compiled here; with `load`, all are ready now.
        """
        track = Track("compiling steps") if progress else None
        self._steps.warmup(self.plan.declared(), track, load=load)

    def set_params(self, params: ParamTree) -> None:
        """Takes other weights, which must have the tree, shapes, dtypes and device of those that are there.

        Arrays are taken as they are, not copied; nothing is compiled. Every known prefix is forgotten, and
        `params_version` goes up by one. It may be called while the KV is freed.

        Raises:
            RequestValidationError: a sequence is live, whose keys and values are of the old weights.
            InvalidParameterError: the weights differ in more than their values; the message lists where.
        """
        with self._life.lock:
            self._life.refuse_closed()
            self._life.refuse_failed()
            refuse_other_shapes(params, self.params)
            self._sequences.forget_prefixes("new weights are set")
            self.params_version += 1  # whatever interrupts this: what follows is of no old version
            self._device.params = params

    @serialised
    def free_kv(self) -> None:
        """Gives the KV's memory back until `allocate_kv` or `reset`; until then only `set_params` and `close` go.

        Raises:
            RequestValidationError: a sequence is live.
        """
        self._sequences.forget_prefixes("the KV is freed")
        self._device.free()
        self._life.paused = "the KV is freed: allocate_kv() first"

    def allocate_kv(self) -> None:
        """Brings the KV back after `free_kv`, empty and of the same size; compiles nothing.

        Raises:
            ResourceExhaustedError: the device has not so much memory left; the KV stays freed.
        """
        with self._life.lock:
            self._life.refuse_closed()
            self._life.refuse_failed()
            if self._life.paused:
                self._device.reallocate()
                self._life.paused = ""

    @serialised
    def compile_stats(self) -> dict[str, Any]:
        """Counts steps: compiled, loaded, on_disk (not yet loaded), their seconds, compiles_after_warmup, steps."""
        return self._steps.stats()

    def close(self) -> None:
        """Frees the KV, the parameters and the compiled steps; closing twice is no error, any other call after is."""
        with self._life.lock:
            self._life.state = ExecutorState.Shutdown
            self._device.drop()
            self._steps.drop()
            self._adapters.stacks = None

    def _lower(self, key: AnyKey) -> jax.stages.Lowered:
        return self._device.lower(key, self._adapters.stacks)

    def _decode(
        self, batch: Sequence[DecodeRow], policies: Sequence[LogitsReturnPolicy] | None = None
    ) -> Sequence[Answer | None]:
        return self._sequences.decode(batch, policies, self._vocab_size)

    def _unify(
        self, items: Sequence[UnifiedRow], policies: Sequence[LogitsReturnPolicy] | None = None
    ) -> list[Answer | None]:
        return self._sequences.advance(unified_rows(items, policies, self._vocab_size, self._sequences.slots.length))

    def _count_decodes(self, num_rows: int, *, forced: bool = False) -> None:
        if num_rows:
            self._decode_batches.count(num_rows, forced=forced, unpadded=num_rows in self.plan.ladders.decode_rows)

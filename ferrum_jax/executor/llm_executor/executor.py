"""`LlmExecutor`: the async `ModelExecutor` contract over any `DecoderOnlyLLM`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from ferrum_jax.contract import execution, tensors
from ferrum_jax.contract.answers import check_kind
from ferrum_jax.contract.checks import check_cache_id, check_int, check_items
from ferrum_jax.contract.decoding import FullLogits
from ferrum_jax.contract.errors import FerrumError, RequestValidationError, UnsupportedError
from ferrum_jax.contract.execution import BatchModelExecutor, ExecutorState, SpeculativeExecutor
from ferrum_jax.contract.handles import KvCacheHandle
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.slots import KvSlotCapacitySnapshot, KvSlotRequest, KvSlotReservation
from ferrum_jax.contract.values import ModelInfo
from ferrum_jax.executor.llm_executor import description, model_calls, requests
from ferrum_jax.executor.llm_executor.handle import LlmKvCacheHandle, handle_of, live_sequence
from ferrum_jax.executor.llm_executor.metrics import Meter
from ferrum_jax.executor.llm_executor.sequences import TrackedSequences
from ferrum_jax.executor.llm_executor.worker import CallWorker


class LlmExecutor(BatchModelExecutor, SpeculativeExecutor):
    """Runs a model's calls in a thread of its own, one at a time, off the event loop.

    A refused call changes nothing. A cancelled one waits for the device and is undone: the caller's handle stays valid,
    unless the model cannot truncate; then its sequence is released. Methods that are not async wait while a call runs.
    The model may be called directly as well; if it drops a sequence, the handles on it are stale.
    """

    def __init__(
        self,
        model: DecoderOnlyLLM,
        info: ModelInfo | None = None,
        *,
        warm: Callable[[], None] | None = None,
        close: Callable[[], None] | None = None,
    ):
        """Wraps a model.

        Args:
            model: stays the caller's; `shutdown` releases the sequences begun here and no others.
            info: what `info` returns; None: what the model reports.
            warm: what `warmup` calls; None: the model's own, without a progress bar.
            close: what `shutdown` calls last, for an executor that owns its model.

        Raises:
            RequestValidationError: an argument is of another kind.
            ResourceExhaustedError: the process may not have another thread.
        """
        if not isinstance(model, DecoderOnlyLLM):
            raise RequestValidationError(f"model is a {type(model).__name__}, expected a DecoderOnlyLLM")
        if not isinstance(info, ModelInfo | None):
            raise RequestValidationError(f"info is a {type(info).__name__}, expected a ModelInfo or None")
        self._model = model
        self._info = description.model_info(model) if info is None else info
        self._capabilities = description.capabilities(model, self._info)
        self._vocab_size = model.config.vocab_size
        per_layer = self._capabilities.memory_requirements.kv_cache_memory_per_token
        self._table = TrackedSequences(model, self._info.device, per_layer * model.config.num_layers)
        self._meter = Meter(self._capabilities.max_batch_size)
        self._worker = CallWorker(self._table, self._meter)
        self._memory = description.UNKNOWN_MEMORY
        self._warm = warm or partial(description.warm_quietly, model)
        self._close = close or (lambda: None)

    def info(self) -> ModelInfo:
        """Identity and size of the model, as passed in or reported by the model."""
        return self._info

    def capabilities(self) -> execution.ExecutorCapabilities:
        """Capabilities of the model, as it reported them when the executor was made."""
        return self._capabilities

    def status(self) -> execution.ExecutorStatus:
        """State, latencies and memory now; answers in every state and waits for no call made here.

        `is_ready` holds in Ready and in Busy, where calls queue; during a warm-up the state is Initializing. Memory is
        as of the last status or metrics while no call ran; zeros where the model reports none.
        """
        state = self._meter.state if self._table.state is ExecutorState.Ready else self._table.state
        if self._table.is_closed:
            state = ExecutorState.Shutdown
        prefill, decode = self._meter.tallies["prefill"], self._meter.tallies["decode"]
        return execution.ExecutorStatus(
            state=state,
            is_ready=state in (ExecutorState.Ready, ExecutorState.Busy),
            current_batch_size=self._meter.running_rows,
            prefill_operations=prefill.operations,
            decode_operations=decode.operations,
            avg_prefill_time_ms=prefill.average_ms,
            avg_decode_time_ms=decode.average_ms,
            memory_usage=self._memory_usage(),
            last_operation=self._meter.last_operation,
        )

    def metrics(self) -> execution.ExecutorMetrics:
        """Latencies and rates over the executor's life; answers in every state."""
        return self._meter.metrics(self._memory_usage())

    def _memory_usage(self) -> execution.ExecutorMemoryUsage:
        """Asks the model for its memory, unless a call runs; zeros if it cannot answer any more."""
        if self._table.lock.acquire(blocking=False):
            try:
                usage = None if self._table.is_closed else self._model.memory_usage()
                usage = check_kind(self._model, "memory_usage", usage, execution.ExecutorMemoryUsage)
            except FerrumError:
                usage = None
            finally:
                self._table.lock.release()
            self._memory = usage or description.UNKNOWN_MEMORY
        return self._memory

    async def prefill(self, input: tensors.PrefillInput) -> tensors.PrefillOutput:
        """Appends a prompt, or its next chunk, `input_ids [1, n]`: `logits [1, 1, vocab]` of the last token.

        With the metadata `ferrum_require_full_logits` they are `[1, n, vocab]`. With `ferrum_hidden_layers` and
        `ferrum_attention_layers`, lists of layers as `DecoderOnlyLLM.capture` counts them, the output has their hidden
        states and attention weights, in the order of the lists.
        """
        self._table.check_ready()
        rows = requests.prefill_rows([input], self._vocab_size)
        return (await self._worker.run("prefill", rows, model_calls.prefill))[0]

    async def batch_prefill(self, inputs: Sequence[tensors.PrefillInput]) -> list[tensors.PrefillOutput]:
        """Appends several prompts in one unified forward, all or nothing, in order.

        Each prompt that wants full logits or activations runs in a forward of its own.
        """
        self._table.check_ready()
        rows = requests.prefill_rows(inputs, self._vocab_size)
        return await self._worker.run("prefill", rows, partial(model_calls.prefill, together=True))

    async def decode(self, input: tensors.DecodeInput) -> tensors.DecodeOutput:
        """Appends one token: `[1, vocab]` logits, or `[1, 1]` int32 ids under `GreedyArgmax`.

        With the metadata `ferrum_hidden_layers`, a list of one layer, and `ferrum_attention_layers`, the output has
        the token's hidden state `[1, hidden]` and attention weights `[1, heads, positions]`.
        """
        self._table.check_ready()
        rows = requests.decode_rows([input], self._vocab_size)
        return (await self._worker.run("decode", rows, model_calls.decode))[0]

    async def batch_decode(self, inputs: Sequence[tensors.DecodeInput]) -> list[tensors.DecodeOutput]:
        """Appends one token to each of several sequences in one forward, all or nothing, in order."""
        self._table.check_ready()
        rows = requests.decode_rows(inputs, self._vocab_size)
        return await self._worker.run("decode", rows, model_calls.decode)

    async def unified_decode(self, batch: tensors.UnifiedBatch) -> list[Any]:
        """Runs decode rows and chunks in one forward: `[vocab]`, a token id, or None where a chunk is not final.

        `handle(seq_id)` returns a handle on a sequence that began here without one.
        """
        self._table.check_ready()
        if not isinstance(batch, tensors.UnifiedBatch):
            raise RequestValidationError(f"batch is a {type(batch).__name__}, expected a UnifiedBatch")
        rows = requests.unified_rows(batch.items, self._vocab_size)
        kind = "decode" if all(len(row.tokens) == 1 and row.offset for row in rows) else "prefill"
        return await self._worker.run(kind, rows, model_calls.unified)

    async def forward_verify(self, inputs: Sequence[tensors.DecodeInput]) -> list[tensors.DecodeOutput]:
        """Appends the inputs' tokens to the one sequence they all name, in one forward.

        Output i is the distribution after token i, with a handle that ends there: to go on from it, truncate to it.
        """
        self._table.check_ready()
        rows = requests.decode_rows(inputs, self._vocab_size)
        if not rows:
            raise RequestValidationError("inputs are empty, verifying needs at least one token")
        run = requests.join_rows(rows)
        return await self._worker.run("decode", [run], partial(model_calls.verify, policies=[r.policy for r in rows]))

    async def speculative_decode(
        self, input: tensors.DecodeInput, draft_tokens: Sequence[int], acceptance_threshold: float
    ) -> tensors.SpeculativeDecodeOutput:
        """Appends the input's token and the drafted tokens that the model accepts, in one forward.

        The input's policy must be `FullLogits`; the draft may be empty. Nothing is sampled: choose from `next_logits`.
        """
        self._table.check_ready()
        (row,) = requests.decode_rows([input], self._vocab_size)
        if not isinstance(row.policy, FullLogits):
            raise UnsupportedError(f"policy {type(row.policy).__name__}: speculation returns full logits only")
        requests.check_no_captures(row, "speculative_decode")
        threshold = requests.check_threshold(acceptance_threshold)
        run = requests.extend_row(row, draft_tokens, self._vocab_size)
        return await self._worker.run("decode", [run], partial(model_calls.speculate, threshold=threshold))

    async def truncate_kv(self, handle: KvCacheHandle, new_len: int) -> None:
        """Rolls back a sequence, given any handle on it; a length past its end is no error.

        A roll back that runs when its caller is cancelled is not undone: the dropped positions are gone.
        """
        self._table.check_ready()
        length, table = check_int("new_len", new_len, 0), self._table
        await self._worker.run(None, (), lambda _log, _rows: table.truncate(live_sequence(handle, table), length))

    async def forward(self, input_ids: Any) -> NDArray[Any]:
        """Returns `[batch, seq, vocab]` logits of `[batch, seq]` tokens and keeps no sequence.

        Rows run together where the model and its free slots allow it, else one after another.
        """
        self._table.check_ready()
        rows = requests.token_rows("input_ids", input_ids, self._vocab_size)
        return await self._worker.run("prefill", rows, model_calls.forward)

    async def warmup(self) -> None:
        """Compiles or loads all programs that calls will need; the state is Initializing meanwhile."""
        await self._worker.run(None, (), lambda _log, _rows: self._warm(), ExecutorState.Initializing)

    async def reset(self) -> None:
        """Drops every sequence of the model, and makes every handle stale; it also ends the state Error.

        Weights, loaded adapters, compiled programs, metrics and the numbering of ids are kept. A reset that runs when
        its caller is cancelled is not undone.
        """
        await self._worker.run(None, (), lambda _log, _rows: self._table.reset())

    async def shutdown(self) -> None:
        """Finishes the running call, refuses those that wait, and releases every sequence begun here.

        A second shutdown is no error; afterwards `info`, `capabilities`, `status` and `metrics` answer, and every other
        call is a CancelledError.
        """
        await self._worker.close(self._close)

    def handle(self, cache_id: str) -> LlmKvCacheHandle:
        """Returns a handle on a live sequence of this executor, at its length now."""
        self._table.check_ready()
        with self._table.held():
            sequence = self._table.find(check_cache_id(cache_id))
            if sequence is None:
                raise RequestValidationError(f"{cache_id!r} is no live sequence of this executor")
            return handle_of(self._table, sequence)

    def release_cache(self, cache_id: str) -> None:
        """Frees a sequence; an unknown id is no error. Ids are passed to the model as they are."""
        with self._table.held():
            self._table.release(check_cache_id(cache_id))

    def truncate_kv_for_cache_id(self, cache_id: str, new_len: int) -> None:
        """Rolls back a sequence of the model; an unknown id, or a length past its end, is no error."""
        self._table.check_ready()
        length = check_int("new_len", new_len, 0)
        with self._table.held():
            self._table.truncate_by_id(check_cache_id(cache_id), length)

    def kv_capacity(self) -> int:
        """Longest sequence one id can reach, in positions."""
        self._table.check_ready()
        return self._table.capacity

    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation | None:
        """Makes positions writable, all or nothing; None where the model does not account for blocks.

        An id without a sequence gets an empty one, which `unified_decode` can begin with.
        """
        checked = check_items("requests", requests, KvSlotRequest)
        with self._table.held():
            return self._table.reserve(checked)

    def kv_slot_capacity_snapshot(self) -> KvSlotCapacitySnapshot | None:
        """Counts the pool's blocks; None where the model does not account for blocks."""
        with self._table.held() as model:
            pool = model.kv_slot_capacity_snapshot()
            return check_kind(model, "kv_slot_capacity_snapshot", pool, KvSlotCapacitySnapshot)

    def cache_metrics_snapshot(self) -> Mapping[str, Any]:
        """The model's counters, with this executor's fallbacks in `decode_batch`, and waits in `executor_model_lock`.

        `unsupported_fallback_calls` counts calls that ran chunk by chunk because the model's unified forward is
        Unsupported, or cannot return the logits that were asked for. `lora_fallback_calls` counts calls that ran row
        by row because the model refused a batch with adapters in it as Unsupported.
        """
        with self._table.held():
            return self._table.cache_metrics()

    def lora_metrics_snapshot(self) -> Mapping[str, Any] | None:
        """The model's counters of LoRA; None where it keeps none."""
        with self._table.held() as model:
            return check_kind(model, "lora_metrics_snapshot", model.lora_metrics_snapshot(), Mapping)

    def supports_native_unified_decode(self) -> bool:
        """True if the model's class has a unified forward of its own, which was never Unsupported so far."""
        self._table.check_ready()
        return description.overrides(self._model, "unified_forward") and not self._table.lacks_unified

    def optimal_batch_size(self) -> int:
        """Live sequences and free blocks, each of which could begin one; `max_batch_size` if blocks are not counted.

        At least 1 and at most `max_batch_size`.
        """
        most = self._capabilities.max_batch_size
        with self._table.held() as model:
            snapshot = model.kv_slot_capacity_snapshot()
            pool = check_kind(model, "kv_slot_capacity_snapshot", snapshot, KvSlotCapacitySnapshot)
            return max(1, most if pool is None else min(most, self._table.count() + pool.free_blocks))

    def supports_batch_size(self, batch_size: int) -> bool:
        """True from 1 to `max_batch_size`: those run as one call of the model, larger ones may take several."""
        self._table.check_ready()
        return 1 <= check_int("batch_size", batch_size, None) <= self._capabilities.max_batch_size

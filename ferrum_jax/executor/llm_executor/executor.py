"""`LlmExecutor`: the async `ModelExecutor` contract over any `DecoderOnlyLLM`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.checks import checked_id, checked_int
from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError
from ferrum_jax.contract.execution import ExecutorCapabilities, ExecutorMetrics, ExecutorStatus
from ferrum_jax.contract.executor import BatchModelExecutor, SpeculativeExecutor
from ferrum_jax.contract.handles import KvCacheHandle
from ferrum_jax.contract.llm import DecoderOnlyLLM, choose
from ferrum_jax.contract.policy import FullLogits
from ferrum_jax.contract.slots import KvSlotCapacitySnapshot, KvSlotRequest, KvSlotReservation
from ferrum_jax.contract.tensors import (
    DecodeInput,
    DecodeOutput,
    PrefillInput,
    PrefillOutput,
    SpeculativeDecodeOutput,
    UnifiedBatch,
    UnifiedBatchItem,
)
from ferrum_jax.contract.values import ModelInfo
from ferrum_jax.executor.llm_executor import forwards, profile, speculation
from ferrum_jax.executor.llm_executor.call_queue import CallQueue
from ferrum_jax.executor.llm_executor.handle import LlmKvCacheHandle, Place, alive
from ferrum_jax.executor.llm_executor.inputs import (
    RowInput,
    checked_list,
    decode_row,
    draft_ids,
    extended,
    joined,
    prefill_row,
    token_matrix,
    unified_row,
)
from ferrum_jax.executor.llm_executor.meter import Kind
from ferrum_jax.executor.llm_executor.outputs import decode_output, handle_of, prefill_outputs
from ferrum_jax.executor.llm_executor.savepoint import Savepoint

T = TypeVar("T")


class LlmExecutor(BatchModelExecutor, SpeculativeExecutor):
    """Runs a model's calls in a thread of its own, one at a time, off the event loop.

    A refused call changes nothing. A cancelled one waits for the device and takes back what it did there: the caller's
    handle is as good as before, unless the model cannot truncate; then its sequence is released. Plain methods wait
    while a step runs. The model may be called directly as well; a sequence it drops makes its handles stale.
    """

    def __init__(
        self,
        model: DecoderOnlyLLM,
        info: ModelInfo | None = None,
        *,
        warm: Callable[[], None] | None = None,
        close: Callable[[], None] | None = None,
    ):
        """Puts an executor around a model.

        Args:
            model: stays the caller's; `shutdown` releases the sequences begun here and no others.
            info: what `info` tells; the model's own word if None.
            warm: what `warmup` calls; the model's own, without a bar, if None.
            close: what `shutdown` calls last, for an executor that owns its model.
        """
        if not isinstance(model, DecoderOnlyLLM):
            raise RequestValidationError(f"model is a {type(model).__name__}, expected a DecoderOnlyLLM")
        if not isinstance(info, ModelInfo | None):
            raise RequestValidationError(f"info is a {type(info).__name__}, expected a ModelInfo or None")
        self._model = model
        self._info = profile.info(model) if info is None else info
        self._capabilities = profile.capabilities(model, self._info)
        self._vocab_size = model.config.vocab_size
        self._calls = CallQueue(model, self._capabilities.max_batch_size)
        self._ledger = self._calls.ledger
        per_layer = self._capabilities.memory_requirements.kv_cache_memory_per_token
        self._place = Place(self._ledger, self._info.device, per_layer * model.config.num_layers)
        self._warm = warm
        self._close = close

    def info(self) -> ModelInfo:
        """Identity and size of the model, as it was given or told."""
        return self._info

    def capabilities(self) -> ExecutorCapabilities:
        """What was built, as the model told when the executor was made."""
        return self._capabilities

    def status(self) -> ExecutorStatus:
        """How the executor is doing now; answers in every state and waits for no call made here.

        Ready and Busy, where calls queue, are both `is_ready`. Memory is as of the last time this was asked while no
        call ran; zeros where the model tells none.
        """
        return self._calls.status()

    def metrics(self) -> ExecutorMetrics:
        """Latencies and rates over the executor's life; answers in every state."""
        return self._calls.metrics()

    async def prefill(self, input: PrefillInput) -> PrefillOutput:
        """Reads a prompt, or its next chunk: `input_ids [1, n]` gives `logits [1, 1, vocab]` of the last token.

        With the metadata `ferrum_require_full_logits` it gives `[1, n, vocab]`. With `ferrum_hidden_layers` and
        `ferrum_attention_layers`, lists of layers as `DecoderOnlyLLM.watch` counts them, the output has their hidden
        states and attention weights, in the order of the lists.
        """
        (given,) = checked_list("inputs", [input], PrefillInput)
        row = prefill_row("input", given, self._vocab_size)
        return (await self._prefill([row], forwards.prefill))[0]

    async def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """Reads several prompts in one unified forward, all or nothing, in order.

        Those that want the logits of every position are read by one `forward_verify` each instead.
        """
        listed = checked_list("inputs", inputs, PrefillInput)
        rows = [prefill_row(f"inputs[{at}]", item, self._vocab_size) for at, item in enumerate(listed)]
        return await self._prefill(rows, forwards.prefill_cohort)

    async def decode(self, input: DecodeInput) -> DecodeOutput:
        """Appends one token: `[1, vocab]` logits, or `[1, 1]` int32 ids under `GreedyArgmax`."""
        (given,) = checked_list("inputs", [input], DecodeInput)
        return (await self._decode([decode_row("input", given, self._vocab_size)]))[0]

    async def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Appends one token to each of several sequences in one forward, all or nothing, in order."""
        listed = checked_list("inputs", inputs, DecodeInput)
        return await self._decode(
            [decode_row(f"inputs[{at}]", item, self._vocab_size) for at, item in enumerate(listed)]
        )

    async def unified_decode(self, batch: UnifiedBatch) -> list[Any]:
        """Runs decode rows and chunks in one forward: `[vocab]`, a token id, or None where a chunk is not final.

        `handle(seq_id)` gives a handle on a sequence that began here without one.
        """
        if not isinstance(batch, UnifiedBatch):
            raise RequestValidationError(f"batch is a {type(batch).__name__}, expected a UnifiedBatch")
        items = checked_list("items", batch.items, UnifiedBatchItem)
        rows = [unified_row(f"items[{at}]", item, self._vocab_size) for at, item in enumerate(items)]
        kind = "decode" if all(len(row.tokens) == 1 and row.offset for row in rows) else "prefill"
        return await self._run(kind, rows, lambda point: forwards.unified(point, forwards.open_rows(point, rows), rows))

    async def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Appends the inputs' tokens to the one sequence they all name, in one forward.

        Output i is the distribution after token i, with a handle that ends there: to go on from it, truncate to it.
        """
        listed = checked_list("inputs", inputs, DecodeInput)
        if not listed:
            raise RequestValidationError("inputs are empty, verifying needs at least one token")
        rows = [decode_row(f"inputs[{at}]", item, self._vocab_size) for at, item in enumerate(listed)]
        run = joined(rows)

        def work(point: Savepoint) -> list[DecodeOutput]:
            (live,) = forwards.open_rows(point, [run])
            start = handle_of(self._place, live)
            logits = forwards.verify(point, live, run.tokens)
            return [
                decode_output(start.with_sequence_length(start.num_tokens + at + 1), choose(logits[at], row.policy))
                for at, row in enumerate(rows)
            ]

        return await self._run("decode", [run], work)

    async def speculative_decode(
        self, input: DecodeInput, draft_tokens: Sequence[int], acceptance_threshold: float
    ) -> SpeculativeDecodeOutput:
        """Appends the input's token and as many drafted ones as the model agrees with, in one forward.

        Args:
            input: the newest token, not in the KV yet, as for `decode`; its policy must be `FullLogits`.
            draft_tokens: what may follow that token, in order; may be empty.
            acceptance_threshold: the share of the largest probability that a drafted token must reach, 0 to 1.

        Returns:
            The accepted tokens, without the input's; `next_logits [1, vocab]` after the last of them, or after the
            input's token if none was; and a handle that ends there. Nothing is sampled: choose from `next_logits`.
        """
        (given,) = checked_list("inputs", [input], DecodeInput)
        row = decode_row("input", given, self._vocab_size)
        if not isinstance(row.policy, FullLogits):
            raise UnsupportedError(f"policy {type(row.policy).__name__}: speculation gives full logits only")
        threshold = speculation.checked_threshold(acceptance_threshold)
        draft = draft_ids(draft_tokens, self._vocab_size)
        run = extended(row, draft)

        def work(point: Savepoint) -> list[SpeculativeDecodeOutput]:
            (live,) = forwards.open_rows(point, [run])
            count, logits = speculation.advance(point, live, run.tokens.tolist(), threshold)
            return [
                SpeculativeDecodeOutput(
                    accepted_tokens=draft[:count],
                    next_logits=logits[None],
                    kv_cache=handle_of(self._place, live),
                    acceptance_count=count,
                )
            ]

        return (await self._run("decode", [run], work))[0]

    async def truncate_kv(self, handle: KvCacheHandle, new_len: int) -> None:
        """Rolls back the sequence of any handle on it; past its end is no error.

        A roll back that runs when its caller is cancelled is not taken back: what it dropped is gone.
        """
        length = checked_int("new_len", new_len, 0)
        await self._calls.run_for_good(lambda: self._ledger.truncate(alive(handle, self._ledger), length))

    async def forward(self, input_ids: Any) -> NDArray[np.float32]:
        """Gives `[batch, seq, vocab]` logits of `[batch, seq]` tokens and keeps no sequence.

        Rows run together where the model and its free slots allow it, else one after another.
        """
        rows = token_matrix("input_ids", input_ids, self._vocab_size)
        if not rows:
            raise RequestValidationError("input_ids has no rows, expected at least one")
        tokens = sum(len(row) for row in rows)
        return await self._calls.run(
            "prefill", len(rows), tokens, lambda point: np.stack(forwards.forward(point, rows))
        )

    async def warmup(self) -> None:
        """Compiles or loads everything that calls will need."""
        await self._calls.run_for_good(self._warm or (lambda: self._model.warmup(progress=False)))

    async def shutdown(self) -> None:
        """Lets the running call finish, refuses those that wait, and releases every sequence begun here.

        Twice is no error; after it `info`, `capabilities`, `status` and `metrics` answer and every other call is a
        CancelledError.
        """
        await self._calls.close(self._close or (lambda: None))

    def handle(self, cache_id: str) -> LlmKvCacheHandle:
        """Gives a handle on a live sequence of this executor, at its length now."""
        self._ledger.refuse_failed()
        with self._ledger.held():
            live = self._ledger.find(checked_id(cache_id))
            if live is None:
                raise RequestValidationError(f"{cache_id!r} is no live sequence of this executor")
            return handle_of(self._place, live)

    def release_cache(self, cache_id: str) -> None:
        """Frees a sequence; an unknown id is no error. Ids go to the model as they are."""
        with self._ledger.held():
            self._ledger.release(checked_id(cache_id))

    def truncate_kv_for_cache_id(self, cache_id: str, new_len: int) -> None:
        """Rolls back a sequence of this executor; an unknown id, or a length past its end, is no error."""
        length = checked_int("new_len", new_len, 0)
        self._ledger.refuse_failed()
        with self._ledger.held():
            live = self._ledger.find(checked_id(cache_id))
            if live is not None:
                self._ledger.truncate(live, length)

    def kv_capacity(self) -> int:
        """Longest sequence one id can reach, in positions."""
        self._ledger.refuse_failed()
        return self._ledger.capacity

    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation | None:
        """Makes positions writable, all or nothing; None where the model does not account for blocks.

        An id without a sequence gets an empty one, which `unified_decode` can begin with.
        """
        listed = checked_list("requests", requests, KvSlotRequest)
        with self._ledger.held():
            return self._ledger.reserve(listed)

    def kv_slot_capacity_snapshot(self) -> KvSlotCapacitySnapshot | None:
        """Counts the pool's blocks; None where the model does not account for blocks."""
        with self._ledger.held() as model:
            return model.kv_slot_capacity_snapshot()

    def cache_metrics_snapshot(self) -> Mapping[str, Any]:
        """The model's counters, the fallbacks of this executor among them, and `executor_model_lock`."""
        with self._ledger.held():
            return self._ledger.cache_metrics()

    def lora_metrics_snapshot(self) -> Mapping[str, Any] | None:
        """The model's counters of LoRA; None where it keeps none."""
        with self._ledger.held() as model:
            return model.lora_metrics_snapshot()

    def supports_native_unified_decode(self) -> bool:
        """Says whether the model's class has a unified forward of its own."""
        self._ledger.refuse_failed()
        return profile.overrides(self._model, "unified_forward")

    def optimal_batch_size(self) -> int:
        """Sequences that are alive and, where the model counts blocks, those that a free block could begin.

        At least 1 and at most `max_batch_size`.
        """
        most = self._capabilities.max_batch_size
        with self._ledger.held() as model:
            pool = model.kv_slot_capacity_snapshot()
            return max(1, most if pool is None else min(most, self._ledger.count() + pool.free_blocks))

    def supports_batch_size(self, batch_size: int) -> bool:
        """True from 1 to `max_batch_size`: those run as one call of the model, larger ones may take several."""
        self._ledger.refuse_failed()
        return 1 <= checked_int("batch_size", batch_size, 0) <= self._capabilities.max_batch_size

    async def _run(self, kind: Kind, rows: Sequence[RowInput], work: Callable[[Savepoint], list[T]]) -> list[T]:
        if not rows:
            self._ledger.refuse_failed()
            return []
        return await self._calls.run(kind, len(rows), sum(len(row.tokens) for row in rows), work)

    async def _prefill(self, rows: Sequence[RowInput], forward: forwards.Prefill) -> list[PrefillOutput]:
        def work(point: Savepoint) -> list[PrefillOutput]:
            opened = forwards.open_rows(point, rows)
            return prefill_outputs(self._place, opened, forward(point, opened, rows), [row.options for row in rows])

        return await self._run("prefill", rows, work)

    async def _decode(self, rows: Sequence[RowInput]) -> list[DecodeOutput]:
        def work(point: Savepoint) -> list[DecodeOutput]:
            opened = forwards.open_rows(point, rows)
            answers = forwards.decode(point, opened, rows)
            return [
                decode_output(handle_of(self._place, live), answer)
                for live, answer in zip(opened, answers, strict=True)
            ]

        return await self._run("decode", rows, work)

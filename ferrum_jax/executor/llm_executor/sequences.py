"""The sequences of one executor, the lock around its model, and how the changes of one call are undone."""

import contextlib
import itertools
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferrum_jax.contract.answers import check_kind, check_length
from ferrum_jax.contract.checks import check_cache_id, check_not_forked
from ferrum_jax.contract.errors import CancelledError, FerrumError, RequestValidationError, UnsupportedError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.slots import ActiveLoraAdapter, KvSlotRequest, KvSlotReservation
from ferrum_jax.contract.values import Device
from ferrum_jax.executor.llm_executor.description import overrides
from ferrum_jax.executor.runner import ModelRunner

_OWN_ID = re.compile(r"llm-(cache|forward)-\d+")
_Numbers = dict[str, Iterator[int]]
# The next numbers of ids of each kind: a model that tells no lengths cannot tell which ids another executor has taken.
_NUMBERS: "weakref.WeakKeyDictionary[DecoderOnlyLLM, _Numbers]" = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class TrackedSequence:
    """One sequence of the model, as its executor knows it."""

    cache_id: str
    length: int = 0  # positions
    adapter: ActiveLoraAdapter | None = None
    is_known: bool = False  # the model itself has returned a length for it
    is_adopted: bool = False  # the model held positions of it before this executor did
    knows_adapter: bool = True  # False: a call of the model may have bound it to one
    version: int = 0  # counts changes of the length
    reserved: int = 0  # positions that were made writable, until it is truncated

    @property
    def may_be_adapted(self) -> bool:
        """False where it certainly runs without an adapter."""
        return self.adapter is not None or not self.knows_adapter


class TrackedSequences:
    """The live sequences of one executor by id, and the lock around its model.

    The model's `kv_len` decides how long a sequence is; where that is None, appended tokens are counted here. Methods
    are for the holder of the lock, except `held`, `check_open` and `check_ready`.
    """

    def __init__(self, model: DecoderOnlyLLM, device: Device, kv_bytes: int):
        """Begins empty; `device` and `kv_bytes`, of one position in all layers, are what handles report."""
        self.model = model
        self.device = device
        self.kv_bytes = kv_bytes
        self.capacity = check_length(model, "kv_capacity", model.kv_capacity())
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.is_closed = False  # refuses every later caller
        self.unsupported_fallback_calls = 0  # the unified forward is Unsupported, or has no logits
        self.lora_fallback_calls = 0  # a batch with adapters is Unsupported
        self.lacks_unified = False  # the model's unified forward was Unsupported, adapters aside
        self._live: dict[str, TrackedSequence] = {}
        self.is_runner = isinstance(model, ModelRunner)
        self._tells_lengths = overrides(model, "kv_len")  # until it says None of a sequence that has tokens
        self._numbers: _Numbers = {"cache": itertools.count(), "forward": itertools.count()}
        if not self.is_runner:
            with contextlib.suppress(TypeError):  # a model may have no hash
                self._numbers = _NUMBERS.setdefault(model, self._numbers)
        self._num_waits = 0
        self._waited_seconds = 0.0

    @contextlib.contextmanager
    def held(self, asked: float | None = None) -> Iterator[DecoderOnlyLLM]:
        """Holds the lock; CancelledError after `close`. The wait counts from `asked`, `time.perf_counter()` seconds."""
        check_not_forked("executor", self.pid)  # there a thread that does not exist may hold the lock
        asked = time.perf_counter() if asked is None else asked
        with self.lock:
            self._num_waits += 1
            self._waited_seconds += time.perf_counter() - asked
            self.check_open()
            yield self.model

    def check_open(self) -> None:
        """Raises CancelledError after `close`."""
        if self.is_closed:
            raise CancelledError("this executor is shut down")

    def check_ready(self) -> None:
        """As `check_open`, and raises the error of a model that is not Ready."""
        self.check_open()
        if self.state is not ExecutorState.Ready:
            self.model.kv_capacity()

    @property
    def state(self) -> ExecutorState:
        """The model's state; Ready if its attribute is no `ExecutorState`."""
        state = self.model.state
        return state if isinstance(state, ExecutorState) else ExecutorState.Ready

    def release_all(self) -> None:
        """Releases every sequence that was begun here, if the model still can."""
        for cache_id in [cache_id for cache_id, sequence in self._live.items() if not sequence.is_adopted]:
            with contextlib.suppress(Exception):  # of any kind: the model may not be ours
                self.release(cache_id)

    def reset(self) -> None:
        """Resets the model and forgets every sequence; ids are not reused."""
        self.model.reset()
        for sequence in self._live.values():
            sequence.is_adopted = False
        self.release_all()  # a model need not implement `reset`
        self._live.clear()

    def create(self, cache_id: str | None = None, kind: str = "cache") -> TrackedSequence:
        """Begins an empty sequence under the caller's id, or under a new id `llm-<kind>-<number>`."""
        return self.track(TrackedSequence(self._new_id(kind) if cache_id is None else cache_id))

    def track(self, sequence: TrackedSequence) -> TrackedSequence:
        """Counts a sequence as live here."""
        self._live[sequence.cache_id] = sequence
        return sequence

    def find(self, cache_id: str) -> TrackedSequence | None:
        """Returns a live sequence with its length as of now, or None."""
        sequence = self._live.get(cache_id)
        if sequence is None:
            return None
        length = self.model.kv_len(cache_id)
        if length is not None:
            length = check_length(self.model, "kv_len", length)
            sequence.version += sequence.length != length
            if length < sequence.length:  # by direct calls: its reservation is gone, it may be a new sequence
                sequence.reserved, sequence.adapter, sequence.knows_adapter = 0, None, False
            sequence.length, sequence.is_known = length, True
        elif sequence.is_known:  # released by a direct call of the model
            del self._live[cache_id]
            return None
        return sequence

    def refresh(self, sequence: TrackedSequence) -> None:
        """Updates the length of a sequence; one that was released, and perhaps another begun, is refused.

        Raises:
            RequestValidationError: the sequence was released.
        """
        if self.find(sequence.cache_id) is not sequence:
            raise RequestValidationError(f"{sequence.cache_id!r}: the sequence was released, its handles are stale")

    def find_or_adopt(self, cache_id: str) -> TrackedSequence | None:
        """As `find`; for an id that only the model knows, returns a sequence to `track`. None: the id is free.

        Raises:
            RequestValidationError: the id has the form of those that executors make, and is not live here.
        """
        if (sequence := self.find(cache_id)) is not None:
            return sequence
        if _OWN_ID.fullmatch(cache_id):
            raise RequestValidationError(f"{cache_id!r} is no live sequence, and ids of this form are never reused")
        if self._is_free(cache_id):
            return None
        length = check_length(self.model, "kv_len", self.model.kv_len(cache_id))
        return TrackedSequence(cache_id, length, is_known=True, is_adopted=length > 0, knows_adapter=False)

    def advance(self, sequence: TrackedSequence, num_tokens: int) -> None:
        """Counts tokens that the model has appended."""
        sequence.length += num_tokens
        sequence.version += 1
        sequence.is_known = sequence.is_known or self.model.kv_len(sequence.cache_id) is not None
        self._tells_lengths &= sequence.is_known

    def release(self, cache_id: str) -> None:
        """Frees a sequence; an unknown id is no error."""
        self._live.pop(cache_id, None)
        self.model.release(cache_id)

    def forget(self, sequence: TrackedSequence) -> None:
        """Releases a sequence that an undone call had begun.

        If the id is the caller's own and unknown to the model, the model keeps what the caller has bound to the id.
        """
        key, is_its = sequence.cache_id, sequence.adapter is None and not _OWN_ID.fullmatch(sequence.cache_id)
        if is_its and self._tells_lengths and self.model.kv_len(key) is None:
            self._live.pop(key, None)
        else:
            self.release(key)

    def truncate(self, sequence: TrackedSequence, new_len: int) -> None:
        """Rolls a sequence back; a length past its end is no error."""
        if new_len < sequence.length:
            self.model.truncate_kv(sequence.cache_id, new_len)
            sequence.length = new_len
            sequence.reserved = 0
            sequence.version += 1

    def truncate_by_id(self, cache_id: str, new_len: int) -> None:
        """As `truncate`, also for a sequence that only the model knows; an unknown id is no error."""
        sequence = self.find(cache_id)
        if sequence is not None:
            self.truncate(sequence, new_len)
        elif overrides(self.model, "truncate_kv") or (self.model.kv_len(cache_id) or 0) > new_len:
            self.model.truncate_kv(cache_id, new_len)

    def fork(self, sequence: TrackedSequence) -> TrackedSequence:
        """Copies a sequence under a new id; both share blocks until either writes."""
        cache_id = self._new_id("cache")
        self.model.fork(sequence.cache_id, cache_id)
        known = {"is_known": sequence.is_known, "knows_adapter": sequence.knows_adapter}
        return self.track(TrackedSequence(cache_id, sequence.length, sequence.adapter, **known))

    def count(self) -> int:
        """Returns how many sequences are live."""
        return sum(self.find(cache_id) is not None for cache_id in list(self._live))

    def reserve(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation | None:
        """Makes positions writable, all or nothing; an id without a sequence gets an empty one."""
        ids = dict.fromkeys(check_cache_id(request.cache_id) for request in requests)
        found = {cache_id: self.find_or_adopt(cache_id) for cache_id in ids}
        reservation = self.model.reserve_kv_slots(requests)
        if reservation is not None:
            for cache_id, sequence in found.items():
                sequence = self.track(sequence or TrackedSequence(cache_id))
                targets = (request.target_len for request in requests if request.cache_id == cache_id)
                sequence.reserved = max(sequence.reserved, *targets)
        return check_kind(self.model, "reserve_kv_slots", reservation, KvSlotReservation)

    def cache_metrics(self) -> dict[str, Any]:
        """The model's counters, plus the fallbacks counted here and the waits in the queue and for the lock."""
        counters = check_kind(self.model, "cache_metrics_snapshot", self.model.cache_metrics_snapshot(), Mapping) or {}
        own = check_kind(self.model, "cache_metrics_snapshot", counters.get("decode_batch"), Mapping) or {}
        batches = {"schema_version": 1, **own}
        for name in ("unsupported_fallback_calls", "lora_fallback_calls"):
            count = own.get(name)
            told = 0 if count is None else check_length(self.model, "cache_metrics_snapshot", count)
            batches[name] = told + getattr(self, name)
        lock = {
            "schema_version": 1,
            "samples": self._num_waits,
            "total_wait_time_us": int(self._waited_seconds * 1e6),
            "avg_wait_time_ms": self._waited_seconds * 1e3 / self._num_waits if self._num_waits else 0.0,
        }
        return {**counters, "decode_batch": batches, "executor_model_lock": lock}

    def _new_id(self, kind: str) -> str:
        """Returns the next id of a kind that no other caller of the model uses."""
        ids = (f"llm-{kind}-{number}" for number in self._numbers[kind])
        return next(cache_id for cache_id in ids if self._is_free(cache_id))

    def _is_free(self, cache_id: str) -> bool:
        """True of an id that the model does not know; some models say 0 of any such id, where they should say None."""
        length = self.model.kv_len(cache_id)
        return length is None or (length == 0 and self.model.kv_len(f"unknown-{secrets.token_hex(8)}") == 0)


@dataclass(eq=False)
class _Before:
    """A sequence as it was before a call."""

    sequence: TrackedSequence
    length: int | None  # positions; None: the call began it
    adapter: ActiveLoraAdapter | None
    reserved: int = 0
    version: int | None = None  # as the call left it; None while the call runs


class UndoLog:
    """What one call changes, so that a call that fails or is cancelled leaves every sequence as it was.

    A sequence that the call began is released. One that it appended to is truncated, and one that it bound to another
    adapter is bound to its own again; where the model cannot, it is released, too, and its handles are stale.
    """

    def __init__(self, table: TrackedSequences):
        self.table = table
        self._entries: list[_Before] = []
        self._mutex = threading.Lock()
        self._is_sealed = False
        self._is_abandoned = False

    def begin(self, cache_id: str | None = None, kind: str = "cache") -> TrackedSequence:
        """Begins a sequence, as `TrackedSequences.create`."""
        sequence = self.table.create(cache_id, kind)
        self._entries.append(_Before(sequence, None, None))
        return sequence

    def record(self, sequence: TrackedSequence) -> TrackedSequence:
        """Records a sequence before the call changes it."""
        self._entries.append(_Before(sequence, sequence.length, sequence.adapter, sequence.reserved))
        return self.table.track(sequence)

    def seal(self) -> bool:
        """Ends the call: a later `undo` skips sequences that change from now on. True if it was abandoned before."""
        for entry in self._entries:
            entry.version = entry.sequence.version
        with self._mutex:
            self._is_sealed = True
            return self._is_abandoned

    def abandon(self) -> bool:
        """Has a running call undone when it ends; True if it has ended, so that the caller must call `undo`."""
        with self._mutex:
            self._is_abandoned = True
            return self._is_sealed

    def undo(self) -> None:
        """Restores every recorded sequence, once; errors of a failed model are left to its `reset`."""
        with self.table.lock:
            entries, self._entries = self._entries, []
            if self.table.is_closed:  # `close` releases those that were begun here
                entries = [entry for entry in entries if entry.sequence.is_adopted]
            entries = [entry for entry in entries if self._is_untouched(entry)]
            for entry in entries:
                with contextlib.suppress(FerrumError):
                    self._roll_back(entry)
            for entry in entries:
                if entry.length:  # its adapter was only named by another path
                    entry.sequence.adapter = entry.adapter
            rebound = [entry for entry in entries if entry.length == 0 and entry.sequence.knows_adapter]
            rebound = [entry for entry in rebound if entry.sequence.adapter != entry.adapter]
            for entry in rebound:  # all are unbound first, to make room for their former adapters
                self._bind(entry.sequence, None)
            for entry in rebound:
                self._bind(entry.sequence, entry.adapter)

    def _is_untouched(self, entry: _Before) -> bool:
        if entry.version is None:
            return True
        try:
            found = self.table.find(entry.sequence.cache_id)
        except FerrumError:  # of a failed model, whose `reset` drops the sequence; the table must drop it, too
            return True
        return found is entry.sequence and entry.sequence.version == entry.version

    def _roll_back(self, entry: _Before) -> None:
        """Truncates a sequence, or releases it."""
        sequence, length = entry.sequence, entry.length
        if length is None:
            self.table.forget(sequence)
        elif self.table.find(sequence.cache_id) is not None:
            was_extended = sequence.length > length or not sequence.is_known
            try:
                self.table.model.truncate_kv(sequence.cache_id, length)
                sequence.length = min(sequence.length, length)
                if was_extended and entry.reserved > length:  # the truncation has freed the reserved blocks
                    again = KvSlotRequest(cache_id=sequence.cache_id, target_len=entry.reserved)
                    self.table.model.reserve_kv_slots([again])
                if was_extended:
                    sequence.reserved = entry.reserved
            except UnsupportedError:
                if sequence.length != length:
                    self.table.release(sequence.cache_id)

    def _bind(self, sequence: TrackedSequence, adapter: ActiveLoraAdapter | None) -> None:
        """Binds an empty sequence to its adapter, or releases it: it must not run with another."""
        with contextlib.suppress(FerrumError):
            if sequence.adapter == adapter or self.table.find(sequence.cache_id) is None:
                return
            try:
                self.table.model.set_lora_adapter_for_cache(sequence.cache_id, adapter)
                sequence.adapter = adapter
            except FerrumError:
                self.table.release(sequence.cache_id)

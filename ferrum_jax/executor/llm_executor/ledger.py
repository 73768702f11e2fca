"""An executor's account of its sequences: their ids, their lengths, and one caller at a time."""

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ferrum_jax.contract.checks import checked_id
from ferrum_jax.contract.errors import CancelledError, FerrumError, RequestValidationError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.slots import ActiveLoraAdapter, KvSlotRequest, KvSlotReservation

_OWN_ID = re.compile(r"llm-(cache|forward)-\d+")


@dataclass
class TrackedSequence:
    """One sequence of the model, as its executor knows it."""

    cache_id: str
    length: int = 0  # positions
    is_told: bool = False  # the model itself has told this length
    adapter: ActiveLoraAdapter | None = None
    moves: int = 0  # times its length was changed here


class Ledger:
    """Owns the ids of one executor and the lock around its model.

    The model's `kv_len` decides how long a sequence is; where it tells nothing, what was appended is counted here. All
    methods but `held` and those that say so are for the holder of the lock.
    """

    def __init__(self, model: DecoderOnlyLLM):
        self.model = model
        self.capacity = model.kv_capacity()
        self.lock = threading.RLock()
        self._live: dict[str, TrackedSequence] = {}
        self._cache_numbers = itertools.count()
        self._forward_numbers = itertools.count()
        self.num_fallbacks = 0  # batches that the model could not take in one forward
        self._is_closed = False
        self._waits = 0
        self._waited_seconds = 0.0

    @contextlib.contextmanager
    def held(self, asked: float | None = None) -> Iterator[DecoderOnlyLLM]:
        """Lets one caller at a time to the model, and none after `close`.

        Args:
            asked: since when the caller waits, in seconds of `time.perf_counter()`; now if None.
        """
        asked = time.perf_counter() if asked is None else asked
        with self.lock:
            self._waits += 1
            self._waited_seconds += time.perf_counter() - asked
            self.refuse_closed()
            yield self.model

    @property
    def is_closed(self) -> bool:
        """True once the executor shuts down."""
        return self._is_closed

    def refuse_closed(self) -> None:
        """Raises once the executor shuts down. Needs no lock."""
        if self._is_closed:
            raise CancelledError("this executor is shut down")

    def refuse_failed(self) -> None:
        """As `refuse_closed`, and raises what a model says that is not ready itself. Needs no lock."""
        self.refuse_closed()
        if self.model.state is not ExecutorState.Ready:
            self.model.kv_capacity()

    def close(self) -> None:
        """Lets no further caller in; whoever holds the model finishes. Needs no lock."""
        self._is_closed = True

    def drop_all(self) -> None:
        """Releases every sequence, as far as the model still can."""
        for cache_id in list(self._live):
            with contextlib.suppress(FerrumError):
                self.release(cache_id)

    def create(self, cache_id: str | None = None) -> TrackedSequence:
        """Begins an empty sequence under a new id, or under one that a caller chose."""
        live = TrackedSequence(self._new_id("cache", self._cache_numbers) if cache_id is None else cache_id)
        self._live[live.cache_id] = live
        return live

    def create_passing(self) -> TrackedSequence:
        """Begins a sequence that its call releases before it ends."""
        return self.create(self._new_id("forward", self._forward_numbers))

    def find(self, cache_id: str) -> TrackedSequence | None:
        """Gives a sequence with its length as of now, or None if it is not alive here."""
        live = self._live.get(cache_id)
        if live is None:
            return None
        told = self.model.kv_len(cache_id)
        if told is not None:
            live.length, live.is_told = told, True
        elif live.is_told:  # released behind our back
            del self._live[cache_id]
            return None
        return live

    def find_or_refuse(self, cache_id: str) -> TrackedSequence:
        """As `find`, raising for a sequence that is gone."""
        live = self.find(cache_id)
        if live is None:
            raise RequestValidationError(f"{cache_id!r}: the sequence was released, its handles are stale")
        return live

    def refuse_name(self, cache_id: str) -> None:
        """Raises for an id that no sequence of this executor can begin under."""
        if _OWN_ID.fullmatch(cache_id):
            raise RequestValidationError(f"{cache_id!r} is no live sequence, and ids of this form are never reused")
        if self.model.kv_len(cache_id) is not None:
            raise RequestValidationError(f"{cache_id!r} is a sequence of the model that this executor did not begin")

    def advance(self, live: TrackedSequence, num_tokens: int) -> None:
        """Counts tokens that the model has appended."""
        live.length += num_tokens
        live.moves += 1
        live.is_told = live.is_told or self.model.kv_len(live.cache_id) is not None

    def release(self, cache_id: str) -> None:
        """Frees a sequence; an id that the model does not know is no error."""
        self._live.pop(cache_id, None)
        self.model.release(cache_id)

    def truncate(self, live: TrackedSequence, new_len: int) -> None:
        """Rolls a sequence back; a length past its end is no error."""
        if new_len < live.length:
            self.model.truncate_kv(live.cache_id, new_len)
            live.length = new_len
            live.moves += 1

    def fork(self, live: TrackedSequence) -> TrackedSequence:
        """Makes a copy under a new id that shares blocks until either writes."""
        cache_id = self._new_id("cache", self._cache_numbers)
        self.model.fork(live.cache_id, cache_id)
        fork = TrackedSequence(cache_id, live.length, adapter=live.adapter)
        self._live[cache_id] = fork
        return fork

    def count(self) -> int:
        """Sequences that are alive."""
        return sum(self.find(cache_id) is not None for cache_id in list(self._live))

    def reserve(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation | None:
        """Makes positions writable, all or nothing; an id without a sequence gets an empty one."""
        new = {request.cache_id for request in requests if self.find(checked_id(request.cache_id)) is None}
        for cache_id in new:
            self.refuse_name(cache_id)
        reservation = self.model.reserve_kv_slots(requests)
        if reservation is not None:
            for cache_id in new:
                self.create(cache_id)
        return reservation

    def cache_metrics(self) -> dict[str, Any]:
        """The model's counters, the fallbacks counted here, and how long calls waited, in the queue or at the lock."""
        told = dict(self.model.cache_metrics_snapshot() or {})
        batches = {"schema_version": 1, "unsupported_fallback_calls": 0, **told.get("decode_batch", {})}
        batches["unsupported_fallback_calls"] += self.num_fallbacks
        lock = {
            "schema_version": 1,
            "samples": self._waits,
            "total_wait_time_us": int(self._waited_seconds * 1e6),
            "avg_wait_time_ms": self._waited_seconds * 1e3 / self._waits if self._waits else 0.0,
        }
        return {**told, "decode_batch": batches, "executor_model_lock": lock}

    def _new_id(self, kind: str, numbers: Iterator[int]) -> str:
        """Gives the next id; one that the model knows from another caller is passed over."""
        return next(cache_id for number in numbers if self.model.kv_len(cache_id := f"llm-{kind}-{number}") is None)

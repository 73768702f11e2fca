"""How the sequences of one call stood before it, so that the call can be taken back."""

import contextlib

from ferrum_jax.contract.errors import FerrumError, UnsupportedError
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.ledger import Ledger, TrackedSequence


class Savepoint:
    """Puts sequences back to where they were when they were noted.

    A sequence that the call began is released. One that it appended to is truncated; where the model cannot truncate,
    it is released as well, and its handles are stale.
    """

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self._begun: list[TrackedSequence] = []
        self._noted: list[tuple[TrackedSequence, int, ActiveLoraAdapter | None]] = []
        self._left: dict[str, tuple[int, int]] = {}  # lengths and moves, by cache id, as the call left them

    def begin(self, cache_id: str | None = None) -> TrackedSequence:
        """Begins a sequence that a roll back releases."""
        live = self.ledger.create(cache_id)
        self._begun.append(live)
        return live

    def begin_passing(self) -> TrackedSequence:
        """Begins a sequence that the call itself releases, by rolling back."""
        live = self.ledger.create_passing()
        self._begun.append(live)
        return live

    def note(self, live: TrackedSequence) -> None:
        """Remembers the length and the adapter of a sequence."""
        self._noted.append((live, live.length, live.adapter))

    def settle(self) -> None:
        """Remembers how the call left every sequence."""
        touched = [*self._begun, *(live for live, *_ in self._noted)]
        self._left = {live.cache_id: (live.length, live.moves) for live in touched}

    def take_back(self) -> None:
        """Rolls a call back that had succeeded, but for sequences that have moved on since: those are others' now."""
        with self.ledger.lock:
            if self.ledger.is_closed:
                return
            self._begun = [live for live in self._begun if self._is_as_left(live)]
            self._noted = [noted for noted in self._noted if self._is_as_left(noted[0])]
            self.roll_back()

    def roll_back(self) -> None:
        """Puts everything back, once; what a failed model refuses is left to its `reset`."""
        with self.ledger.lock:
            begun, self._begun = self._begun, []
            noted, self._noted = self._noted, []
            if self.ledger.is_closed:
                return  # everything is being dropped
            for live in begun:
                with contextlib.suppress(FerrumError):
                    self.ledger.release(live.cache_id)
            for live, length, adapter in noted:
                with contextlib.suppress(FerrumError):
                    self._put_back(live.cache_id, length, adapter)

    def _is_as_left(self, live: TrackedSequence) -> bool:
        try:
            found = self.ledger.find(live.cache_id)
        except FerrumError:  # of a model that has failed; its `reset` drops the sequence, the ledger must, too
            return True
        return found is live and (live.length, live.moves) == self._left.get(live.cache_id)

    def _put_back(self, cache_id: str, length: int, adapter: ActiveLoraAdapter | None) -> None:
        live = self.ledger.find(cache_id)
        if live is None:
            return
        try:
            self.ledger.model.truncate_kv(cache_id, length)
            live.length = min(live.length, length)
        except UnsupportedError:
            if live.length != length:
                self.ledger.release(cache_id)
                return
        if live.adapter != adapter:
            self.ledger.model.set_lora_adapter_for_cache(cache_id, adapter)
            live.adapter = adapter

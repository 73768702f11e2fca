"""How the sequences of one call stood before it, so that the call can be taken back."""

import contextlib

from ferrum_jax.contract.errors import FerrumError, UnsupportedError
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.llm_executor.ledger import Ledger, TrackedSequence


class Savepoint:
    """Puts sequences back to where they were when they were noted.

    A sequence that the call began is released. One that it appended to is truncated, and one that it bound to another
    adapter gets its own back; where the model cannot, it is released as well, and its handles are stale.
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
            kept = [(live, adapter) for live, length, adapter in noted if self._cut(live, length)]
            changed = [(live, adapter) for live, adapter in kept if live.adapter != adapter]
            for live, _ in changed:  # all of them first, so that each finds room for the adapter it had
                self._bind(live, None)
            for live, adapter in changed:
                if live.adapter != adapter:
                    self._bind(live, adapter)

    def _is_as_left(self, live: TrackedSequence) -> bool:
        try:
            found = self.ledger.find(live.cache_id)
        except FerrumError:  # of a model that has failed; its `reset` drops the sequence, the ledger must, too
            return True
        return found is live and (live.length, live.moves) == self._left.get(live.cache_id)

    def _cut(self, live: TrackedSequence, length: int) -> bool:
        """Truncates a sequence, or releases it; false of one that is gone."""
        with contextlib.suppress(FerrumError):
            if self.ledger.find(live.cache_id) is None:
                return False
            try:
                self.ledger.model.truncate_kv(live.cache_id, length)
                live.length = min(live.length, length)
            except UnsupportedError:
                if live.length != length:
                    self.ledger.release(live.cache_id)
                    return False
        return True

    def _bind(self, live: TrackedSequence, adapter: ActiveLoraAdapter | None) -> None:
        """Gives an empty sequence its adapter back, or releases it: it must not answer as another."""
        with contextlib.suppress(FerrumError):
            if self.ledger.find(live.cache_id) is None:
                return
            try:
                self.ledger.model.set_lora_adapter_for_cache(live.cache_id, adapter)
                live.adapter = adapter
            except FerrumError:
                self.ledger.release(live.cache_id)

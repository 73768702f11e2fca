"""`Shortage`: which replicas of a model ran short of slots or blocks."""

from collections.abc import Iterable

from ferrum_jax.contract.errors import ResourceExhaustedError
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor.replicas import ReplicatedRunner
from ferrum_jax.generate.request import Request


class Shortage:
    """Replicas that take no more requests until one of theirs ends; always empty for a model without replicas."""

    def __init__(self, model: DecoderOnlyLLM):
        self._model = model if isinstance(model, ReplicatedRunner) else None
        self._short: set[int | None] = set()

    def add(self, replica: int | None) -> None:
        """Records that a replica ran short."""
        self._short.add(replica)

    def clear(self) -> None:
        """Forgets every shortage."""
        self._short.clear()

    def is_at(self, request: Request) -> bool:
        """Whether a request is on a replica that ran short."""
        return self._model is not None and self._model.replica_of(request.cache_id) in self._short

    def competes(self, request: Request, problem: ResourceExhaustedError) -> bool:
        """Whether a request uses the KV that is short: that of the replica named by the error, if there are several."""
        if problem.replica is None or self._model is None:
            return True
        return request.cache_id in problem.cache_ids or self._model.replica_of(request.cache_id) == problem.replica

    def ends(self, request: Request) -> None:
        """Records that a request leaves its replica, which may then take requests again."""
        if self._model is not None:
            self._short.discard(self._model.replica_of(request.cache_id))

    def reopen(self, running: Iterable[Request]) -> None:
        """Lets replicas without running requests take requests again, as none could end there."""
        if self._short and self._model is not None:
            homes = {self._model.replica_of(one.cache_id) for one in running}
            if None not in homes:  # a request without a replica may be placed on one of these
                self._short &= homes

    def leaves_room(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether a request may join the running ones, on a replica that did not run short."""
        running = list(running)
        if self._model is None or not running:
            return True
        joining = [one for one in running if self._model.replica_of(one.cache_id) is None]  # has no blocks yet
        return self._model.keep_from(self._short, [len(one.tokens) for one in (*joining, request)])

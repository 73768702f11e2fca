"""`Shortage`: which replicas of a model ran short of slots or blocks."""

from collections.abc import Iterable

from ferrum_jax.contract.errors import ResourceExhaustedError
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor.replicas import ReplicatedRunner
from ferrum_jax.generate.request import Request


class Shortage:
    """Replicas that take no more requests until one of theirs ends; of a model without replicas there are none."""

    def __init__(self, model: DecoderOnlyLLM):
        self._model = model if isinstance(model, ReplicatedRunner) else None
        self._short: set[int | None] = set()

    def add(self, replica: int | None) -> None:
        """Takes note of a replica that ran short."""
        self._short.add(replica)

    def clear(self) -> None:
        """Forgets all of them."""
        self._short.clear()

    def is_at(self, request: Request) -> bool:
        """Whether a request is on a replica that ran short."""
        return self._model is not None and self._model.replica_of(request.cache_id) in self._short

    def competes(self, request: Request, problem: ResourceExhaustedError) -> bool:
        """Whether a request wants of the KV what is short: of several replicas, what is on the same one."""
        if problem.replica is None or self._model is None:
            return True
        return request.cache_id in problem.cache_ids or self._model.replica_of(request.cache_id) == problem.replica

    def ends(self, request: Request) -> None:
        """Takes note of a request that leaves its replica."""
        if self._model is not None:
            self._short.discard(self._model.replica_of(request.cache_id))

    def reopen(self, running: Iterable[Request]) -> None:
        """Lets replicas take requests again on which none is running that could end."""
        if self._short and self._model is not None:
            homes = {self._model.replica_of(one.cache_id) for one in running}
            if None not in homes:  # what is on no replica yet may be going to one of these
                self._short &= homes

    def leaves_room(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether a request may join those that run, on a replica that did not run short."""
        running = list(running)
        if self._model is None or not running:
            return True
        joining = [one for one in running if self._model.replica_of(one.cache_id) is None]  # has no blocks yet
        return self._model.keep_from(self._short, [len(one.tokens) for one in (*joining, request)])

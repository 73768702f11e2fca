"""Data parallel: several replicas of a model, each with a KV of its own, behind one runner.

A sequence stays on one replica: of those with room, the one that knows most of its prompt's prefix, or else has most
free blocks. Replicas work at the same time: up to two steps of a batch on each are begun before one is read.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import jax

from ferrum_jax.contract.checks import check_cache_id, check_flag, check_int, check_items
from ferrum_jax.contract.decoding import DecodedRun, DecodeRun
from ferrum_jax.contract.errors import ResourceExhaustedError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.contract.slots import ActiveLoraAdapter, KvSlotRequest, KvSlotReservation
from ferrum_jax.executor import multi_step, reservations
from ferrum_jax.executor.counters import DecodeBatchCounters
from ferrum_jax.executor.lifecycle import Lifecycle
from ferrum_jax.executor.pipeline import Pipeline
from ferrum_jax.executor.router import NOTHING, ReplicaRouter
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.sharding.mesh import Placement

T = TypeVar("T")


class ReplicatedRunner(ModelRunner):
    """A `ModelRunner` whose sequences are spread over replicas of one model.

    Sizes are those of one replica, except `plan.max_seqs` and counts of blocks, which are sums. A sequence never moves
    to another replica; a fork stays on its original's.
    """

    def __init__(self, replicas: Sequence[ModelRunner]):
        """Takes runners of the same model and sizes; `close` closes them, too."""
        first = replicas[0]
        self.replicas = list(replicas)
        self.placed, self.device, self.name = first.placed, first.device, first.name
        self.model_config, self.artifacts = first.model_config, first.artifacts
        self.plan = replace(first.plan, max_seqs=sum(replica.plan.max_seqs for replica in replicas))
        self.params_version = 0
        self._life = Lifecycle("runner", lambda: any(replica._device.is_lost for replica in self.replicas))
        self._router = ReplicaRouter(replicas, self._life)
        self._pipeline: Any = self._router
        self._decode_batches = DecodeBatchCounters()
        self._vocab_size = first.model_config.vocab_size

    @property
    def num_replicas(self) -> int:
        """Replicas that work at the same time."""
        return len(self.replicas)

    def replica_of(self, cache_id: str) -> int | None:
        """Index of the replica that holds an id; None if none does."""
        return self._router.homes.get(cache_id)

    def keep_from(self, short: Collection[int | None], positions: Sequence[int]) -> bool:
        """Places new sequences on the `short` replicas only while the others have no room.

        Returns True if the others have room for sequences of so many `positions`: each takes a slot and its blocks on
        the replica with most free blocks, and leaves one more block free there, unless it is at full length.
        """
        with self._life.lock, self._life:
            self._router.short = frozenset(short)
            tables = [one._pipeline.table for at, one in enumerate(self.replicas) if at not in short]
            left = [[one.pool.num_free, len(one.free_slots)] for one in tables if one.free_slots]
            table = self.replicas[0]._pipeline.table
            most = table.num_blocks(table.longest)
            for needed in map(table.num_blocks, positions):
                if not left or max(left)[0] < max(needed, min(needed + 1, most)):
                    return False
                best = max(left)
                best[0] -= needed
                best[1] -= 1
                left = [one for one in left if one[1]]
            return True

    @property
    def params(self) -> ParamTree:
        """The parameters of the first replica, in the form of their layout."""
        return self.replicas[0].params

    def decode_n(self, runs: Sequence[DecodeRun], *, until_one_ends: bool = False) -> list[DecodedRun]:
        """As `ModelRunner.decode_n`, on all replicas at once; `until_one_ends` stops only runs on the same replica.

        If the device of one replica fails, the other replicas' tokens are lost, too: the state is Error until `reset`.
        """
        with self._life.lock, self._life:
            check_flag("until_one_ends", until_one_ends)
            checked = check_items("runs", runs, DecodeRun)
            index_of = [self.replica_of(check_cache_id(run.cache_id)) or 0 for run in checked]
            self._router.check_params_live()
            calls = []
            for index in dict.fromkeys(index_of):
                rows = [at for at, own in enumerate(index_of) if own == index]
                with self._router.on(index) as replica:
                    own = [checked[at] for at in rows]
                    call = multi_step.plan(replica._pipeline, own, until_one_ends=until_one_ends)
                calls.append((index, rows, call))
            found: list[Any] = [None] * len(checked)
            with self._router.changing(index for index, _, _ in calls):
                for (_, rows, _), answers in zip(
                    calls, self._at_once([(one, call) for one, _, call in calls]), strict=True
                ):
                    for row, answer in zip(rows, answers, strict=True):
                        found[row] = answer
            return found

    def _at_once(self, calls: Sequence[tuple[int, Callable[[], T]]]) -> list[T]:
        """Runs calls on their replicas at the same time."""

        def run(index: int, call: Callable[[], T]) -> T:
            with self._router.on(index):
                return call()

        if len(calls) < 2:
            return [run(*one) for one in calls]
        with ThreadPoolExecutor(len(calls), thread_name_prefix="replica") as pool:
            return list(pool.map(lambda one: run(*one), calls))

    def release(self, cache_id: str) -> None:
        """Frees the sequence's slot and blocks; an unknown id is no error."""
        with self._life.lock, self._life:
            for replica in self._router.owners(check_cache_id(cache_id)):
                replica.release(cache_id)
            self._router.forget(cache_id)

    def fork(self, cache_id: str, new_cache_id: str) -> None:
        """Makes `new_cache_id` a copy of a live sequence, on the same replica; raises as `ModelRunner.fork`."""
        with self._life.lock, self._life:
            old, new = check_cache_id(cache_id), check_cache_id(new_cache_id)
            home = self._router.homes.get(old, 0)
            if (other := self._router.homes.get(new)) not in (None, home):
                home = other  # the old id is unknown there, so that the fork is refused
            try:
                with self._router.on(home) as replica:
                    replica.fork(old, new)
            finally:  # after an interrupt, too: a live id without a replica could not be released
                self._router.settle_live({new: home})

    def reset(self) -> None:
        """Drops every sequence and prefix of all replicas; raises as `ModelRunner.reset`."""
        with self._life.lock:
            self._life.check_not_closed()
            for replica in self.replicas:
                replica.reset()
            self._router.clear()
            self._life.state, self._life.paused = ExecutorState.Ready, ""

    def prepare(self, cache_id: str, max_tokens: int) -> None:
        """Takes a slot, and compiles the programs that a prompt of at most `max_tokens` tokens and decoding need."""
        with self._life.lock, self._life:
            key, count = check_cache_id(cache_id), check_int("max_tokens", max_tokens, 1)
            homes = self._router.place([(key, NOTHING)], [count])
            try:
                with self._router.on(homes[key]) as replica:
                    replica.prepare(key, count)
            finally:
                self._router.settle_live(homes)

    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        """As `ModelRunner.reserve_kv_slots`, all or nothing over all replicas."""
        with self._life.lock, self._life:
            checked = check_items("requests", requests, KvSlotRequest)
            targets: dict[str, int] = {}
            for one in checked:
                key, most = check_cache_id(one.cache_id), max(one.target_len, one.admission_target_len or 0)
                targets[key] = max(targets.get(key, 0), most)
            homes = self._router.place([(key, NOTHING) for key in targets], list(targets.values()))
            planned = []
            for index in dict.fromkeys(homes.values()):
                own = [one for one in checked if homes[one.cache_id] == index]
                with self._router.on(index) as replica:
                    planned.append((index, reservations.plan(replica._pipeline, own)))
            before = self.kv_slot_capacity_snapshot()
            try:
                with self._router.changing(index for index, _ in planned):
                    found = [call for index, plan in planned for call in self._at_once([(index, plan)])]
            finally:
                self._router.settle_live(homes)
            by_id = {one.cache_id: one for part in found for one in part.allocations}
            return KvSlotReservation(
                block_size=before.block_size,
                total_blocks=before.total_blocks,
                free_blocks_before=before.free_blocks,
                free_blocks_after=self.kv_slot_capacity_snapshot().free_blocks,
                allocations=tuple(by_id[key] for key in targets),
            )

    def set_interventions(
        self, cache_id: str, interventions: Mapping[Any, Any] | None, *, start: int = 0, stop: int | None = None
    ) -> None:
        """As `ModelRunner.set_interventions`; an id that no replica holds or binds yet is placed on one."""

        def bind(one: ModelRunner) -> None:
            one.set_interventions(cache_id, interventions, start=start, stop=stop)

        self._bind(cache_id, bind, places=True)  # it shares no prefix: its tokens do not decide where it goes

    def set_lora_adapter_for_cache(self, cache_id: str, adapter: ActiveLoraAdapter | None) -> None:
        """As `ModelRunner.set_lora_adapter_for_cache`.

        An id that no replica holds yet is bound on every replica, until it is placed on one.
        """
        self._bind(cache_id, lambda one: one.set_lora_adapter_for_cache(cache_id, adapter))

    def _bind(self, cache_id: str, bind: Callable[[ModelRunner], None], *, places: bool = False) -> None:
        """Binds an id on its replica.

        An id that no replica holds or binds yet is placed on one if `places`, else bound on all: it is then `unplaced`
        while it is bound.
        """
        with self._life.lock, self._life:
            key, router = check_cache_id(cache_id), self._router
            if places and not router.owners(key):
                router.homes[key] = router.roomiest()
            is_placed = key in router.homes
            owners = router.owners(key) if is_placed else self.replicas
            before = [(one._adapters.of(key), one._pipeline.interventions.of(key)) for one in owners]
            try:
                for replica in owners:
                    bind(replica)
            except BaseException:  # an interrupt, too: the id would be bound on some replicas and run on others
                for replica, (adapter, edits) in zip(owners, before, strict=True):
                    replica._adapters.bind(key, adapter)
                    replica._pipeline.interventions.restore(key, edits)
                raise
            finally:
                first = owners[0]
                is_bound = first._adapters.of(key) is not None or first._pipeline.interventions.of(key) is not None
                if not is_placed:
                    (router.unplaced.add if is_bound else router.unplaced.discard)(key)
                elif not is_bound and key not in first._pipeline.table.live:
                    router.forget(key)

    def _checked_params(self, params: ParamTree) -> list[ParamTree]:
        first, *others = self.replicas
        checked = [first._device.check_params(params)]
        if first.placed.division is None and not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(params)):
            params = checked[0]  # whole, so that they are joined once
        return checked + [self._copied(params, replica) for replica in others]

    def _copied(self, params: ParamTree, replica: ModelRunner) -> ParamTree:
        try:
            return replica._device.check_params(params)  # moves them to its devices
        except jax.errors.JaxRuntimeError as problem:
            raise ResourceExhaustedError(f"these weights cannot be copied to {replica.device}: {problem}") from problem

    def compile_stats(self) -> dict[str, Any]:
        """Sums the counts of `ModelRunner.compile_stats`; the name of each step ends in its replica's number."""
        with self._life.lock, self._life:
            each = [replica.compile_stats() for replica in self.replicas]
            found = {name: sum(stats[name] for stats in each) for name in each[0] if name != "steps"}
            steps = {
                f"{name}, replica {at}": one for at, stats in enumerate(each) for name, one in stats["steps"].items()
            }
            return found | {"steps": steps}

    def close(self) -> None:
        """Closes all replicas; closing twice is no error, a later call is a CancelledError."""
        with self._life.lock:
            self._life.state = ExecutorState.Shutdown
            for replica in self.replicas:
                replica.close()

    @property
    def _pipelines(self) -> list[Pipeline]:
        return [replica._pipeline for replica in self.replicas]

    def _holder(self, cache_id: str) -> ModelRunner:
        return self.replicas[self.replica_of(cache_id) or 0]


def replicate(
    first: ModelRunner,
    params: ParamTree,
    placements: Sequence[Placement],
    make: Callable[[ModelPlacement, ParamTree], ModelRunner],
) -> ModelRunner:
    """Returns `first`, or a `ReplicatedRunner` of it and of the copies that `make` builds on the other placements."""
    runners = [first]
    try:
        for placement in placements[1:]:
            placed = ModelPlacement.of(first.model_config, placement)
            runners.append(make(placed, placed.copied(params)))
    except BaseException:
        for runner in runners:
            runner.close()
        raise
    return first if len(runners) == 1 else ReplicatedRunner(runners)

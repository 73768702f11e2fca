"""Threads, tasks and an engine on one runner, cancelled at random: no wrong logit, no deadlock, nothing leaked."""

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
import psutil
import pytest

from ferrum_jax import LLM, AsyncLLM, LlmExecutor
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import ADAPTER_NAMES, REUSING, Oracle, late_compiles, make_runner, poison
from tests.executor.engine_storm import CallerClient, ListenerClient
from tests.executor.storm import TaskClient, ThreadClient
from tests.executor.streams import Client, Truth
from tests.long import SECONDS, SEED

PATIENCE = 60  # seconds that the last calls may take
Oracles = dict[str | None, Oracle]


@pytest.fixture(scope="module")
def crowded(params: ParamTree) -> Iterator[ModelRunner]:
    """A warm runner that reuses prefixes, with fewer slots than callers and room for two of three adapters."""
    with make_runner(params, replace(REUSING, max_seqs=12, kv_blocks=40)) as runner:
        runner.warmup()
        poison(runner)
        yield runner


@dataclass
class Storm:
    """All callers at once, for some seconds or until they have made so many calls."""

    threads: Sequence[ThreadClient | CallerClient]
    tasks: Sequence[TaskClient | ListenerClient]
    seconds: float
    calls: float

    def blow(self) -> list[int]:
        """Runs everybody and returns the resident bytes over that time; fails if anybody hangs."""
        self._over = threading.Event()
        runs = {client.name: self._until_over(client) for client in self.threads}
        runs["tasks"] = lambda: asyncio.run(self._all_tasks())
        workers = [threading.Thread(target=self._ending_all(run), name=name, daemon=True) for name, run in runs.items()]
        for worker in workers:
            worker.start()
        resident, end = [], time.monotonic() + self.seconds
        while time.monotonic() < end and self._calls() < self.calls and not self._over.wait(min(1, self.seconds / 100)):
            resident.append(psutil.Process().memory_info().rss)
        self._over.set()
        give_up = time.monotonic() + PATIENCE
        for worker in workers:
            worker.join(max(0.0, give_up - time.monotonic()))
        frames = sys._current_frames()
        hanging = [worker for worker in workers if worker.is_alive()]
        stacks = [f"{one.name}:\n{''.join(traceback.format_stack(frames[one.ident or 0]))}" for one in hanging]
        assert not hanging, "\n".join(stacks)
        return resident

    def _calls(self) -> int:
        return sum(client.counts["calls"] for client in (*self.threads, *self.tasks))

    def _until_over(self, client: ThreadClient | CallerClient) -> Callable[[], None]:
        def run() -> None:
            while not self._over.is_set():
                client.step()
            client.release_all()

        return run

    def _ending_all(self, run: Callable[[], None]) -> Callable[[], None]:
        """A failure of one, which pytest reports, ends the storm."""

        def guarded() -> None:
            try:
                run()
            finally:
                self._over.set()

        return guarded

    async def _all_tasks(self) -> None:
        async def run(client: TaskClient | ListenerClient) -> None:
            while not self._over.is_set():
                await client.step()
            client.release_all()

        async with asyncio.TaskGroup() as group:
            for client in self.tasks:
                group.create_task(run(client))


@dataclass(frozen=True)
class Crowd:
    """How many there are of each kind."""

    threads: int
    tasks: int
    callers: int
    listeners: int


def _blow(
    runner: ModelRunner,
    oracles: Oracles,
    folders: dict[str, str],
    crowd: Crowd,
    *,
    seconds: float,
    calls: float = float("inf"),
) -> tuple[float, Counter[str]]:
    """Runs a storm; returns by which share the resident memory grew after its first fifth, and the counts."""
    print(f"seed {SEED}")
    truth, executor = Truth(oracles), LlmExecutor(runner)
    llm = LLM.from_model(runner, max_rows=runner.plan.max_seqs, chunk_tokens=runner.plan.buckets.max_step_tokens)
    common = truth, folders
    threads = [ThreadClient(runner, *common, f"thread {at}", SEED) for at in range(crowd.threads)]
    tasks = [TaskClient(executor, *common, f"task {at}", SEED) for at in range(crowd.tasks)]
    callers = [CallerClient(llm, *common, f"caller {at}", SEED) for at in range(crowd.callers)]
    listeners = [ListenerClient(AsyncLLM(llm), *common, f"listener {at}", SEED) for at in range(crowd.listeners)]
    gc.collect()
    before = len(jax.live_arrays()), runner.kv_slot_capacity_snapshot()
    late = late_compiles(runner)
    assert before[1].free_blocks == before[1].total_blocks
    resident = Storm([*threads, *callers], [*tasks, *listeners], seconds, calls).blow()

    llm.engine.settle()
    assert not llm.engine.scheduler.has_work
    llm.engine.close()
    assert executor.status().current_batch_size == 0
    assert executor._table._live == {}
    asyncio.run(executor.shutdown())
    for name in ADAPTER_NAMES:
        if name in runner._adapters.loaded:
            runner.unload_lora(name)
    table = runner._pipeline.table
    assert table.live == {}
    assert sorted(table.free_slots) == list(range(runner.plan.max_seqs))
    assert not any(table.pool.num_holders(block) for block in range(table.pool.num_blocks))
    assert runner.lora_metrics_snapshot()["active_cache_bindings"] == 0
    assert late_compiles(runner) == late
    gc.collect()
    assert (len(jax.live_arrays()), runner.kv_slot_capacity_snapshot()) == before
    clients: list[Client] = [*threads, *tasks, *callers, *listeners]
    counts = sum((client.counts for client in clients), Counter[str]())
    fifth, few = len(resident) // 5, max(1, len(resident) // 20)
    return float(np.median(resident[-few:]) / np.median(resident[fifth : fifth + few])) - 1, counts


def test_a_crowd_gets_the_logits_of_the_cache_free_forward_and_leaves_nothing_behind(
    reusing: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str]
):
    crowd = Crowd(threads=4, tasks=12, callers=2, listeners=4)
    _, counts = _blow(reusing, oracles, adapter_folders, crowd, seconds=PATIENCE, calls=1500)
    for kind in ("cancelled", "refused", "decoded at once", "generations"):
        assert counts[kind], kind


@pytest.mark.slow
def test_a_crowd_of_minutes_does_and_its_memory_does_not_grow(
    crowded: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str]
):
    crowd = Crowd(threads=8, tasks=50, callers=4, listeners=8)
    growth, counts = _blow(crowded, oracles, adapter_folders, crowd, seconds=SECONDS)
    print(f"seed {SEED}, {SECONDS:g} s: {dict(counts)}, memory grew by {growth:.2%}")
    for kind in ("interrupted", "listens", "leaves", "cancelled", "aborted", "decoded at once"):
        assert counts[kind], kind
    assert growth < 0.01

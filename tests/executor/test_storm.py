"""Eight threads and fifty tasks on one runner, cancelled at random: no wrong logit, no deadlock, nothing leaked."""

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

from ferrum_jax import LlmExecutor
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import ADAPTER_NAMES, ENGINE, Oracle, make_runner, poison
from tests.executor.storm import TaskClient, ThreadClient
from tests.executor.streams import Client, Truth
from tests.long import SECONDS, SEED

THREADS, TASKS = 8, 50
SLOTS, BLOCKS = 12, 40
PATIENCE = 60  # seconds that the last calls may take
Oracles = dict[str | None, Oracle]


@pytest.fixture(scope="module")
def crowded(params: ParamTree) -> Iterator[ModelRunner]:
    """A warm runner that reuses prefixes, with fewer slots than callers and room for two of three adapters."""
    engine = replace(
        ENGINE, max_seqs=SLOTS, kv_blocks=BLOCKS, prefix_cache=True, max_loras=2, max_lora_rank=4,
        decode_rows=(4,), query_blocks=(1, 3), verify_blocks=(2,), multi_step_tokens=4,
    )  # fmt: skip
    with make_runner(params, engine) as runner:
        runner.warmup()
        poison(runner)
        yield runner


@dataclass
class Storm:
    """All callers at once, for some seconds."""

    runner: ModelRunner
    executor: LlmExecutor
    threads: Sequence[ThreadClient]
    tasks: Sequence[TaskClient]
    seconds: float

    def blow(self) -> list[int]:
        """Runs everybody and gives the resident bytes over that time; fails if anybody hangs."""
        self._over = threading.Event()
        runs = {client.name: self._until_over(client) for client in self.threads}
        runs["tasks"] = lambda: asyncio.run(self._all_tasks())
        workers = [threading.Thread(target=self._ending_all(run), name=name, daemon=True) for name, run in runs.items()]
        for worker in workers:
            worker.start()
        resident = []
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and not self._over.wait(self.seconds / 100):
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

    def _until_over(self, client: ThreadClient) -> Callable[[], None]:
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
        async def run(client: TaskClient) -> None:
            while not self._over.is_set():
                await client.step()
            client.release_all()

        async with asyncio.TaskGroup() as group:
            for client in self.tasks:
                group.create_task(run(client))


def _blow(runner: ModelRunner, oracles: Oracles, folders: dict[str, str], seconds: float) -> tuple[float, Counter[str]]:
    """Runs a storm; gives by which share the resident memory grew after its first fifth, and the counts."""
    truth, executor = Truth(oracles), LlmExecutor(runner)
    threads = [ThreadClient(runner, truth, folders, f"thread {at}", SEED) for at in range(THREADS)]
    tasks = [TaskClient(executor, truth, folders, f"task {at}", SEED) for at in range(TASKS)]
    gc.collect()
    before = len(jax.live_arrays()), runner.kv_slot_capacity_snapshot()
    assert before[1].free_blocks == BLOCKS
    resident = Storm(runner, executor, threads, tasks, seconds).blow()

    assert executor.status().current_batch_size == 0
    assert executor._table._live == {}
    asyncio.run(executor.shutdown())
    for name in ADAPTER_NAMES:
        if name in runner._adapters._loaded:
            runner.unload_lora(name)
    table = runner._pipeline.table
    assert table.cache_ids == []
    assert sorted(table._free_slots) == list(range(SLOTS))
    assert [table.pool.num_holders(block) for block in range(BLOCKS)] == [0] * BLOCKS
    assert runner.lora_metrics_snapshot()["active_cache_bindings"] == 0
    assert runner.compile_stats()["compiles_after_warmup"] == 0
    gc.collect()
    assert (len(jax.live_arrays()), runner.kv_slot_capacity_snapshot()) == before
    clients: list[Client] = [*threads, *tasks]
    counts = sum((client.counts for client in clients), Counter[str]())
    fifth, few = len(resident) // 5, max(1, len(resident) // 20)
    return float(np.median(resident[-few:]) / np.median(resident[fifth : fifth + few])) - 1, counts


def test_a_crowd_gets_the_logits_of_the_cache_free_forward_and_leaves_nothing_behind(
    crowded: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str]
):
    _, counts = _blow(crowded, oracles, adapter_folders, seconds=5)
    assert counts["cancelled"]
    assert counts["refused"]
    assert counts["decoded at once"]


@pytest.mark.slow
def test_a_crowd_of_minutes_does_and_its_memory_does_not_grow(
    crowded: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str]
):
    growth, counts = _blow(crowded, oracles, adapter_folders, SECONDS)
    print(f"seed {SEED}, {SECONDS:g} s: {dict(counts)}, memory grew by {growth:.2%}")
    assert growth < 0.01

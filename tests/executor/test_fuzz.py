"""Whatever is handed in, the answer is right or a `FerrumError`, and an error changes nothing."""

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import ExecutorState, FerrumError
from ferrum_jax.executor import ModelRunner
from tests.executor.asking import prompt
from tests.executor.conftest import emptied
from tests.executor.junk import JSON, spoiled
from tests.executor.malformed import CALLS, HELD, Asked, Scene
from tests.long import SECONDS, SEED

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def scene(reusing_runner: ModelRunner, loop: asyncio.Runner, adapter_folders: dict[str, str]) -> Scene:
    foreign = loop.run(LlmExecutor(emptied(reusing_runner)).prefill(prompt([1]))).kv_cache
    return Scene(reusing_runner, LlmExecutor(reusing_runner), {"foreign": foreign}, adapter_folders["one"])


def _books(scene: Scene) -> Any:
    """Everything that a refused call must leave as it was."""
    runner = scene.runner
    table = runner._pipeline.table
    lengths = {key: (one.length, one.adapter) for key, one in scene.executor._table._live.items()}
    rows = [
        (key, one.slot, list(one.tokens), list(one.blocks))
        for key in table.cache_ids
        if (one := table.get(key)) is not None
    ]
    metrics = runner.cache_metrics_snapshot(), runner.lora_metrics_snapshot()
    return (
        rows,
        lengths,
        table.pool.num_free,
        metrics,
        list(runner._adapters._loaded),
        scene.executor.status().prefill_operations,
    )


def _set(scene: Scene, loop: asyncio.Runner) -> None:
    """Puts the scene back to its beginning."""
    runner = scene.runner
    runner.reset()
    for name in list(runner._adapters._loaded):
        runner.unload_lora(name)
    runner.prefill("a", [1, 2, 3])
    handles = [loop.run(scene.executor.prefill(prompt([4, 5, 6][:HELD]))).kv_cache for _ in range(2)]
    scene.executor.release_cache(handles[1].cache_id)
    scene.handles = {
        "live": handles[0],
        "stale": handles[0].with_sequence_length(HELD - 1),
        "released": handles[1],
        "foreign": scene.handles["foreign"],
    }


def _refused_or_right(scene: Scene, loop: asyncio.Runner, call: Callable[[], Any]) -> None:
    before = _books(scene)

    async def answer() -> Any:
        found = call()
        return await found if inspect.isawaitable(found) else found

    try:
        loop.run(answer())
    except FerrumError:
        assert _books(scene) == before
    assert scene.runner.state is ExecutorState.Ready


def _fuzz(scene: Scene, loop: asyncio.Runner, examples: int, nth: int = 0) -> None:
    @seed(SEED + nth)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=QUIET)
    @given(CALLS)
    def ask(asked: Asked) -> None:
        _set(scene, loop)
        _refused_or_right(scene, loop, lambda: asked.make(scene))

    ask()


def test_a_malformed_call_is_refused_and_changes_nothing(scene: Scene, loop: asyncio.Runner):
    _fuzz(scene, loop, 100)


PEFT = {
    "peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "exclude_modules": None,
    "layers_to_transform": None, "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none",
    "use_rslora": False, "init_lora_weights": True, "task_type": "CAUSAL_LM", "use_dora": False,
}  # fmt: skip


def _fuzz_folders(scene: Scene, loop: asyncio.Runner, folder: Path, examples: int, nth: int = 0) -> None:
    weights = Path(scene.folder, "adapter_model.safetensors").read_bytes()

    @seed(SEED + nth)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=QUIET)
    @given(spoiled(PEFT, JSON), st.integers(0, 400), st.binary(max_size=9), st.booleans())
    def load(config: dict[str, Any], at: int, junk: bytes, in_config: bool) -> None:
        _set(scene, loop)
        damaged = weights if in_config else weights[:at] + junk + weights[at + len(junk) :]
        (folder / "adapter_config.json").write_text(json.dumps(config if in_config else PEFT), encoding="utf-8")
        (folder / "adapter_model.safetensors").write_bytes(damaged)
        _refused_or_right(scene, loop, lambda: scene.runner.load_lora("one", folder))

    load()


def test_a_damaged_adapter_is_refused_and_changes_nothing(scene: Scene, loop: asyncio.Runner, tmp_path: Path):
    _fuzz_folders(scene, loop, tmp_path, 40)


@pytest.mark.slow
def test_minutes_of_malformed_calls_and_folders_change_nothing(scene: Scene, loop: asyncio.Runner, tmp_path: Path):
    end = time.monotonic() + SECONDS
    rounds = 0
    while time.monotonic() < end:
        _fuzz(scene, loop, 1000, rounds)
        _fuzz_folders(scene, loop, tmp_path, 200, rounds)
        rounds += 1
    print(f"{1200 * rounds:,} examples, seed {SEED}")

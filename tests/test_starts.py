"""A second start with the same model, machine and settings compiles and traces nothing, and answers the same."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax import LLM, SamplingParams, loading
from ferrum_jax.compile.artifacts import Artifact, artifacts_folder, memory_of
from ferrum_jax.config import EngineConfig
from ferrum_jax.contract import ActiveLoraAdapter, GreedyArgmax
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.device import EMPTY_KV
from tests import tiny
from tests.generate.test_request import letters
from tests.shipped import needs_optimisations

CONFIG: dict[str, Any] = tiny.CONFIGS["qwen3_tied"] | {"vocab_size": 23, "num_hidden_layers": 1}
SMALL: dict[str, Any] = {"max_seqs": 2, "kv_capacity": 48, "block_size": 16, "progress": False}
FEW = EngineConfig(decode_rows=(2,), query_blocks=(2,), block_tokens=24, verify_tokens=6, max_step_tokens=48)
PROMPT = [3, 1, 4, 1, 5]
WORK = ("/jax/core/compile/backend_compile_duration", "/jax/core/compile/jaxpr_trace_duration")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.write_folder(tmp_path_factory.mktemp("models") / "tiny", CONFIG)
    letters().backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def kept(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of everything that `LLM.warmup` makes sure of."""
    root = tmp_path_factory.mktemp("artifacts")
    with LLM(folder, artifacts=root, engine=FEW, **SMALL) as llm:
        llm.warmup(progress=False)
    return root


@pytest.fixture
def work() -> Iterator[list[str]]:
    """Every trace and every compilation of the process, whatever asked for it."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **more: str | int) -> None:
        if event in WORK:
            seen.append(f"{event} {more.get('fun_name')}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def _answers(runner: ModelRunner) -> list[Any]:
    """Logits and ids out of every kind of call."""
    rows: list[Any] = [runner.prefill("a", PROMPT), runner.prefill("b", PROMPT * 5)]
    rows += runner.decode_batch([("a", 7, 5), ("b", 8, 25)])
    rows += runner.decode_batch_with_logits_policy([("a", 7, 6)], [GreedyArgmax()])
    runner.release("b")
    runner.fork("a", "b")
    rows += [row for row in runner.unified_forward([("a", [1], 7, True), ("b", [2, 3], 7, True)]) if row is not None]
    rows += [runner.forward_verify("a", [4, 5]), *runner.kv_cache("a", 0)]
    runner.reset()
    return rows


def _assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@needs_optimisations
def test_a_second_start_compiles_and_traces_nothing_and_answers_bit_for_bit_the_same(
    folder: Path, kept: Path, work: list[str]
):
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3)
    with LLM(folder, artifacts=False, engine=FEW, **SMALL) as fresh:
        fresh.warmup(progress=False)
        assert work
        expected, text = _answers(fresh.runner), fresh.generate(["cab", "abba"], params)
    work.clear()
    with LLM(folder, artifacts=kept, strict=True, engine=FEW, **SMALL) as llm:
        llm.warmup(progress=False)
        stats = llm.runner.compile_stats()
        every = len(llm.runner.plan.declared()) + len(llm.runner.plan.buckets.masks())
        assert (stats["compiled"], stats["loaded"], stats["on_disk"]) == (0, every, every)
        assert len(stats["steps"]) == every
        _assert_equal(_answers(llm.runner), expected)
        assert [out.token_ids for out in llm.generate(["cab", "abba"], params)] == [out.token_ids for out in text]
        llm.warmup(progress=False, load=True)
        stats = llm.runner.compile_stats()
        assert (stats["compiled"], stats["compiles_after_warmup"], stats["on_disk"]) == (0, 0, 0)
        assert stats["loaded"] == every
        for key in llm.runner.plan.declared():
            if str(key).startswith(("step", "CopyKey")):  # the executable's own word, not the file's
                took = memory_of(llm.runner._programs.get(key))["alias_bytes"]
                assert took >= llm.runner.plan.cache.num_bytes, key
    assert work == []


def test_loading_and_the_first_call_of_all_compile_nothing_either(folder: Path, kept: Path, work: list[str]):
    with ferrum_jax.load(folder, artifacts=kept, engine=FEW, **SMALL) as runner:
        runner.prefill("a", PROMPT)
        assert runner.compile_stats()["loaded"] == 1
    assert work == []


def test_the_first_steps_are_loaded_while_weights_are_read(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, work: list[str]
):
    seen: list[tuple[str, str]] = []
    load = Artifact.load

    def record(self: Artifact) -> jax.stages.Compiled:
        seen.append((self.name, threading.current_thread().name.partition("_")[0]))
        return load(self)

    for thread in threading.enumerate():
        if thread.name.startswith("artifacts"):  # of an earlier test
            thread.join()
    monkeypatch.setattr(Artifact, "load", record)
    with ferrum_jax.load(folder, artifacts=kept, engine=FEW, **SMALL) as runner:
        first = [EMPTY_KV, *map(repr, runner.plan.first())]
        assert set(runner.plan.first()) <= set(runner.plan.declared())
        runner.warmup(progress=False, load=True)
        for at, name in enumerate(first):
            threads = [thread for found, thread in seen if found == name]
            assert len(threads) == 1, name
            assert threads == ["artifacts"] or at > 1, name  # what is asked for before its turn is loaded at once
        assert len(seen) == 1 + len(runner.plan.declared())
    assert work == []


def test_a_plan_that_changes_once_weights_are_read_preloads_in_vain_and_serves(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
):
    with ferrum_jax.load(folder, artifacts=kept, engine=FEW, **SMALL) as runner:
        expected = runner.prefill("a", PROMPT)
    plan = loading.plan_ahead
    monkeypatch.setattr(loading, "plan_ahead", lambda given, *more: plan(replace(given, kv_blocks=5), *more))
    with ferrum_jax.load(folder, artifacts=kept, engine=FEW, **SMALL) as runner:
        np.testing.assert_array_equal(runner.prefill("a", PROMPT), expected)
        assert runner.compile_stats()["loaded"] == 1


def test_another_setting_is_another_program(folder: Path, kept: Path):
    with ferrum_jax.load(folder, artifacts=kept, kv_blocks=5, engine=FEW, **SMALL) as runner:
        runner.prefill("a", PROMPT)
        stats = runner.compile_stats()
        assert (stats["compiled"], stats["loaded"]) == (1, 0)


def test_it_can_be_turned_off_by_argument_or_by_the_environment(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FERRUM_ARTIFACTS", str(tmp_path / "ours"))
    with ferrum_jax.load(folder, artifacts=False, engine=FEW, **SMALL) as runner:
        assert runner.artifacts is None
    with ferrum_jax.load(folder, engine=FEW, **SMALL) as runner:
        assert runner.artifacts is not None
        assert runner.artifacts.root == tmp_path / "ours"
    monkeypatch.setenv("FERRUM_ARTIFACTS", "0")
    with ferrum_jax.load(folder, engine=FEW, **SMALL) as runner:
        assert runner.artifacts is None
    monkeypatch.delenv("FERRUM_ARTIFACTS")
    monkeypatch.setattr("ferrum_jax.compile.artifacts.user_cache_dir", lambda name: str(tmp_path / name))
    with ferrum_jax.load(folder, engine=FEW, **SMALL) as runner:
        assert runner.artifacts is not None
        assert runner.artifacts.root == tmp_path / "ferrum_jax" / "artifacts"


def test_a_user_without_a_home_keeps_no_steps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # raises a KeyError: the system does not know the user
    assert artifacts_folder(None) is None
    assert "compiled steps on disk are not used: " in caplog.text


def test_source_edited_under_a_running_process_turns_it_off(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("ferrum_jax.compile.artifacts.is_edited", lambda: True)
    with ferrum_jax.load(folder, artifacts=tmp_path, engine=FEW, **SMALL) as runner:
        assert runner.artifacts is None
    assert "source has changed since the process began" in caplog.messages[0]


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_of_adapters_are_kept_as_well(warm: bool, folder: Path, tmp_path: Path, work: list[str]):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]})
    )
    draw, tensors = np.random.RandomState(1), {}
    width, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    for layer in range(CONFIG["num_hidden_layers"]):
        for half, shape in (("A", (2, width)), ("B", (heads, 2))):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight"
            tensors[name] = draw.normal(size=shape).astype(np.float32)
    tiny.save_file(tensors, adapter / "adapter_model.safetensors")
    rows = []
    for start in ("first", "second"):
        with ferrum_jax.load(
            folder, artifacts=tmp_path / "kept", max_loras=1, max_lora_rank=2, engine=FEW, **SMALL
        ) as runner:
            if warm:
                runner.warmup(progress=False)
            runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="one", path=str(adapter)))
            rows.append(np.stack([runner.prefill("a", PROMPT), runner.prefill("b", PROMPT)]))
            stats = runner.compile_stats()
            assert (stats["compiled"] == 0) == (start == "second")
        if start == "first":
            work.clear()
    assert work == []
    np.testing.assert_array_equal(rows[0], rows[1])
    assert np.abs(rows[0][0] - rows[0][1]).max() > 1e-3


@pytest.mark.slow
def test_a_pool_larger_than_half_the_memory_is_sized_without_compiling(
    folder: Path, tmp_path: Path, work: list[str], monkeypatch: pytest.MonkeyPatch
):
    weights = sum(tensor.nbytes for tensor in tiny.tensors(CONFIG).values())
    monkeypatch.setattr("ferrum_jax.sharding.mesh.free_bytes", lambda _: weights + 10**7)
    plans = []
    for _ in range(2):
        work.clear()
        with ferrum_jax.load(
            folder, artifacts=tmp_path, kv_blocks=1000, memory_fraction=1.0, engine=FEW, **SMALL
        ) as runner:
            assert 2 * runner.plan.cache.num_bytes > 10**7
            plans.append(runner.plan)
    assert plans[0] == plans[1]
    assert work == []


SCRIPT = """
import json, sys
import jax
work = []
def listen(event, seconds, **more):
    if event in ("/jax/core/compile/backend_compile_duration", "/jax/core/compile/jaxpr_trace_duration"):
        work.append(f"{event} {more.get('fun_name')}")
jax.monitoring.register_event_duration_secs_listener(listen)
from ferrum_jax import LLM, SamplingParams
with LLM(sys.argv[1], artifacts=sys.argv[2], strict=True, **json.loads(sys.argv[3])) as llm:
    print("read", flush=True)
    llm.warmup(progress=False)
    out = llm.generate("cab", SamplingParams(max_tokens=5))[0]
    row = llm.runner.prefill("a", [3, 1, 4, 1, 5])
    stats = llm.runner.compile_stats()
print(json.dumps({"work": work, "ids": out.token_ids, "row": row.tolist(), "compiled": stats["compiled"]}))
"""


def _start(folder: Path, root: Path) -> subprocess.Popen[str]:
    settings = SMALL | {"max_step_tokens": 48}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(root), json.dumps(settings)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _end(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


@pytest.mark.slow
def test_starts_of_whole_processes_at_once_and_after_one_another(folder: Path, tmp_path: Path):
    together = [_end(process) for process in [_start(folder, tmp_path / "kept") for _ in range(2)]]
    second, errors = _end(_start(folder, tmp_path / "kept"))
    assert (second["work"], second["compiled"], errors) == ([], 0, "")
    for first, _ in together:
        assert (first["ids"], first["row"]) == (second["ids"], second["row"])


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_a_correct_start(folder: Path, tmp_path: Path):
    root, rng = tmp_path / "kept", random.Random(int(os.environ.get("SEED", "20")))
    expected, _ = _end(_start(folder, tmp_path / "other"))
    for _ in range(4):  # each gets a little further
        process, before = _start(folder, root), sum(1 for _ in root.rglob("*"))
        while process.poll() is None and sum(1 for _ in root.rglob("*")) < before + 2:
            time.sleep(rng.uniform(0.0, 0.01))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    kept = sum(1 for _ in root.rglob("*.step"))
    assert 0 < kept < sum(1 for _ in (tmp_path / "other").rglob("*.step"))
    after, errors = _end(_start(folder, root))
    assert (after["ids"], after["row"], errors) == (expected["ids"], expected["row"], "")
    last, errors = _end(_start(folder, root))
    assert (last["work"], last["row"], errors) == ([], expected["row"], "")


@pytest.mark.parametrize(
    "settings",
    [{"layout": "fused", "quantize": "int8"}, pytest.param({"layout": "scanned"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_second_start_in_another_layout_compiles_nothing_either(
    settings: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: list[str]
):
    given = {"artifacts": tmp_path / "laid", "engine": FEW, **SMALL, **settings}
    with ferrum_jax.load(folder, **given) as runner:
        expected = runner.prefill("a", PROMPT)
    opened, before = [], loading._open_artifacts

    def record(*more: Any) -> Any:
        opened.append(before(*more))
        return opened[0]

    monkeypatch.setattr(loading, "_open_artifacts", record)
    work.clear()
    with ferrum_jax.load(folder, **given) as runner:
        np.testing.assert_array_equal(runner.prefill("a", PROMPT), expected)
        assert work == []
        assert runner.artifacts is opened[0]  # what was preloaded is what serves

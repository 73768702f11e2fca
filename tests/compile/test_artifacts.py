"""Compiled steps on disk: found again as they were, and compiled again where anything is wrong with them."""

import json
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import ferrum_jax
from ferrum_jax.compile import artifacts as artifacts_module
from ferrum_jax.compile.artifacts import FACTS, MAGIC, Artifacts, clear, memory_of
from ferrum_jax.compile.program_cache import ProgramCache
from ferrum_jax.compile.step import StepKey
from ferrum_jax.config import EngineConfig
from ferrum_jax.contract.errors import BackendError, ConfigError
from ferrum_jax.executor.from_params import from_params
from tests import tiny

ONE, TWO, THREE = (StepKey(rows, 0, 0, 2, rows) for rows in (1, 2, 3))
FACTS_HERE = {"model": "toy"}


def _lower(key: StepKey) -> jax.stages.Lowered:
    def toy(x: jax.Array, y: jax.Array) -> jax.Array:
        return x.at[0].set(jnp.tanh(y @ y).sum() + key.decode_rows)

    shape = jax.ShapeDtypeStruct((key.decode_rows, 5), jnp.float32)
    return jax.jit(toy, donate_argnums=0).lower(shape, jax.ShapeDtypeStruct((3, 3), jnp.float32))


def _cache(root: Path, facts: dict[str, str] = FACTS_HERE, *, strict: bool = False) -> ProgramCache:
    return ProgramCache(_lower, strict=strict, artifacts=Artifacts(root, facts))


def _counts(cache: ProgramCache) -> tuple[int, int, int, int]:
    stats = cache.stats()
    return stats["compiled"], stats["loaded"], stats["on_disk"], stats["compiles_after_warmup"]


def _run(cache: ProgramCache, key: StepKey) -> list[list[float]]:
    return cache.get(key)(jnp.zeros((key.decode_rows, 5)), np.ones((3, 3), np.float32)).tolist()


def _answer(key: StepKey) -> list[list[float]]:
    fresh = _lower(key).compile()
    return fresh(jnp.zeros((key.decode_rows, 5)), np.ones((3, 3), np.float32)).tolist()


def _file(root: Path, key: StepKey) -> Path:
    folder = Artifacts(root, FACTS_HERE).folder.path
    return folder / artifacts_module._file_name(repr(key))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with two steps."""
    root = tmp_path / "artifacts"
    _cache(root).warmup([ONE, TWO])
    return root


def test_a_step_is_loaded_when_first_used_and_compiles_and_traces_nothing(kept: Path, compiles: list[str]):
    expected = {key: _answer(key) for key in (ONE, TWO)}
    cache = _cache(kept)
    compiles.clear()
    cache.warmup([ONE, TWO])
    assert _counts(cache) == (0, 2, 2, 0)
    assert list(cache.stats()["steps"]) == sorted([str(ONE), str(TWO)])
    assert _run(cache, ONE) == expected[ONE]
    assert _counts(cache) == (0, 2, 1, 0)
    cache.ensure([ONE, TWO])
    assert _counts(cache) == (0, 2, 0, 0)
    assert _run(cache, TWO) == expected[TWO]
    assert compiles == []
    stats = cache.stats()
    assert stats["compile_seconds"] == 0
    assert stats["load_seconds"] == pytest.approx(sum(step["seconds"] for step in stats["steps"].values()))


def test_a_first_start_has_in_memory_what_a_later_one_has(tmp_path: Path):
    cache = _cache(tmp_path / "artifacts", strict=True)
    cache.warmup([ONE, TWO])
    assert _counts(cache) == (2, 0, 2, 0)
    stats = cache.stats()
    assert list(stats["steps"]) == sorted([str(ONE), str(TWO)])
    assert stats["compile_seconds"] == pytest.approx(sum(step["seconds"] for step in stats["steps"].values()))
    assert stats["steps"][str(TWO)]["alias_bytes"] == 2 * 5 * 4  # of what has not been loaded, too
    assert _run(cache, ONE) == _answer(ONE)
    assert _counts(cache) == (2, 0, 1, 0)
    cache.warmup([ONE, TWO], load=True)
    assert _counts(cache) == (2, 0, 0, 0)
    at_once = _cache(tmp_path / "others")
    at_once.warmup([ONE, TWO], load=True)
    assert _counts(at_once) == (2, 0, 0, 0)


def test_a_loaded_step_still_takes_its_input_over(kept: Path):
    cache = _cache(kept)
    x = jnp.zeros((2, 5))
    cache.get(TWO)(x, np.ones((3, 3), np.float32))
    assert x.is_deleted()
    assert memory_of(cache.get(TWO))["alias_bytes"] == x.nbytes
    assert cache.stats()["steps"][str(TWO)]["alias_bytes"] == x.nbytes
    with pytest.raises(TypeError):
        cache.get(TWO)(jnp.zeros((3, 5)), np.ones((3, 3), np.float32))


def test_warmup_loads_at_once_where_it_is_asked_to(kept: Path):
    cache = _cache(kept)
    cache.warmup([ONE])
    cache.warmup([ONE, TWO, THREE], load=True)
    assert _counts(cache) == (1, 2, 0, 0)


def test_steps_are_used_before_any_warmup_as_well(kept: Path):
    cache = _cache(kept)
    assert _run(cache, TWO) == _answer(TWO)
    assert _run(cache, THREE) == _answer(THREE)
    assert _counts(cache) == (1, 1, 0, 0)
    assert _counts(_cache(kept)) == (0, 0, 0, 0)


def test_after_dropping_everything_steps_are_found_again(kept: Path):
    cache = _cache(kept)
    cache.warmup([ONE, TWO])
    cache.get(ONE)
    cache.drop()
    assert _counts(cache) == (0, 0, 0, 0)
    assert _run(cache, TWO) == _answer(TWO)


def test_two_loads_of_one_step_do_not_disturb_each_other(kept: Path):
    caches = [_cache(kept), _cache(kept)]
    assert [_run(cache, TWO) for cache in caches * 2] == [_answer(TWO)] * 4
    caches[0].drop()
    assert _run(caches[1], TWO) == _answer(TWO)


def _cut(share: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: int(share * len(data))]


def _flip(share: float) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        at = min(int(share * len(data)), len(data) - 1)
        return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]

    return flip


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut to {share:.0%}": _cut(share) for share in (0, 0.001, 0.003, 0.01, 0.3, 0.999)},
    **{f"a bit flipped at {share:.0%}": _flip(share) for share in (0, 0.003, 0.01, 0.05, 0.5, 1)},
    "longer": lambda data: data + b"\0",
    "another version of the format": lambda data: data.replace(MAGIC, MAGIC.replace(b"1", b"2"), 1),
    "something else": lambda _: pickle.dumps(print),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_ignored_with_a_warning_and_rebuilt(
    kept: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    whole = _file(kept, ONE).read_bytes()
    _file(kept, ONE).write_bytes(DAMAGE[name](whole))
    with monkeypatch.context() as patch:
        patch.setattr(artifacts_module.pickle, "loads", _refuse_unpickling)
        assert Artifacts(kept, FACTS_HERE).find(repr(ONE)) is None
    caplog.clear()
    cache = _cache(kept, strict=True)
    cache.warmup([ONE, TWO])
    assert _counts(cache) == (1, 1, 2, 0)
    assert len(caplog.messages) == 1
    assert "is compiled: " in caplog.messages[0]
    assert _run(cache, ONE) == _answer(ONE)
    caplog.clear()
    again = _cache(kept)
    again.warmup([ONE, TWO])
    assert _counts(again) == (0, 2, 2, 0)
    assert caplog.messages == []


def _refuse_unpickling(*_: object) -> None:
    raise AssertionError("something was unpickled that was not verified")


def test_a_step_under_another_name_or_of_another_program_is_refused(kept: Path, caplog: pytest.LogCaptureFixture):
    _file(kept, ONE).write_bytes(_file(kept, TWO).read_bytes())
    assert Artifacts(kept, FACTS_HERE).find(repr(ONE)) is None
    assert f"it is the step {TWO!r}" in caplog.messages[0]
    other = Artifacts(kept, {"model": "another"})
    assert other.find(repr(TWO)) is None
    other.folder.write(_file(kept, TWO).name, _file(kept, TWO).read_bytes())
    assert other.find(repr(TWO)) is None
    assert "of the program" in caplog.messages[1]


def test_another_program_compiles_its_own(kept: Path):
    cache = _cache(kept, {"model": "another"})
    cache.warmup([ONE, TWO])
    assert _counts(cache) == (2, 0, 2, 0)
    assert json.loads((Artifacts(kept, FACTS_HERE).folder.path / FACTS).read_text())["model"] == "toy"


def test_steps_of_other_compiler_options_are_not_loaded(tmp_path: Path):
    folder = tiny.write_folder(tmp_path / "model", tiny.CONFIGS["qwen3_tied"])
    counts: list[tuple[int, int]] = []
    for more in ({}, {"xla_disable_hlo_passes": "fusion"}, {}):
        options = {"xla_backend_optimization_level": 3} | more
        engine = EngineConfig(compiler_options=options, block_tokens=8, query_blocks=(1,))
        settings = {"max_seqs": 1, "kv_capacity": 16, "block_size": 8, "progress": False}
        with ferrum_jax.load(folder, engine=engine, artifacts=tmp_path / "artifacts", **settings) as runner:
            runner.prefill("a", [1, 2, 3])
            stats = runner.compile_stats()
            counts.append((stats["compiled"], stats["loaded"]))
            assert runner.artifacts is not None
            facts = json.loads((runner.artifacts.folder.path / FACTS).read_text())
            assert facts["compiler_options"] == options
    num = counts[0][0]
    assert num > 0
    assert counts == [(num, 0), (num, 0), (0, num)]


@pytest.mark.slow
def test_parameters_at_hand_are_served_with_the_options_too(monkeypatch: pytest.MonkeyPatch):
    """So is what is compiled only to learn how much memory it takes, where the pool is most of what is free."""
    seen: list[dict[str, bool] | None] = []
    compile_it = jax.stages.Lowered.compile

    def compile_and_note(lowered: jax.stages.Lowered, **settings: Any) -> jax.stages.Compiled:
        seen.append(settings["compiler_options"])
        return compile_it(lowered, **settings)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_note)
    monkeypatch.setattr("ferrum_jax.sharding.mesh.free_bytes", lambda _: 2**20)
    params = jax.device_put(tiny.tiny_params(tiny.CONFIGS["qwen3_tied"]))
    options = {"xla_cpu_enable_fast_math": False}
    engine = EngineConfig(memory_fraction=0.9, max_seqs=64, block_tokens=8, query_blocks=(1,), decode_rows=(1,))
    with from_params(params, tiny.model_config("qwen3_tied"), engine=engine, compiler_options=options) as runner:
        assert len(seen) > 3  # what is checked, measured, and the empty KV
        runner.prefill("a", [1, 2, 3])
    assert all(given == options for given in seen)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"xla_typo": 1}, "No such compile option: 'xla_typo'"),
        ({"xla_backend_optimization_level": "many"}, "'many' is not a valid int32"),
        ({"optimization_level": "high"}, "incompatible function arguments|'high' is not a valid"),
        ({"xla_backend_optimization_level": 10**400}, "incompatible function arguments"),
    ],
)
def test_an_option_that_the_compiler_refuses_is_a_config_error_before_anything_is_compiled(
    options: dict[str, str | int], match: str, tmp_path: Path
):
    folder = tiny.write_folder(tmp_path / "model", tiny.CONFIGS["qwen3_tied"])
    engine = EngineConfig(compiler_options=options)
    with pytest.raises(ConfigError, match=f"compiler_options .*{match}"):
        ferrum_jax.load(folder, engine=engine, progress=False)
    params, cfg = ferrum_jax.load_params(folder)
    with pytest.raises(ConfigError, match=f"compiler_options .*{match}"):
        from_params(params, cfg, engine=engine)


def test_a_step_that_verifies_but_does_not_load_is_rebuilt_and_counted(
    kept: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: no such symbol")

    lenient, strict = _cache(kept), _cache(kept, strict=True)
    for cache in (lenient, strict):
        cache.warmup([ONE, TWO])
    with monkeypatch.context() as patch:
        patch.setattr(serialize_executable, "deserialize_and_load", fail)
        assert _run(lenient, ONE) == _answer(ONE)
        assert _counts(lenient) == (1, 1, 1, 1)
        assert any("INTERNAL: no such symbol" in text for text in caplog.messages)
        with pytest.raises(BackendError, match="on disk cannot be loaded, and strict mode compiles nothing"):
            strict.get(ONE)
        early = _cache(kept)
        assert _run(early, TWO) == _answer(TWO)
        assert _counts(early) == (1, 0, 0, 0)
    assert _run(strict, ONE) == _answer(ONE)  # it is still at hand


def test_what_was_compiled_here_and_does_not_load_is_compiled_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = _cache(tmp_path / "artifacts", strict=True)
    cache.warmup([ONE, TWO, ONE])

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no such symbol")

    monkeypatch.setattr(serialize_executable, "deserialize_and_load", fail)
    assert _run(cache, ONE) == _answer(ONE)
    assert _counts(cache) == (2, 0, 1, 1)


def test_what_happens_to_files_after_warmup_changes_nothing(kept: Path):
    cache = _cache(kept, strict=True)
    cache.warmup([ONE, TWO])
    _file(kept, ONE).write_bytes(b"damaged")
    _file(kept, TWO).unlink()
    assert [_run(cache, key) for key in (ONE, TWO)] == [_answer(ONE), _answer(TWO)]
    assert _counts(cache) == (0, 2, 0, 0)


def test_strict_mode_refuses_what_warmup_did_not_declare_though_it_is_on_disk(kept: Path):
    cache = _cache(kept, strict=True)
    cache.warmup([ONE])
    with pytest.raises(BackendError, match="was not compiled by warmup"):
        cache.get(TWO)
    lenient = _cache(kept)
    lenient.warmup([ONE])
    lenient.get(TWO)
    assert _counts(lenient) == (0, 2, 1, 0)  # a load is no compilation


@pytest.mark.parametrize("which", ["root", "program", "file"])
def test_what_others_may_write_is_ignored_with_one_warning(kept: Path, which: str, caplog: pytest.LogCaptureFixture):
    path = _file(kept, ONE)
    {"root": kept, "program": path.parent, "file": path}[which].chmod(0o777)
    cache = _cache(kept)
    cache.warmup([ONE])
    assert _counts(cache) == (1, 0, which == "file", 0)  # a file is replaced, into a folder nothing is written
    assert _run(cache, ONE) == _answer(ONE)
    assert "may be written by others (mode 777)" in caplog.messages[0]
    assert len(caplog.messages) == (1 if which == "file" else 2)


def test_a_linked_file_is_ignored_and_replaced(kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = _file(kept, ONE)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    cache = _cache(kept)
    cache.warmup([ONE])
    assert _counts(cache) == (1, 0, 1, 0)
    assert "is a link" in caplog.messages[0]
    assert not path.is_symlink()


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    cache = _cache(tmp_path / "file" / "artifacts")
    cache.warmup([ONE, TWO])
    assert _counts(cache) == (2, 0, 0, 0)
    assert _run(cache, ONE) == _answer(ONE)
    assert [text for text in caplog.messages if "not kept" in text] == caplog.messages[-1:]


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    cache = _cache(tmp_path / "artifacts")
    cache.warmup([ONE, TWO, THREE])
    assert _counts(cache) == (3, 0, 0, 0)
    assert cache._artifacts is not None
    assert (cache._artifacts.num_saved, cache._artifacts.num_unwritten) == (0, 3)
    assert caplog.messages == ["compiled steps are not kept for the next start: [Errno 28] No space left on device"]


@pytest.mark.parametrize("way", ["serialize", "deserialize_and_load"])
def test_where_executables_cannot_be_written_or_read_back_it_compiles_with_one_warning(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no support")

    monkeypatch.setattr(serialize_executable, way, fail)
    cache = _cache(tmp_path / "artifacts")
    cache.warmup([ONE, TWO])
    assert _run(cache, ONE) == _answer(ONE)
    assert len(caplog.messages) == 1
    assert "cannot be kept, every start compiles them" in caplog.messages[0]
    assert _counts(cache) == (2, 0, 0, 0)
    assert not (tmp_path / "artifacts").exists()


def test_several_threads_keep_and_load_the_same_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caches = [_cache(tmp_path / "artifacts") for _ in range(4)]
    answers: list[list[list[float]]] = []

    def use(cache: ProgramCache, seed: int) -> None:
        keys = [ONE, TWO, THREE]
        random.Random(seed).shuffle(keys)
        cache.warmup(keys)
        answers.append(_run(cache, TWO))

    threads = [threading.Thread(target=use, args=(cache, at)) for at, cache in enumerate(caches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [_answer(TWO)] * 4
    assert caplog.messages == []
    last = _cache(tmp_path / "artifacts")
    last.warmup([ONE, TWO, THREE])
    assert _counts(last) == (0, 3, 3, 0)


def test_one_cache_asked_by_several_threads_stays_right(kept: Path):
    cache = _cache(kept, strict=True)
    cache.warmup([ONE, TWO])
    answers: list[list[list[float]]] = []
    threads = [threading.Thread(target=lambda: answers.append(_run(cache, TWO))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [_answer(TWO)] * 8
    assert _counts(cache) == (0, 2, 1, 0)


def test_clearing_removes_programs_and_nothing_else(kept: Path):
    (kept / "mine").mkdir(mode=0o700)
    (kept / "mine" / "file").write_text("keep")
    freed = sum(path.stat().st_size for path in _file(kept, ONE).parent.iterdir())
    theirs = kept / "app"
    theirs.mkdir(mode=0o700)
    (theirs / FACTS).write_text("{}")
    mixed = kept / ("0" * 32)
    mixed.mkdir(mode=0o700)
    for name in (FACTS, "thesis.tex"):
        (mixed / name).write_text("{}")
    assert clear(kept) == freed > 0
    left = sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file())
    assert left == sorted([f"{'0' * 32}/{FACTS}", f"{'0' * 32}/thesis.tex", f"app/{FACTS}", "mine/file"])
    assert clear(kept) == 0
    assert clear(kept / "none") == 0


BEHIND_A_CACHE = """
import sys
from pathlib import Path
import jax
from tests.compile import test_artifacts as t
jax.config.update("jax_compilation_cache_dir", sys.argv[1] + "/jax")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
for name in ("first", "hit", "first"):
    root = Path(sys.argv[1], name)
    cache = t._cache(root)
    cache.warmup([t.ONE])
    print(t._counts(cache), len(list(root.rglob("*.step"))), t._run(cache, t.ONE))
"""


def test_what_came_out_of_jaxs_persistent_cache_is_not_kept_as_it_would_lack_its_functions(tmp_path: Path):
    command = [sys.executable, "-c", BEHIND_A_CACHE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    answer = _answer(ONE)
    assert done.stdout.splitlines() == [
        f"(1, 0, 1, 0) 1 {answer}",
        f"(1, 0, 0, 0) 0 {answer}",
        f"(0, 1, 1, 0) 1 {answer}",
    ]
    assert done.stderr.count("unset JAX_COMPILATION_CACHE_DIR") == 1


def test_hits_are_counted_though_somebody_has_cleared_the_listeners(monkeypatch: pytest.MonkeyPatch):
    listeners: list[Any] = []
    monkeypatch.setattr(jax.monitoring, "register_event_listener", listeners.append)
    monkeypatch.setattr(jax.monitoring, "record_event", lambda event: [one(event) for one in listeners])
    hits = artifacts_module._CacheHits()
    for cleared in range(2):
        assert hits.count() == cleared
        assert hits.count() == cleared
        assert len(listeners) == 1
        jax.monitoring.record_event(artifacts_module.CACHE_HIT)
        listeners.clear()

"""Adapters behind the runner: bound to ids, mixed in one step, loaded and dropped while others run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ferrum_jax.contract import ActiveLoraAdapter
from ferrum_jax.contract.errors import (
    AlreadyExistsError,
    ConfigError,
    DeviceError,
    NotFoundError,
    RequestValidationError,
    ResourceExhaustedError,
)
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import ENGINE, Oracle, make_runner

Oracles = dict[str | None, Oracle]
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def runner(reusing: ModelRunner) -> ModelRunner:
    return reusing


def active(name: str, folders: dict[str, str]) -> ActiveLoraAdapter:
    return ActiveLoraAdapter(name=name, path=folders[name])


def test_one_step_mixes_rows_of_adapters_and_of_none(
    runner: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str], compiles: list[str]
):
    names = [None, "one", "two", "one"]
    before = runner.lora_metrics_snapshot()["projection_applications"]
    for key, name in zip("abcd", names, strict=True):
        if name is not None:
            runner.set_lora_adapter_for_cache(key, active(name, adapter_folders))
    rows = runner.unified_forward([(key, TOKENS[: 5 + at], 0, True) for at, key in enumerate("abcd")])
    for at, (name, row) in enumerate(zip(names, rows, strict=True)):
        assert row is not None
        np.testing.assert_allclose(row, oracles[name](TOKENS[: 5 + at])[-1], atol=1e-4, rtol=0)
    more = runner.decode_batch([(key, 7, 5 + at) for at, key in enumerate("abcd")])
    for at, (name, row) in enumerate(zip(names, more, strict=True)):
        np.testing.assert_allclose(row, oracles[name]([*TOKENS[: 5 + at], 7])[-1], atol=1e-4, rtol=0)
    verified = runner.forward_verify("b", [1, 2])
    np.testing.assert_allclose(verified, oracles["one"]([*TOKENS[:6], 7, 1, 2])[-2:], atol=1e-4, rtol=0)
    assert compiles == []
    counts = runner.lora_metrics_snapshot()
    assert (counts["adapter_count"], counts["active_cache_bindings"]) == (2, 3)
    # "one" has 2 projections in each of 2 layers, "two" has 4
    assert counts["projection_applications"] - before == 2 * (4 + 8 + 4) + 4


def test_a_fork_goes_on_under_the_same_adapter(runner: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str]):
    runner.set_lora_adapter_for_cache("a", active("one", adapter_folders))
    runner.prefill("a", TOKENS)
    runner.fork("a", "b")
    logits = runner.decode("b", 7, len(TOKENS))
    np.testing.assert_allclose(logits, oracles["one"]([*TOKENS, 7])[-1], atol=1e-4, rtol=0)
    with pytest.raises(RequestValidationError, match="in use by"):
        runner.unload_lora("one")
    runner.set_lora_adapter_for_cache("c", active("two", adapter_folders))
    with pytest.raises(RequestValidationError, match="'c' is bound to another adapter"):
        runner.fork("a", "c")
    assert runner.kv_len("c") is None


def test_a_sequence_with_positions_keeps_its_adapter(runner: ModelRunner, adapter_folders: dict[str, str]):
    runner.set_lora_adapter_for_cache("a", active("one", adapter_folders))
    runner.prefill("a", TOKENS)
    for other in (None, active("two", adapter_folders)):
        with pytest.raises(RequestValidationError, match="holds 8 positions of adapter 'one'"):
            runner.set_lora_adapter_for_cache("a", other)
    with pytest.raises(RequestValidationError, match=r"it cannot go on with adapter 'one' from .*two"):
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="one", path=adapter_folders["two"]))
    runner.set_lora_adapter_for_cache("a", active("one", adapter_folders))
    runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="one", path=f"{adapter_folders['one']}/x/../"))
    runner.prefill("b", TOKENS)
    with pytest.raises(RequestValidationError, match="positions of no adapter"):
        runner.set_lora_adapter_for_cache("b", active("one", adapter_folders))
    runner.truncate_kv("a", 0)
    runner.set_lora_adapter_for_cache("a", None)
    runner.release("b")
    runner.set_lora_adapter_for_cache("b", active("two", adapter_folders))


def test_an_adapter_that_cannot_be_read_is_not_found(runner: ModelRunner, tmp_path: Path):
    before = runner.lora_metrics_snapshot()
    with pytest.raises(NotFoundError, match="nowhere"):
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="x", path=str(tmp_path / "nowhere")))
    with pytest.raises(NotFoundError, match="nowhere"):
        runner.load_lora("x", tmp_path / "nowhere")
    with pytest.raises(RequestValidationError, match="expected a string that is not empty"):
        runner.load_lora("", tmp_path)
    with pytest.raises(NotFoundError, match="'x' is not loaded"):
        runner.unload_lora("x")
    assert runner.lora_metrics_snapshot() == before


def test_an_adapter_whose_configuration_is_a_folder_is_not_found(runner: ModelRunner, tmp_path: Path):
    (tmp_path / "adapter_config.json").mkdir()
    with pytest.raises(NotFoundError, match=r"adapter_config.json cannot be read"):
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="x", path=str(tmp_path)))


def test_an_adapter_that_nobody_uses_makes_room_for_its_next_version(
    runner: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str]
):
    next_version = ActiveLoraAdapter(name="one", path=adapter_folders["two"])
    runner.set_lora_adapter_for_cache("a", active("one", adapter_folders))
    with pytest.raises(AlreadyExistsError, match="not from"):
        runner.set_lora_adapter_for_cache("b", next_version)
    runner.release("a")
    runner.set_lora_adapter_for_cache("b", next_version)
    np.testing.assert_allclose(runner.prefill("b", TOKENS), oracles["two"](TOKENS)[-1], atol=1e-4, rtol=0)
    assert runner.lora_metrics_snapshot()["adapter_count"] == 1


def test_a_link_that_moves_is_another_adapter(
    runner: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str], tmp_path: Path
):
    latest = tmp_path / "latest"
    latest.symlink_to(adapter_folders["one"])
    runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="x", path=str(latest)))
    runner.set_lora_adapter_for_cache("b", ActiveLoraAdapter(name="x", path=adapter_folders["one"]))
    latest.unlink()
    latest.symlink_to(adapter_folders["two"])
    renewed = ActiveLoraAdapter(name="x", path=adapter_folders["two"])
    with pytest.raises(AlreadyExistsError, match="latest, not from"):
        runner.set_lora_adapter_for_cache("b", renewed)
    runner.release("a")
    runner.set_lora_adapter_for_cache("b", None)
    runner.set_lora_adapter_for_cache("b", renewed)
    np.testing.assert_allclose(runner.prefill("b", TOKENS), oracles["two"](TOKENS)[-1], atol=1e-4, rtol=0)
    with pytest.raises(RequestValidationError, match="cannot go on"):
        runner.set_lora_adapter_for_cache("b", ActiveLoraAdapter(name="x", path=adapter_folders["one"]))


def test_a_relative_path_is_from_where_it_was_given(
    runner: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    here, there = Path(adapter_folders["one"]), Path(adapter_folders["two"])
    monkeypatch.chdir(here)
    runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="x", path="."))
    monkeypatch.chdir(there)
    runner.release("a")
    runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="x", path="."))
    np.testing.assert_allclose(runner.prefill("a", TOKENS), oracles["two"](TOKENS)[-1], atol=1e-4, rtol=0)


def test_a_tilde_is_the_home_folder(
    runner: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(Path(adapter_folders["one"]).parent))
    short = f"~/{Path(adapter_folders['one']).name}"
    runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="x", path=short))
    np.testing.assert_allclose(runner.prefill("a", TOKENS), oracles["one"](TOKENS)[-1], atol=1e-4, rtol=0)
    for path in (short, adapter_folders["one"]):  # the same adapter
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="x", path=path))


def test_a_whole_path_needs_no_working_directory(
    runner: ModelRunner, adapter_folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    runner.set_lora_adapter_for_cache("a", active("one", adapter_folders))
    runner.prefill("a", TOKENS)
    runner.set_lora_adapter_for_cache("a", active("one", adapter_folders))
    with pytest.raises(NotFoundError):
        runner.set_lora_adapter_for_cache("b", ActiveLoraAdapter(name="two", path="two"))


def test_a_name_stands_for_one_path(runner: ModelRunner, adapter_folders: dict[str, str]):
    runner.load_lora("one", adapter_folders["one"])
    with pytest.raises(AlreadyExistsError, match="'one' is loaded"):
        runner.load_lora("one", adapter_folders["one"])
    with pytest.raises(AlreadyExistsError, match="not from"):
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="one", path=adapter_folders["two"]))


def test_adapters_loaded_by_name_stay_and_others_make_room(runner: ModelRunner, adapter_folders: dict[str, str]):
    runner.load_lora("one", adapter_folders["one"])
    runner.set_lora_adapter_for_cache("a", active("two", adapter_folders))
    with pytest.raises(ResourceExhaustedError, match="all 2 of max_loras") as caught:
        runner.set_lora_adapter_for_cache("b", active("three", adapter_folders))
    assert (caught.value.needed, caught.value.free) == (1, 0)
    runner.release("a")
    runner.set_lora_adapter_for_cache("b", active("three", adapter_folders))  # in the place of "two"
    assert sorted(runner._adapters.loaded) == ["one", "three"]


def test_an_interrupt_while_an_adapter_makes_room_leaves_no_name_with_the_weights_of_another(
    runner: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    runner.load_lora("one", adapter_folders["one"])
    runner.set_lora_adapter_for_cache("a", active("two", adapter_folders))
    runner.release("a")
    install = runner._adapters.install

    def interrupted(*how: Any) -> None:
        install(*how)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner._adapters, "install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.set_lora_adapter_for_cache("b", active("three", adapter_folders))  # in the place of "two"
    monkeypatch.undo()
    runner.reset()
    for key, name in (("a", "two"), ("b", "one")):
        runner.set_lora_adapter_for_cache(key, active(name, adapter_folders))
        np.testing.assert_allclose(runner.prefill(key, TOKENS), oracles[name](TOKENS)[-1], atol=1e-4, rtol=0)


def test_without_room_no_file_is_read(
    runner: ModelRunner, adapter_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """A request that waits for room asks in every step."""
    for name in ("one", "two"):
        runner.load_lora(name, adapter_folders[name])
    with pytest.raises(NotFoundError, match="/nowhere"):
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="three", path="/nowhere"))
    with pytest.raises(NotFoundError, match="name too long"):
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="three", path="n" * 5000))
    monkeypatch.setattr(runner._adapters, "read", lambda _: pytest.fail("it is read"))
    for name in ("one", "two"):
        runner.set_lora_adapter_for_cache(name, ActiveLoraAdapter(name=name, path=adapter_folders[name]))
    with pytest.raises(ResourceExhaustedError, match="all 2 of max_loras"):
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="three", path=adapter_folders["three"]))


def test_reset_drops_bindings_and_keeps_adapters(
    runner: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str]
):
    runner.load_lora("one", adapter_folders["one"])
    runner.set_lora_adapter_for_cache("a", active("one", adapter_folders))
    runner.reset()
    counts = runner.lora_metrics_snapshot()
    assert (counts["adapter_count"], counts["active_cache_bindings"]) == (1, 0)
    np.testing.assert_allclose(runner.prefill("a", TOKENS), oracles[None](TOKENS)[-1], atol=1e-4, rtol=0)
    runner.set_lora_adapter_for_cache("b", active("one", adapter_folders))
    np.testing.assert_allclose(runner.prefill("b", TOKENS), oracles["one"](TOKENS)[-1], atol=1e-4, rtol=0)


def test_loading_compiles_nothing_and_moves_no_other_adapter(
    runner: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str], compiles: list[str]
):
    runner.set_lora_adapter_for_cache("a", active("one", adapter_folders))
    runner.prefill("a", TOKENS)
    compiles.clear()
    for _ in range(3):
        runner.load_lora("two", adapter_folders["two"])
        runner.unload_lora("two")
    assert compiles == []
    logits = runner.decode("a", 7, len(TOKENS))
    np.testing.assert_allclose(logits, oracles["one"]([*TOKENS, 7])[-1], atol=1e-4, rtol=0)


def test_a_rank_that_is_too_large_is_refused(params: ParamTree, adapter_folders: dict[str, str]):
    with make_runner(params, replace(ENGINE, max_loras=1, max_lora_rank=2)) as runner:
        with pytest.raises(RequestValidationError, match="rank 3, more than max_lora_rank, which is 2"):
            runner.load_lora("one", adapter_folders["one"])
        assert runner.lora_metrics_snapshot()["adapter_count"] == 0
    with pytest.raises(ConfigError, match="both"):
        make_runner(params, replace(ENGINE, max_loras=1))


def test_a_device_failure_while_loading_changes_nothing(
    runner: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    runner.set_lora_adapter_for_cache("a", active("one", adapter_folders))

    def fail(*_: object) -> object:
        raise jax.errors.JaxRuntimeError("INTERNAL: injected")

    monkeypatch.setattr(runner._programs, "_steps", dict.fromkeys(runner._programs._steps, fail))
    with pytest.raises(DeviceError, match="injected"):
        runner.load_lora("two", adapter_folders["two"])
    monkeypatch.undo()
    assert runner.lora_metrics_snapshot()["adapter_count"] == 1
    np.testing.assert_allclose(runner.prefill("a", TOKENS), oracles["one"](TOKENS)[-1], atol=1e-4, rtol=0)

"""Adapters that are set as arrays: those of files, at once, in place of others, and no adapter that does not fit."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import models
from ferrum_jax.contract import ActiveLoraAdapter
from ferrum_jax.contract.errors import (
    AlreadyExistsError,
    DeviceError,
    InvalidParameterError,
    NotFoundError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
)
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.from_params import from_params
from ferrum_jax.models.adapters import LoraSpec, stack_specs
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CFG, REUSING, Oracle, adapter_tensors, emptied
from tests.tiers import by_default

TOKENS = list(range(1, 21))
ONE = ActiveLoraAdapter(name="tuned", path="")


def on_device(name: str) -> dict[str, jax.Array]:
    return {key: jnp.asarray(value) for key, value in adapter_tensors(name).items()}


def stacked(name: str, index: int) -> ParamTree:
    """The same adapter as a row of stacks of a larger rank, beside others."""
    wanted = models.specs.named_leaves(stack_specs(CFG, LoraSpec(max_loras=3, max_rank=4)))
    leaves = {key: np.random.RandomState(0).normal(size=leaf.shape).astype(np.float32) for key, leaf in wanted.items()}
    tensors = adapter_tensors(name)
    for module in models.adapters.projections(CFG):
        down, up = leaves[f"{module}.down"][index], leaves[f"{module}.up"][:, index]
        down[:], up[:] = 0, 0
        if (key := f"base_model.model.{module}.lora_A.weight") in tensors:
            down[:3], up[:, :3] = tensors[key], 2 * tensors[key.replace("lora_A", "lora_B")]
    specs = stack_specs(CFG, LoraSpec(max_loras=3, max_rank=4))
    return models.specs.from_names(specs, {key: jnp.asarray(leaf) for key, leaf in leaves.items()})


@pytest.fixture
def runner(reusing: ModelRunner) -> Iterator[ModelRunner]:
    yield reusing
    emptied(reusing)


def check(runner: ModelRunner, oracle: Oracle, adapter: ActiveLoraAdapter | None = ONE) -> None:
    runner.set_lora_adapter_for_cache("a", adapter)
    np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle(TOKENS)[-1], rtol=0, atol=1e-4)
    runner.release("a")


def test_arrays_in_either_form_serve_as_the_adapter_merged_into_the_weights(
    runner: ModelRunner, oracles: dict[str | None, Oracle]
):
    version = runner.params_version
    for name in ("one", "two"):
        runner.set_lora("tuned", on_device(name), scale=2.0)
        check(runner, oracles[name])
        check(runner, oracles[name])  # from known prefixes
        runner.set_lora("tuned", stacked(name, 1), index=1)
        check(runner, oracles[name])
        one = jax.tree.map(lambda leaf: leaf[1] if leaf.shape[0] == 3 else leaf[:, 1], stacked(name, 1))
        runner.set_lora("tuned", one)
        check(runner, oracles[name])
    check(runner, oracles[None], None)
    assert runner.params_version == version + 6
    assert runner.lora_metrics_snapshot()["adapter_count"] == 1


def test_values_that_change_compile_nothing_and_stay_on_the_device(
    runner: ModelRunner, oracles: dict[str | None, Oracle], compiles: list[str]
):
    tree = on_device("one")
    runner.set_lora("tuned", tree, scale=1.0)
    compiles.clear()
    with jax.transfer_guard("disallow"):
        runner.set_lora("tuned", tree, scale=2.0)
    assert compiles == []
    check(runner, oracles["one"])


def test_values_that_cannot_be_placed_change_nothing(
    runner: ModelRunner, oracles: dict[str | None, Oracle], monkeypatch: pytest.MonkeyPatch
):
    runner.set_lora("tuned", on_device("one"), scale=2.0)
    runner.set_lora_adapter_for_cache("live", ONE)
    runner.prefill("live", TOKENS)

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    monkeypatch.setattr(runner._programs, "_steps", dict.fromkeys(runner._programs._steps, fail))
    for name in ("tuned", "other"):
        with pytest.raises(DeviceError, match="injected"):
            runner.set_lora(name, on_device("two"), scale=2.0, keep_sequences=True)
    monkeypatch.undo()
    logits = runner.decode("live", 5, len(TOKENS))
    np.testing.assert_allclose(logits, oracles["one"]([*TOKENS, 5])[-1], rtol=0, atol=1e-4)
    assert runner.lora_metrics_snapshot()["adapter_count"] == 1


def test_a_sequence_that_is_bound_goes_on_where_it_is_to_be_kept(
    runner: ModelRunner, oracles: dict[str | None, Oracle]
):
    runner.set_lora("tuned", on_device("one"), scale=2.0)
    runner.set_lora_adapter_for_cache("live", ONE)
    old = runner.prefill("live", TOKENS)
    with pytest.raises(RequestValidationError, match="'tuned' is in use by"):
        runner.set_lora("tuned", on_device("two"), scale=2.0)
    check(runner, oracles["one"])
    runner.set_lora("tuned", on_device("two"), scale=2.0, keep_sequences=["live"])
    mixed = runner.decode("live", 5, len(TOKENS))
    assert np.abs(mixed - oracles["two"]([*TOKENS, 5])[-1]).max() > 1e-2  # over keys and values of the old one
    assert np.abs(mixed - oracles["one"]([*TOKENS, 5])[-1]).max() > 1e-2
    check(runner, oracles["two"])
    runner.truncate_kv("live", len(TOKENS) - 1)
    runner.set_lora("tuned", on_device("one"), scale=2.0, keep_sequences=True)
    np.testing.assert_allclose(runner.decode("live", TOKENS[-1], len(TOKENS) - 1), old, rtol=0, atol=1e-4)
    check(runner, oracles["one"])


def test_arrays_that_cannot_be_moved_change_nothing(
    runner: ModelRunner, oracles: dict[str | None, Oracle], monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    runner.set_lora("tuned", on_device("one"), scale=2.0)
    with monkeypatch.context() as patch:
        patch.setattr("ferrum_jax.executor.lora_arrays.joined", fail)
        with pytest.raises(DeviceError, match=r"cannot be moved to .*injected"):
            runner.set_lora("tuned", on_device("two"))
    check(runner, oracles["one"])


@pytest.mark.devices
def test_halves_may_lie_on_different_devices(runner: ModelRunner, oracles: dict[str | None, Oracle]):
    devices = jax.devices("cpu")
    spread = {name: jax.device_put(half, devices[at % 2]) for at, (name, half) in enumerate(on_device("one").items())}
    runner.set_lora("tuned", spread, scale=2.0)
    check(runner, oracles["one"])


def test_what_fits_no_row_or_no_model_is_refused_and_changes_nothing(
    runner: ModelRunner, oracles: dict[str | None, Oracle], adapter_folders: dict[str, str], params: ParamTree
):
    tree = on_device("one")
    runner.set_lora("tuned", tree, scale=2.0)
    key = next(iter(tree))
    other = key.replace("lora_A", "lora_B")
    wrong = [
        ({}, "expected a tree"),
        ({name: leaf for name, leaf in tree.items() if name != key}, "lacks one of its two halves"),
        (tree | {"x.lora_A.weight": jnp.ones((3, 3)), "x.lora_B.weight": jnp.ones((3, 3))}, "x is no projection"),
        (tree | {"x.lora_embedding_A": jnp.ones(3)}, "x.lora_embedding_A is unknown"),
        (tree | {key: jnp.ones((3, 25))}, r"has shapes \[3, 25\] and .* expected \[r, 40\]"),
        (tree | {key: [1.0]}, "expected arrays"),
        ({"model": None}, "there are none"),
        (tree | {key: tree[key].astype(complex)}, "has complex64 and float32, expected floating-point numbers"),
        (tree | {key.replace("lora_A.", "lora_A.default."): tree[key]}, "is there twice"),
        (tree | {key: tree[key].at[0, 0].set(jnp.nan)}, "_proj has values that are not finite in float32"),
        (tree | {other: tree[other].at[0, 0].set(3e38)}, "_proj has values that are not finite in float32"),
    ]
    for given, message in wrong:
        with pytest.raises(InvalidParameterError, match=message):
            runner.set_lora("tuned", given, scale=2.0)
    unfit: list[dict[str, Any]] = [
        {"scale": "x"},
        {"scale": float("nan")},
        {"scale": [1, 2]},
        {"scale": 10**400},
        {"scale": 1e39},
        {"index": 2**40},
        {"index": "0"},
        {"index": 1.5},
    ]
    for how in unfit:
        with pytest.raises(InvalidParameterError, match=rf"{next(iter(how))} is .*, expected"):
            runner.set_lora("tuned", tree, **how)
    wide = tree | {key: jnp.ones((5, tree[key].shape[1])), other: jnp.ones((tree[other].shape[0], 5))}
    with pytest.raises(RequestValidationError, match="rank 5, more than max_lora_rank, which is 4"):
        runner.set_lora("tuned", wide)
    with pytest.raises(InvalidParameterError, match="has 3 adapters, number 3 is not among them"):
        runner.set_lora("tuned", stacked("one", 1), index=3)
    with pytest.raises(NotFoundError, match=r"'nobody' is not loaded, \['tuned'\] are"):
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="nobody", path=""))
    with pytest.raises(AlreadyExistsError, match="is loaded from arrays"):
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="tuned", path=adapter_folders["two"]))
    runner.load_lora("file", adapter_folders["two"])
    with pytest.raises(AlreadyExistsError, match="unload_lora"):
        runner.set_lora("file", tree)
    with pytest.raises(ResourceExhaustedError, match="all 2 of max_loras"):
        runner.set_lora("third", tree)
    check(runner, oracles["one"])
    check(runner, oracles["two"], ActiveLoraAdapter(name="file", path=""))
    runner.unload_lora("tuned")
    bare = from_params(params, CFG, max_seqs=1, kv_capacity=16)
    with bare, pytest.raises(UnsupportedError, match="max_loras=0"):
        bare.set_lora("tuned", tree)


@pytest.mark.parametrize(
    "mesh", by_default([{"data": 2}, {"model": 2}, {"data": 2, "model": 2}], {"data": 2, "model": 2})
)
def test_a_mesh_takes_arrays_too(mesh: dict[str, int], params: ParamTree, oracles: dict[str | None, Oracle]):
    with from_params(params, CFG, mesh=mesh, engine=REUSING) as runner:
        for name in ("one", "two"):
            runner.set_lora("tuned", on_device(name), scale=2.0)
            for cache_id in ("a", "b"):
                runner.set_lora_adapter_for_cache(cache_id, ONE)
                logits = runner.prefill(cache_id, TOKENS)
                np.testing.assert_allclose(logits, oracles[name](TOKENS)[-1], rtol=0, atol=1e-4)
            with pytest.raises(RequestValidationError, match="in use"):
                runner.set_lora("tuned", on_device(name))
            for cache_id in ("a", "b"):
                runner.release(cache_id)

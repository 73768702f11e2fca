"""Interventions that are bound to single sequences, against the forward that keeps no cache."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.contract import KvSlotRequest
from ferrum_jax.contract.errors import (
    InvalidParameterError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
)
from ferrum_jax.executor.replicas import ReplicatedRunner
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.models import Edit, replace_with
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CFG, ENGINE

TOLERANCE = 2e-5  # float32 sums in another order
TOKENS = [5, 30, 2, 2, 17, 9, 36, 0, 1, 11, 4, 8, 15, 16, 23, 3, 7, 7, 12, 19]
VECTOR = np.random.RandomState(0).normal(size=CFG.hidden_size).astype(np.float32)
HEADS = np.random.RandomState(1).normal(size=(CFG.num_attention_heads, CFG.head_dim)).astype(np.float32)
STEER = {("resid_post", 0): Edit(add=VECTOR)}
PATCH = {("z", 1): replace_with(HEADS), ("mlp_post", 0): Edit(scale=np.float32(0.3))}
Oracle = Callable[..., NDArray[np.float32]]


@pytest.fixture(scope="module")
def changed(params: ParamTree) -> Oracle:
    """Logits of every token under interventions at the positions from `start` to `stop`."""

    def run(tokens: list[int], edits: dict, start: int = 0, stop: int = 10**6) -> NDArray[np.float32]:
        def within(edit: Edit) -> Any:
            def change(x: jax.Array, positions: jax.Array) -> jax.Array:
                shape = (*positions.shape, *(1,) * (x.ndim - 2))
                here = ((positions >= start) & (positions < stop)).reshape(shape)
                scale = 1.0 if edit.scale is None else jnp.asarray(edit.scale, jnp.float32)
                add = 0.0 if edit.add is None else jnp.asarray(edit.add)
                return jnp.where(here, x * scale + add, x)

            return change

        functions = {point: within(edit) for point, edit in edits.items()}
        forward = jax.jit(lambda ids: models.forward(params, ids, CFG, interventions=functions))
        return np.asarray(forward(jnp.asarray([tokens])))[0]

    return run


@pytest.fixture(scope="module")
def served(params: ParamTree) -> Iterator[ModelRunner]:
    engine = replace(ENGINE, prefix_cache=True, decode_rows=(4,), query_blocks=(3,))
    with ferrum_jax.from_params(params, CFG, engine=engine) as runner:
        yield runner


@pytest.fixture
def runner(served: ModelRunner) -> ModelRunner:
    served.reset()
    return served


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_rows_of_one_batch_have_each_their_own(runner: ModelRunner, changed: Oracle, oracle: Oracle):
    """Prompts in chunks beside decodes, then decodes together: every row is as alone."""
    expected = {"steered": changed(TOKENS, STEER), "patched": changed(TOKENS, PATCH, 3, 12), "plain": oracle(TOKENS)}
    runner.set_interventions("steered", STEER)
    runner.set_interventions("patched", PATCH, start=3, stop=12)
    close(runner.prefill("steered", TOKENS[:7]), expected["steered"][6])
    first, *_ = runner.unified_forward([("patched", TOKENS[:5], 0, False), ("steered", TOKENS[7:8], 7, True)])
    assert first is None
    close(runner.forward_verify("patched", TOKENS[5:10]), expected["patched"][5:10])
    close(runner.prefill("plain", TOKENS[:9]), expected["plain"][8])
    at = {"steered": 8, "patched": 10, "plain": 9}
    for _ in range(8):
        rows = [(name, TOKENS[length], length) for name, length in at.items()]
        for (name, _, position), logits in zip(rows, runner.decode_batch(rows), strict=True):
            close(logits, expected[name][position])
            at[name] = position + 1


def test_other_values_compile_nothing(runner: ModelRunner, changed: Oracle, compiles: list[str]):
    runner.set_interventions("a", STEER)
    runner.prefill("a", TOKENS[:4])
    runner.release("a")
    other = {("resid_post", 0): Edit(add=VECTOR[::-1], scale=np.float32(0.5))}
    expected = changed(TOKENS[:4], other)[3]
    compiles.clear()
    runner.set_interventions("b", other)
    found = runner.prefill("b", TOKENS[:4])
    assert compiles == []
    close(found, expected)


def test_what_was_computed_under_interventions_is_nobody_elses_prefix(
    runner: ModelRunner, changed: Oracle, oracle: Oracle
):
    runner.prefill("before", TOKENS)
    runner.release("before")
    runner.set_interventions("a", STEER)
    close(runner.prefill("a", TOKENS), changed(TOKENS, STEER)[-1])
    close(runner.prefill("plain", TOKENS), oracle(TOKENS)[-1])
    runner.release("a")
    runner.release("plain")
    close(runner.prefill("a", TOKENS), oracle(TOKENS)[-1])  # its release has unbound it


def test_a_fork_and_a_capture_are_changed_alike(runner: ModelRunner, changed: Oracle):
    expected = changed(TOKENS, STEER)
    runner.set_interventions("a", STEER)
    runner.prefill("a", TOKENS[:6])
    runner.fork("a", "b")
    runner.release("a")
    found = runner.capture("b", TOKENS[6:9], points=[("resid_post", 0), "blocks.1.hook_resid_pre"])
    close(found.logits, expected[6:9])
    np.testing.assert_array_equal(found.points["resid_post", 0], found.points["resid_pre", 1])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({("z", 9): Edit()}, InvalidParameterError, "the layer is 9"),
        ({("z", 0): Edit(add=np.zeros(3))}, RequestValidationError, r"'z' has shape \[3\], expected one token's"),
        ({("z", 0): Edit(add=[0.0, 1.0, 2.0])}, RequestValidationError, r"'z' has shape \[3\], expected one token's"),
        ({("z", 0): Edit(add=[HEADS, HEADS[0]])}, InvalidParameterError, "expected an array of numbers"),
        ({("z", 0): Edit(scale={"a": 1.0})}, InvalidParameterError, "expected an array of numbers"),
        ({("z", 0): Edit(add=np.array("x"))}, InvalidParameterError, "expected an array of numbers"),
        ({("z", 0): Edit(scale=np.array([None]))}, InvalidParameterError, "expected an array of numbers"),
        ({("z", 0): lambda x, _: x}, UnsupportedError, "is a function"),
        ({("pattern", 0): Edit(scale=np.float32(0))}, UnsupportedError, "has no edits of single tokens"),
        (
            {("z", 0): Edit(add=1e300)},
            RequestValidationError,
            r"'z' has 1e\+300, expected numbers of float32, or inf",
        ),
    ],
)
def test_what_cannot_be_bound_is_refused(runner: ModelRunner, oracle: Oracle, given: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        runner.set_interventions("a", given)
    with pytest.raises(RequestValidationError, match="stop is 1, expected at least start, which is 3"):
        runner.set_interventions("a", STEER, start=3, stop=1)
    close(runner.prefill("a", TOKENS), oracle(TOKENS)[-1])
    with pytest.raises(RequestValidationError, match="'a' has 20 tokens, which were computed without"):
        runner.set_interventions("a", STEER)


def test_an_edit_is_as_it_was_when_it_was_bound(runner: ModelRunner, changed: Oracle):
    buffer = VECTOR.copy()
    for name in ("a", "b"):
        runner.set_interventions(name, {("resid_post", 0): Edit(add=buffer)})
        buffer += 1.0
    for at, name in enumerate(("a", "b")):
        close(runner.prefill(name, TOKENS), changed(TOKENS, {("resid_post", 0): Edit(add=VECTOR + at)})[-1])
    gone = jnp.asarray(VECTOR)
    gone.delete()
    with pytest.raises(InvalidParameterError, match="'resid_post' has an array that was donated or deleted"):
        runner.set_interventions("c", {("resid_post", 0): Edit(add=gone)})


@pytest.mark.parametrize("second", [Edit(add=HEADS), Edit(scale=np.float32(0.5)), replace_with(HEADS), Edit()])
def test_edits_of_one_layer_and_of_all_are_done_in_their_order(runner: ModelRunner, params: ParamTree, second: Edit):
    all_layers = Edit(scale=np.full((CFG.num_hidden_layers, 1, 1), 0.7), add=np.stack([HEADS + 1, HEADS - 1]))
    for edits in ({("z", None): all_layers, ("z", 1): second}, {("z", 1): second, ("z", None): all_layers}):
        runner.set_interventions("a", edits)
        expected = models.forward(params, jnp.asarray([TOKENS]), CFG, interventions=edits, logits="last")[0, 0]
        close(runner.prefill("a", TOKENS), expected)
        runner.release("a")


def test_as_many_sequences_as_there_are_slots_can_be_changed(runner: ModelRunner):
    for name in range(4):
        runner.set_interventions(f"{name}", STEER)
    with pytest.raises(ResourceExhaustedError, match="all 4 sequences have some"):
        runner.set_interventions("5", STEER)
    runner.set_interventions("3", None)
    runner.set_interventions("5", STEER)


def test_a_fork_takes_nobodys_interventions_and_leaves_nothing_when_it_is_refused(runner: ModelRunner, oracle: Oracle):
    """Otherwise a copy would go on under edits that its first tokens never had, and prefixes would hold its blocks."""
    runner.prefill("a", TOKENS[:9])
    runner.set_interventions("b", STEER)
    with pytest.raises(RequestValidationError, match="'b' has interventions, which a copy of 'a' was computed without"):
        runner.fork("a", "b")
    for name in ("c", "d", "e"):
        runner.set_interventions(name, STEER)
    runner.prefill("e", TOKENS[:3])
    with pytest.raises(ResourceExhaustedError, match="all 4 sequences have some"):
        runner.fork("e", "f")
    assert runner.kv_len("f") in (None, 0)
    close(runner.prefill("a", TOKENS[9:]), oracle(TOKENS)[-1])


def test_what_is_released_leaves_no_prefix_behind(runner: ModelRunner):
    for _ in range(3):
        runner.set_interventions("a", STEER)
        runner.prefill("a", TOKENS)
        runner.reserve_kv_slots([KvSlotRequest(cache_id="a", target_len=24)])
        runner.decode("a", 1, 20)
        runner.release("a")
    snapshot = runner.kv_slot_capacity_snapshot()
    assert snapshot.free_blocks == snapshot.total_blocks
    assert runner._pipeline.table.prefixes is not None
    assert len(runner._pipeline.table.prefixes) == 0


def test_positions_past_every_sequence_and_edits_of_no_real_numbers(runner: ModelRunner, oracle: Oracle):
    runner.set_interventions("a", STEER, start=2**40, stop=2**50)
    close(runner.prefill("a", TOKENS), oracle(TOKENS)[-1])
    with pytest.raises(RequestValidationError, match="expected real numbers"):
        runner.set_interventions("b", {("z", 0): Edit(add=np.array(1j))})


def test_sequences_on_replicas_have_each_their_own(params: ParamTree, changed: Oracle, oracle: Oracle):
    engine = replace(ENGINE, prefix_cache=True)
    with ferrum_jax.from_params(params, CFG, engine=engine, mesh={"data": 2}) as replicas:
        close(replicas.prefill("plain", TOKENS), oracle(TOKENS)[-1])
        expected = {name: changed(TOKENS, edits) for name, edits in {"a": STEER, "b": PATCH, "c": STEER}.items()}
        for name, edits in {"a": STEER, "b": PATCH, "c": STEER}.items():
            replicas.set_interventions(name, edits)
        replicas.set_interventions("dropped", PATCH)
        replicas.set_interventions("dropped", None)
        with pytest.raises(UnsupportedError, match="is a function"):
            replicas.set_interventions("c", {("z", 0): lambda x, _: x})  # and leaves what it has
        for name, logits in expected.items():
            close(replicas.prefill(name, TOKENS[:-1]), logits[-2])
        assert isinstance(replicas, ReplicatedRunner)
        assert len({replicas.replica_of(name) for name in expected}) == 2
        rows = [(name, TOKENS[-1], len(TOKENS) - 1) for name in expected]
        for (name, *_), logits in zip(rows, replicas.decode_batch(rows), strict=True):
            close(logits, expected[name][-1])
            replicas.release(name)
        close(replicas.prefill("dropped", TOKENS), oracle(TOKENS)[-1])
        close(replicas.prefill("a", TOKENS), oracle(TOKENS)[-1])


def test_as_many_sequences_as_all_replicas_have_slots_can_be_changed(params: ParamTree, changed: Oracle):
    names, expected = "abcdefgh", changed(TOKENS, STEER)[-1]
    with ferrum_jax.from_params(params, CFG, engine=ENGINE, mesh={"data": 2}) as replicas:
        assert isinstance(replicas, ReplicatedRunner)
        assert replicas.plan.max_seqs == len(names)
        for name in names:
            replicas.set_interventions(name, STEER)
        for logits in replicas.unified_forward([(name, TOKENS, 0, True) for name in names]):
            close(logits, expected)
        with pytest.raises(ResourceExhaustedError, match="need 1 row of interventions"):
            replicas.set_interventions("i", STEER)
        assert replicas.replica_of("i") is None
        replicas.release("a")
        replicas.set_interventions("i", STEER)
        replicas.set_interventions("i", None)
        assert replicas.replica_of("i") is None


def test_interventions_that_the_device_has_no_memory_for_change_nothing(
    runner: ModelRunner, changed: Oracle, monkeypatch: pytest.MonkeyPatch
):
    runner.prefill("other", TOKENS)
    runner.set_interventions("a", STEER)

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    with monkeypatch.context() as patch:
        patch.setattr(type(runner.placed.placement), "put", fail)
        with pytest.raises(ResourceExhaustedError, match="injected"):
            runner.prefill("a", TOKENS)
    assert (runner.kv_len("a"), runner.kv_len("other")) == (None, len(TOKENS))
    np.testing.assert_allclose(runner.prefill("a", TOKENS), changed(TOKENS, STEER)[-1], atol=TOLERANCE, rtol=0)

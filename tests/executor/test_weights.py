"""Other weights in a runner that goes on: nothing compiles, no old prefix is found, the KV may be away meanwhile."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding
from numpy.typing import NDArray

from ferrum_jax import LLM, LlmExecutor, models
from ferrum_jax.config import LAYOUTS
from ferrum_jax.contract import ExecutorState
from ferrum_jax.contract.errors import CancelledError, DeviceError, InvalidParameterError, RequestValidationError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.from_params import from_params
from ferrum_jax.generate.rollout import kv_spec
from ferrum_jax.kvcache import state
from ferrum_jax.models import Batch, Rows
from ferrum_jax.models.layout import lay_out
from ferrum_jax.models.quantisation import quantise
from ferrum_jax.models.specs import ParamTree
from tests import tiny
from tests.executor.conftest import CFG, NARROW, Oracle, emptied, make_runner

TOKENS = list(range(1, 21))
FORWARD = jax.jit(models.family(CFG).forward, static_argnums=3)
OracleOf = Callable[[ParamTree], Oracle]


@pytest.fixture(scope="module")
def others(params: ParamTree) -> ParamTree:
    return jax.tree.map(lambda leaf: (leaf * 1.1).block_until_ready(), params)


@pytest.fixture
def runner(reusing: ModelRunner, params: ParamTree) -> Iterator[ModelRunner]:
    yield reusing
    reusing.reset()
    reusing.set_params(params)


def test_new_weights_answer_at_once_compile_nothing_and_find_no_old_prefix(
    runner: ModelRunner, params: ParamTree, others: ParamTree, oracle_of: OracleOf, compiles: list[str]
):
    expected = [oracle_of(weights)(TOKENS)[-1] for weights in (params, others, params)]
    hits, version = runner.cache_metrics_snapshot()["hits"], runner.params_version
    runner.prefill("a", TOKENS)
    runner.release("a")
    runner.prefill("warm", TOKENS)
    assert runner.cache_metrics_snapshot()["hits"] == hits + 1
    runner.release("warm")
    compiles.clear()
    for weights, wanted in zip((params, others, params), expected, strict=True):
        runner.set_params(weights)
        np.testing.assert_allclose(runner.prefill("a", TOKENS), wanted, rtol=0, atol=1e-4)
        runner.release("a")
    assert compiles == []
    assert runner.params_version == version + 3
    assert runner.cache_metrics_snapshot()["hits"] == hits + 1
    assert runner.params is params


def test_weights_are_taken_without_a_copy(runner: ModelRunner, others: ParamTree):
    runner.set_params(others)
    for mine, theirs in zip(jax.tree.leaves(runner.params), jax.tree.leaves(others), strict=True):
        assert mine.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()


@pytest.mark.parametrize("where", ["host memory", "another order of axes"])
def test_weights_are_moved_to_where_steps_read_them(
    runner: ModelRunner, others: ParamTree, oracle_of: OracleOf, compiles: list[str], where: str
):
    device = runner.device

    def away(leaf: jax.Array) -> jax.Array:
        if where == "host memory":
            return jax.device_put(leaf, SingleDeviceSharding(device, memory_kind="pinned_host"))
        return jax.device_put(leaf, Format(Layout(tuple(reversed(range(leaf.ndim)))), SingleDeviceSharding(device)))

    given = jax.tree.map(away, others)
    runner.set_params(given)
    expected = oracle_of(others)(TOKENS)[-1]
    compiles.clear()
    np.testing.assert_allclose(runner.prefill("a", TOKENS), expected, rtol=0, atol=1e-4)
    assert compiles == []
    with from_params(given, CFG, engine=NARROW) as served:
        np.testing.assert_allclose(served.prefill("a", TOKENS), expected, rtol=0, atol=1e-4)


def _changed(params: ParamTree, leaf: object) -> ParamTree:
    leaves = models.specs.named_leaves(params) | {"model.norm.weight": leaf}
    return models.specs.from_names(models.family(CFG).param_specs(CFG), leaves)


def test_weakly_typed_weights_are_served_as_others(params: ParamTree, oracle_of: Callable[[ParamTree], Oracle]):
    weak = _changed(params, jnp.full(24, 1.5))
    strong = _changed(params, jnp.full(24, 0.5, jnp.float32))
    for first, second in ((weak, strong), (strong, weak)):
        with from_params(first, CFG, engine=NARROW) as runner:
            np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle_of(first)(TOKENS)[-1], rtol=0, atol=1e-4)
            runner.reset()
            runner.set_params(second)
            np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle_of(second)(TOKENS)[-1], rtol=0, atol=1e-4)


def test_weights_that_differ_in_more_than_values_are_refused_and_change_nothing(
    runner: ModelRunner, params: ParamTree, oracle: Oracle
):
    gone = jnp.ones(24)
    gone.delete()
    wrong = [
        (jax.random.key(0), r"model.norm.weight is key"),
        (jnp.ones(25), r"model.norm.weight is float32\[25\] on .*, expected float32\[24\]"),
        (jnp.ones(24, jnp.float16), "float16"),
        (np.ones(24, np.float32), "a ndarray"),
        (gone, "donated or deleted"),
    ]
    for leaf, message in wrong:
        with pytest.raises(InvalidParameterError, match=message):
            runner.set_params(_changed(params, leaf))
    with pytest.raises(InvalidParameterError, match="lm_head is unknown"):
        runner.set_params(params | {"lm_head": jnp.ones(3)})
    with pytest.raises(InvalidParameterError, match=r"model\.\S+ is missing.* and \d+ more"):
        runner.set_params({})
    assert runner.params is params
    np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle(TOKENS)[-1], rtol=0, atol=1e-4)


def test_weights_are_refused_while_a_sequence_is_live(runner: ModelRunner, others: ParamTree, oracle: Oracle):
    runner.prefill("a", TOKENS)
    for refused in (lambda: runner.set_params(others), runner.free_kv):
        with pytest.raises(RequestValidationError, match="1 sequences are live, 'a' among them"):
            refused()
    wrongs: tuple[Any, ...] = ("abc", None, 1)  # the text has 'a' in it
    for keep in wrongs:
        with pytest.raises(RequestValidationError, match=r"keep_sequences is .* expected True, False or cache ids"):
            runner.set_params(others, keep_sequences=keep)
    assert runner.kv_len("a") == len(TOKENS)
    np.testing.assert_allclose(runner.decode("a", 30, len(TOKENS)), oracle([*TOKENS, 30])[-1], rtol=0, atol=1e-4)
    runner.reset()
    runner.set_params(others)


def test_a_sequence_that_is_kept_goes_on_over_its_old_keys_and_values_and_is_no_prefix(
    runner: ModelRunner, params: ParamTree, others: ParamTree, oracle_of: OracleOf
):
    new = oracle_of(others)
    mixed = mixed_logits(params, others, TOKENS, [30, 31, 32, 33, 34, 35, 36, 1, 2])
    runner.prefill("a", TOKENS)
    runner.fork("a", "copy")
    with pytest.raises(RequestValidationError, match="1 sequences are live, 'copy' among them"):
        runner.set_params(others, keep_sequences=["a"])
    runner.set_params(others, keep_sequences=True)
    for cache_id in ("a", "copy"):  # of which one must not take the other's block, or be one's prefix
        for at, wanted in enumerate(mixed):
            token = [30, 31, 32, 33, 34, 35, 36, 1, 2][at]
            np.testing.assert_allclose(runner.decode(cache_id, token, 20 + at), wanted, rtol=0, atol=1e-4)
    whole = [*TOKENS, 30, 31, 32, 33, 34, 35, 36, 1, 2]
    hits = runner.cache_metrics_snapshot()["hits"]
    np.testing.assert_allclose(runner.prefill("new", whole), new(whole)[-1], rtol=0, atol=1e-4)
    assert runner.cache_metrics_snapshot()["hits"] == hits
    runner.truncate_kv("a", 3)  # in a block that is its own, as "new" has entered the same tokens
    mixed = mixed_logits(params, others, TOKENS[:3], whole[3:])
    np.testing.assert_allclose(runner.prefill("a", whole[3:]), mixed[-1], rtol=0, atol=1e-4)
    for cache_id in ("a", "copy", "new"):
        runner.release(cache_id)
    runner.prefill("again", whole)
    assert runner.cache_metrics_snapshot()["hits"] == hits + 1
    assert runner.kv_slot_capacity_snapshot().free_blocks == 18 - 4


def mixed_logits(before: ParamTree, after: ParamTree, old: list[int], new: list[int]) -> NDArray[np.float32]:
    """Logits of `new` by the weights `after`, over keys and values of `old` by the weights `before`."""
    spec = kv_spec(before, CFG, rows=1, positions=len(old) + len(new))
    kv = state.empty(spec)
    for weights, tokens, start in ((before, old, 0), (after, new, len(old))):
        start, count, table = (np.full(1, value, np.int32) for value in (start, len(tokens), 0))
        rows = Rows(tokens=np.array([tokens], np.int32), lengths=start, counts=count, tables=table[:, None])
        step = jax.tree.map(jnp.asarray, Batch(groups=(rows,), logit_rows=np.arange(len(tokens), dtype=np.int32)))
        logits, kv, _ = FORWARD(weights, kv, step, CFG)
    return np.asarray(logits)


def test_what_a_sliding_window_lost_is_not_computed_anew_by_other_weights(
    shared_runner: ModelRunner, params: ParamTree, others: ParamTree
):
    runner = emptied(shared_runner)
    runner.prefill("a", TOKENS)
    runner.fork("a", "copy")  # whose window is empty
    runner.set_params(others, keep_sequences=True)
    runner.decode("a", 30, 20)
    with pytest.raises(RequestValidationError, match="'copy' was kept while weights changed"):
        runner.decode("copy", 30, 20)
    assert runner.kv_len("copy") == 20
    runner.reset()
    runner.set_params(params)


def test_the_kv_can_come_back_within_what_jax_traces(runner: ModelRunner, oracle: Oracle):
    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        runner.free_kv()
        runner.allocate_kv()
        return x

    traced(jnp.zeros(()))
    np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle(TOKENS)[-1], rtol=0, atol=1e-4)
    np.testing.assert_allclose(runner.decode("a", 30, len(TOKENS)), oracle([*TOKENS, 30])[-1], rtol=0, atol=1e-4)


def test_the_kv_can_be_away_while_weights_are_set(
    runner: ModelRunner, others: ParamTree, oracle_of: OracleOf, compiles: list[str]
):
    runner.prefill("a", TOKENS)
    runner.release("a")
    compiles.clear()
    kv, executor = jax.tree.leaves(runner._device.kv), LlmExecutor(runner)
    runner.free_kv()
    assert all(leaf.is_deleted() for leaf in kv)
    assert runner.state is ExecutorState.Initializing
    assert not executor.status().is_ready
    for call in (lambda: runner.prefill("a", [1]), lambda: runner.kv_len("a"), runner.free_kv):
        with pytest.raises(RequestValidationError, match="the KV is freed"):
            call()
    runner.set_params(others)
    runner.allocate_kv()
    runner.allocate_kv()  # which is there
    assert runner.state is ExecutorState.Ready
    assert executor.status().is_ready
    found = runner.prefill("a", TOKENS)
    assert compiles == []
    np.testing.assert_allclose(found, oracle_of(others)(TOKENS)[-1], rtol=0, atol=1e-4)
    runner.release("a")
    runner.free_kv()
    runner.reset()
    assert runner.kv_slot_capacity_snapshot().free_blocks == 18


def test_a_runner_may_be_closed_while_its_kv_is_away(params: ParamTree):
    with make_runner(params) as runner:
        runner.free_kv()
    for call in (lambda: runner.set_params(params), runner.allocate_kv):
        with pytest.raises(CancelledError):
            call()


@pytest.mark.parametrize("layout", ["fused", "scanned"])
def test_weights_may_be_set_in_another_layout_than_they_are_served_in(
    layout: str, params: ParamTree, others: ParamTree, oracle_of: OracleOf
):
    with from_params(lay_out(params, CFG, layout), CFG, engine=NARROW) as runner:
        runner.set_params(others)
        tiny.assert_same_tree(runner.params, lay_out(others, CFG, layout))
        np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle_of(others)(TOKENS)[-1], rtol=0, atol=1e-4)
        runner.release("a")
        there, version = runner.params, runner.params_version
        for wrong, message in (
            (_changed(params, jnp.ones(25)), r"model.norm.weight is float32\[25\], expected float32\[24\]"),
            (_changed(params, np.ones(24, np.float32)), "model.norm.weight is a ndarray"),
            (params | {"lm_head": jnp.ones(3)}, "lm_head is unknown"),
            (
                params | {"model": params["model"] | {"layers": params["model"]["layers"][:1]}},
                r"layers\.1\S+ is missing",
            ),
            (params | {"model": params["model"] | {"layers": []}}, "is missing"),
        ):
            with pytest.raises(InvalidParameterError, match=message):
                runner.set_params(wrong)
        assert (runner.params, runner.params_version) == (there, version)


def test_plain_weights_are_no_quantised_ones_in_any_layout(params: ParamTree):
    kept = lay_out(quantise(params, CFG, "int8"), CFG, "scanned")
    with from_params(kept, CFG, engine=NARROW) as runner:
        with pytest.raises(InvalidParameterError, match="kept in fewer bits"):
            runner.set_params(params)
        again = quantise(jax.tree.map(lambda leaf: leaf * 2, params), CFG, "int8")
        runner.set_params(again)
        tiny.assert_same_tree(runner.params, lay_out(again, CFG, "scanned"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_every_layout_pass_a_guard_and_none_is_copied_while_a_sequence_is_live(
    layout: str, params: ParamTree, compiles: list[str], monkeypatch: pytest.MonkeyPatch
):
    with from_params(lay_out(params, CFG, layout), CFG, engine=NARROW) as runner:
        for given in LAYOUTS:
            own = lay_out(params, CFG, given)
            runner.set_params(own)
            compiles.clear()
            with jax.transfer_guard("disallow"):
                runner.set_params(own)
            assert compiles == []
            runner.prefill("a", TOKENS)
            with monkeypatch.context() as patched:
                patched.setattr(runner._device, "check_params", lambda _: pytest.fail("it was copied"))
                with pytest.raises(RequestValidationError, match="release them before"):
                    runner.set_params(own)
            runner.release("a")


def _trained(params: ParamTree) -> ParamTree:
    """A trainer's step, which takes over the memory of the parameters it is given."""
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 1.1, tree), donate_argnums=0)
    return jax.block_until_ready(step(params))


def test_a_trainer_may_donate_the_parameters_and_set_the_new_ones(
    runner: ModelRunner, params: ParamTree, others: ParamTree, oracle_of: OracleOf
):
    mine = jax.tree.map(jnp.copy, params)
    expected = oracle_of(others)(TOKENS)[-1]
    runner.set_params(mine)
    runner.prefill("a", TOKENS)
    new = _trained(mine)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(mine))
    message = "the served parameters were donated to another function: call set_params with the new ones"
    for call in (
        lambda: runner.decode("a", 3, 20),
        lambda: runner.prefill("b", TOKENS),
        lambda: LLM.from_model(runner).generate([TOKENS]),
    ):
        with pytest.raises(RequestValidationError, match=message):
            call()
    assert (runner.state, runner.kv_len("a"), runner.kv_len("b")) == (ExecutorState.Ready, len(TOKENS), None)
    assert runner.memory_usage().allocated_bytes > 0
    with pytest.raises(InvalidParameterError, match="an array that was donated or deleted, expected float32"):
        runner.set_params(mine, keep_sequences=True)
    runner.release("a")
    runner.set_params(new)
    np.testing.assert_allclose(runner.prefill("a", TOKENS), expected, rtol=0, atol=1e-4)


def test_a_function_makes_new_parameters_in_the_memory_of_the_served_ones(
    runner: ModelRunner, params: ParamTree, others: ParamTree, oracle_of: OracleOf
):
    mine, version = jax.tree.map(jnp.copy, params), runner.params_version
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(mine)]
    runner.set_params(mine)
    runner.prefill("a", TOKENS)
    with pytest.raises(RequestValidationError, match="release them before"):
        runner.set_params(_trained)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(mine))
    runner.set_params(_trained, keep_sequences=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(mine))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(runner.params)] == places
    assert runner.params_version == version + 2
    runner.decode("a", 3, len(TOKENS))
    runner.release("a")
    np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle_of(others)(TOKENS)[-1], rtol=0, atol=1e-4)
    runner.release("a")


def test_a_function_of_the_served_parameters_that_fails_changes_nothing_unless_they_were_donated(
    runner: ModelRunner, params: ParamTree, oracle: Oracle
):
    def fails(served: ParamTree) -> ParamTree:
        served["model"]["norm"] = None
        raise ZeroDivisionError

    mine = jax.tree.map(jnp.copy, params)
    runner.set_params(mine)
    version = runner.params_version
    with pytest.raises(ZeroDivisionError):
        runner.set_params(fails)
    for wrong in (lambda served: served["model"], lambda served: None):
        with pytest.raises(InvalidParameterError, match="these weights cannot be set"):
            runner.set_params(wrong)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle(TOKENS)[-1], rtol=0, atol=1e-4)
    runner.release("a")
    with pytest.raises(InvalidParameterError, match="these weights cannot be set"):
        runner.set_params(lambda served: _trained(served)["model"])
    for call in (lambda: runner.prefill("a", TOKENS), lambda: runner.set_params(_trained)):
        with pytest.raises(RequestValidationError, match="call set_params with the new ones"):
            call()
    assert runner.params_version == version
    runner.set_params(params)
    np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle(TOKENS)[-1], rtol=0, atol=1e-4)


def test_some_parameters_that_are_donated_between_plan_and_step_are_named_and_a_reset_helps(
    runner: ModelRunner, params: ParamTree, monkeypatch: pytest.MonkeyPatch, oracle: Oracle
):
    mine = jax.tree.map(jnp.copy, params)
    runner.set_params(mine)
    mine["model"]["norm"]["weight"].delete()
    with monkeypatch.context() as patch:
        patch.setattr(runner._device, "check_params_live", lambda: None)  # as if it had come too early
        with pytest.raises(DeviceError, match="were donated to another function"):
            runner.prefill("a", TOKENS)
    runner.reset()
    runner.set_params(params)
    np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle(TOKENS)[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", [None, "fused", "scanned"])
def test_new_parameters_in_the_trainers_layout_follow_those_it_donated(
    layout: str | None, params: ParamTree, others: ParamTree, oracle_of: OracleOf
):
    mine = jax.tree.map(jnp.copy, params if layout is None else lay_out(params, CFG, layout))
    with from_params(mine, CFG, engine=NARROW) as runner:
        new = _trained(mine)
        runner.set_params(lay_out(new, CFG, "checkpoint"))  # converted, while those served are gone
        wanted = oracle_of(others)(TOKENS)[-1]
        np.testing.assert_allclose(runner.prefill("a", TOKENS), wanted, rtol=0, atol=1e-4)

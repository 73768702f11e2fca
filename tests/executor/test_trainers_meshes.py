"""A trainer's parameters, divided over a mesh of its own, become a runner's: at first, and with every update."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ferrum_jax
from ferrum_jax.config import LAYOUTS
from ferrum_jax.contract import ActiveLoraAdapter
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.models.adapters import LoraSpec, stack_specs
from ferrum_jax.models.layout import lay_out
from ferrum_jax.models.specs import ParamTree, initialise
from ferrum_jax.weights.foreign import from_tree, to_tree
from tests import tiny
from tests.executor.test_mesh import ENGINE, agree
from tests.meshes import mesh_of, model_on
from tests.tiers import by_default
from tests.weights.test_foreign import RULES

pytestmark = pytest.mark.devices

NAME, TOKENS = "llama31", [5, 3, 8, 1, 1, 7]


def trained(kind: str, seed: int) -> ParamTree:
    mesh = mesh_of(kind)
    _, divided, _ = model_on(mesh, NAME)
    other = tiny.tiny_params(tiny.CONFIGS[NAME], seed)
    return jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), other, divided)


@pytest.mark.parametrize("kind", by_default(("explicit", "auto"), "explicit"))
@pytest.mark.parametrize("served", by_default((None, {"model": 2}, {"model": 4}), None, {"model": 4}))
def test_weights_on_a_trainers_mesh_are_served_without_passing_through_the_host(
    kind: str, served: dict[str, int] | None, compiles: list[str]
):
    cfg, (first, second) = tiny.model_config(NAME), (trained(kind, seed) for seed in (1, 2))
    alone, other = (tiny.tiny_params(tiny.CONFIGS[NAME], seed) for seed in (1, 2))
    start = alone if served is None else first
    with (
        ferrum_jax.from_params(start, cfg, mesh=served, engine=ENGINE) as runner,
        ferrum_jax.from_params(other, cfg, engine=ENGINE) as expected,
    ):
        runner.prefill("a", TOKENS)
        runner.release("a")
        with jax.transfer_guard_device_to_host("disallow"), jax.transfer_guard_host_to_device("disallow"):
            runner.set_params(second)
        answer = expected.prefill("a", TOKENS)
        compiles.clear()
        agree(runner.prefill("a", TOKENS), answer)
        assert compiles == []
        tiny.assert_same_tree(runner.params, other)


@pytest.mark.parametrize("spec", [P(), P("model")])
def test_weights_in_host_memory_are_served_by_replicas(spec: P):
    cfg, params, other = tiny.model_config(NAME), *(tiny.tiny_params(tiny.CONFIGS[NAME], seed) for seed in (1, 2))
    mesh = jax.make_mesh((2,), ("model",))

    def away(leaf: jax.Array) -> jax.Array:
        own = spec if leaf.shape[0] % 2 == 0 else P()
        return jax.device_put(leaf, NamedSharding(mesh, own, memory_kind="pinned_host"))

    with (
        ferrum_jax.from_params(params, cfg, mesh={"data": 2}, engine=ENGINE) as runner,
        ferrum_jax.from_params(other, cfg, engine=ENGINE) as expected,
    ):
        runner.set_params(jax.tree.map(away, other))
        answer = expected.prefill("a", TOKENS)
        for name in ("a", "b"):
            agree(runner.prefill(name, TOKENS), answer)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_calls_inside_a_mesh_that_the_caller_has_set_are_as_outside(kind: AxisType):
    params, cfg = tiny.tiny_params(tiny.CONFIGS[NAME]), tiny.model_config(NAME)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    with ferrum_jax.from_params(params, cfg, engine=ENGINE) as expected:
        answer, later = expected.prefill("a", TOKENS), expected.decode("a", 1, len(TOKENS))
    for served in (None, {"model": 2}):
        with jax.set_mesh(mesh), ferrum_jax.from_params(params, cfg, mesh=served, engine=ENGINE) as runner:
            agree(runner.prefill("a", TOKENS), answer)
            runner.fork("a", "b")
            agree([runner.decode(key, 1, len(TOKENS)) for key in "ab"], [later, later])
            runner.kv_cache("a", 0)
            runner.reset()
            runner.set_params(params)
            tiny.assert_same_tree(runner.params, params)
            agree(runner.prefill("a", TOKENS), answer)
            assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh


@pytest.mark.parametrize("served", [None, {"model": 2}])
def test_adapters_that_a_trainers_mesh_divides_are_set(served: dict[str, int] | None):
    params, cfg = tiny.tiny_params(tiny.CONFIGS[NAME]), tiny.model_config(NAME)
    stacks = initialise(stack_specs(cfg, LoraSpec(max_loras=1, max_rank=4)), jax.random.key(1), "float32")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def divided(path: Any, leaf: jax.Array) -> jax.Array:
        spec = P(None, None, "model") if path[-1].key == "down" else P("model")
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    bound = ActiveLoraAdapter(name="x", path="")
    with ferrum_jax.from_params(params, cfg, mesh=served, engine=ENGINE, max_loras=1, max_lora_rank=4) as runner:
        answers = []
        for tree in (stacks, jax.tree_util.tree_map_with_path(divided, stacks)):
            runner.set_lora("x", tree)
            runner.set_lora_adapter_for_cache("a", bound)
            answers.append(runner.prefill("a", TOKENS))
            runner.release("a")
            runner.unload_lora("x")
        np.testing.assert_array_equal(*answers)


def on_mesh(tree: Any, axis: int) -> Any:
    """Divides one axis of every array over explicit axes of a mesh, where the axis divides it."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def put(leaf: jax.Array) -> jax.Array:
        at = axis % leaf.ndim
        spec = P(*(None,) * at, "model") if leaf.shape[at] % 2 == 0 else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_conversions_take_and_keep_what_explicit_axes_divide(axis: int):
    params, cfg = tiny.tiny_params(tiny.CONFIGS[NAME]), tiny.model_config(NAME)
    foreign = to_tree(params, cfg, RULES)
    jax.tree.map(np.testing.assert_array_equal, to_tree(on_mesh(params, axis), cfg, RULES), foreign)
    tiny.assert_same_tree(jax.jit(lambda tree: from_tree(tree, cfg, RULES))(on_mesh(foreign, axis)), params)
    for given in LAYOUTS:
        divided = on_mesh(lay_out(params, cfg, given), axis)
        for wanted in LAYOUTS:
            found = lay_out(divided, cfg, wanted)
            tiny.assert_same_tree(found, lay_out(params, cfg, wanted))
            assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(found))


def test_a_mesh_of_one_device_is_that_device():
    """As of a trainer with one accelerator, whose code makes a mesh all the same."""
    params, cfg = tiny.tiny_params(tiny.CONFIGS[NAME]), tiny.model_config(NAME)
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    placed = jax.device_put(params, NamedSharding(mesh, P()))
    with ferrum_jax.from_params(placed, cfg, engine=ENGINE) as runner:
        answer = np.asarray(runner.prefill("a", TOKENS))
        runner.release("a")
        runner.set_params(placed)
        np.testing.assert_array_equal(runner.prefill("a", TOKENS), answer)


def test_parameters_on_several_devices_need_a_mesh_to_be_served_on():
    with pytest.raises(UnsupportedError, match=r"lie on 4 devices, .* such as mesh=\{'model': 4\}, or .*device_put"):
        ferrum_jax.from_params(trained("explicit", 1), tiny.model_config(NAME), engine=ENGINE)

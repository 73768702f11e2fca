"""The pure forward under a mesh of the caller's: divided by explicit or auto axes, or inside a `shard_map`."""

import contextlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ferrum_jax import models
from ferrum_jax.config import ModelConfig
from ferrum_jax.models import Edit
from ferrum_jax.models.layout import SCANNED, lay_out
from ferrum_jax.models.specs import ParamTree
from tests.meshes import agree, by_data, collectives, mesh_of, model_on, tokens_of
from tests.tiers import by_default

pytestmark = pytest.mark.devices

FAMILIES = ("llama31", "gemma2", "mixtral", "qwen2_moe", "deepseek3", "gpt_oss", "olmo2")
KINDS = ("explicit", "auto")


def loss(params: ParamTree, tokens: jax.Array, cfg: ModelConfig, **options: Any) -> jax.Array:
    logits = models.forward(params, tokens, cfg, **options)[:, :-1]
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked)


@pytest.mark.parametrize("name", by_default(FAMILIES, "gemma2"))
@pytest.mark.parametrize("kind", by_default(KINDS, "explicit"))
def test_a_divided_model_gives_the_logits_captures_and_gradients_of_one_device(name: str, kind: str):
    mesh = mesh_of(kind)
    params, divided, cfg = model_on(mesh, name)
    tokens = tokens_of(name)
    points = (("resid_pre", 1), ("pattern", 1), ("z", 2))
    both = jax.jit(lambda p, t: (models.run(p, t, cfg, capture=points), jax.grad(loss)(p, t, cfg)))
    (logits, seen), slopes = both(params, tokens)
    (found, captured), gradient = both(divided, by_data(mesh, tokens))
    agree(found, logits)
    agree(dict(captured), dict(seen))
    agree(gradient, slopes)
    if kind == "explicit":
        typed = jax.eval_shape(lambda p, t: models.run(p, t, cfg, capture=points), divided, by_data(mesh, tokens))
        assert typed[0].sharding.spec[0] == "data"
        assert {array.sharding.spec[0] for array in typed[1].values()} == {"data"}


def test_a_mesh_in_the_context_and_one_in_the_arrays_are_the_same():
    """Also outside `jit`, and where only some of the arrays lie on it."""
    mesh, name = mesh_of("explicit"), "qwen3"
    params, divided, cfg = model_on(mesh, name)
    tokens = tokens_of(name)
    expected = jax.jit(partial(models.forward, cfg=cfg))(params, tokens)
    for context in (contextlib.nullcontext, partial(jax.set_mesh, mesh)):
        with context():
            agree(jax.jit(partial(models.forward, cfg=cfg))(divided, tokens), expected)
            agree(models.forward(divided, by_data(mesh, tokens), cfg), expected)
            hidden = models.capture(divided, by_data(mesh, tokens), cfg, hidden=[cfg.num_hidden_layers])[1]
            agree(models.logits_of(divided, hidden[cfg.num_hidden_layers], cfg), expected)


@pytest.mark.parametrize("kind", by_default(KINDS, "auto"))
def test_a_divided_forward_moves_two_sums_a_layer_and_nothing_else(kind: str):
    mesh, name = mesh_of(kind), "llama31"
    _, divided, cfg = model_on(mesh, name)
    found = collectives(partial(models.forward, cfg=cfg), divided, by_data(mesh, tokens_of(name)))
    rows, size = 2 * 9, cfg.hidden_size  # half of four rows of nine tokens
    assert sorted(set(found)) in ([f"f32[{size},{rows}] all-reduce"], [f"f32[{rows},{size}] all-reduce"])
    assert len(found) == 2 * cfg.num_hidden_layers


def test_interventions_are_divided_as_what_they_change():
    mesh, name = mesh_of("explicit"), "qwen3"
    params, divided, cfg = model_on(mesh, name)
    tokens, width = tokens_of(name), cfg.hidden_size
    vectors = jax.random.normal(jax.random.key(0), (4, 9, width))
    steering = jax.random.normal(jax.random.key(1), (cfg.num_hidden_layers, width))

    def edited(params: ParamTree, tokens: jax.Array, vectors: jax.Array) -> jax.Array:
        changes = {
            ("resid_mid", 0): Edit(add=vectors),
            ("attn_out", 1): lambda x, positions: x * jnp.where(positions > 3, 0.5, 1.0)[..., None],
        }
        return models.forward(params, tokens, cfg, interventions=changes, steering=steering)

    expected = jax.jit(edited)(params, tokens, vectors)
    agree(jax.jit(edited)(divided, by_data(mesh, tokens), by_data(mesh, vectors)), expected)


@pytest.mark.parametrize("name", by_default(FAMILIES, "mixtral"))
def test_inside_a_shard_map_whose_types_are_checked_each_device_runs_its_own_rows(name: str):
    """Gradients of parameters, the same on all devices, are sums over devices: also of experts that few rows choose."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params, _, cfg = model_on(mesh, name)
    tokens = tokens_of(name)

    def both(params: ParamTree, tokens: jax.Array) -> Any:
        return models.forward(params, tokens, cfg), jax.grad(loss)(params, tokens, cfg)

    specs: dict[str, Any] = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": (P("data"), P())}
    agree(jax.jit(jax.shard_map(both, **specs, check_vma=True))(params, tokens), jax.jit(both)(params, tokens))


@pytest.mark.parametrize("layout", by_default(("checkpoint", SCANNED), SCANNED))
def test_inside_a_shard_map_functions_may_return_what_is_the_same_on_all_devices(layout: str):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    params, _, cfg = model_on(mesh, "qwen3")
    changes = {("mlp_out", 0): lambda x, positions: 0.0, ("resid_post", 1): lambda x, positions: jax.nn.tanh(x)}

    def both(params: ParamTree, tokens: jax.Array) -> Any:
        options: dict[str, Any] = {"interventions": changes}
        return models.forward(params, tokens, cfg, **options), jax.grad(loss)(params, tokens, cfg, **options)

    own, tokens = lay_out(params, cfg, layout), tokens_of("qwen3")
    specs: dict[str, Any] = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": (P("data"), P())}
    agree(jax.jit(jax.shard_map(both, **specs, check_vma=True))(own, tokens), jax.jit(both)(own, tokens))


@pytest.mark.parametrize("layout", by_default(("checkpoint", SCANNED), SCANNED))
def test_inside_a_shard_map_parameters_may_differ_instead_of_rows(layout: str):
    """An ensemble: each device has a model of its own, and all read the same tokens."""
    name, mesh = "qwen3", jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    params, _, cfg = model_on(mesh, name)
    params = lay_out(params, cfg, layout)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 0.9]), params)
    tokens = tokens_of(name)

    def one(params: ParamTree) -> jax.Array:
        return models.forward(jax.tree.map(lambda leaf: leaf[0], params), tokens, cfg, attention="xla")[None]

    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("model"), out_specs=P("model"), check_vma=True)
    expected = [models.forward(jax.tree.map(lambda leaf, at=at: leaf[at], several), tokens, cfg) for at in range(2)]
    agree(jax.jit(mapped)(several), jnp.stack(expected))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_divided_over_the_axis_of_the_rows_give_the_same(kind: str):
    """As in fully sharded data parallelism: every matrix is divided over `data`, and so are the tokens."""
    mesh, name = mesh_of(kind), "qwen3"
    params, _, cfg = model_on(mesh, name)
    tokens = tokens_of(name)
    spread = jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("data") if len(leaf) % 2 == 0 else P())), params
    )
    both = jax.jit(jax.value_and_grad(partial(loss, cfg=cfg, remat=True)))
    agree(both(spread, by_data(mesh, tokens)), both(params, tokens))


def on_two_devices(one: Any, params: ParamTree, own: jax.Array) -> tuple[Any, Any]:
    """Returns gradients of the sum of `one(params, value)` over the values `own`: each on its device, and on one."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def total(params: ParamTree, own: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sum(one(params, own[0]) ** 2), "data")

    mapped = jax.shard_map(total, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    alone = jax.jit(jax.grad(lambda params: sum(jnp.sum(one(params, value) ** 2) for value in own)))
    return jax.jit(jax.grad(mapped))(params, own), alone(params)


@pytest.mark.parametrize("layout", by_default(("checkpoint", SCANNED), "checkpoint"))
def test_inside_a_shard_map_the_first_layer_alone_may_differ(layout: str):
    """A sum over devices inside a layer that one device skips would add up numbers of different layers."""
    params, _, cfg = model_on(mesh_of("auto"), "qwen3")
    tokens = tokens_of("qwen3")
    states = jax.random.normal(jax.random.key(0), (*tokens.shape, cfg.hidden_size))

    def one(params: ParamTree, first: jax.Array) -> jax.Array:
        return models.forward(params, tokens, cfg, inputs_embeds=states, first_layer=first)

    agree(*on_two_devices(one, lay_out(params, cfg, layout), jnp.array([0, 2])))


@pytest.mark.parametrize(
    ("name", "layout", "first"),
    by_default(
        [
            (name, layout, first)
            for name in ("qwen3", "qwen3_moe")
            for layout in ("checkpoint", SCANNED)
            for first in (None, 1)
        ],
        ("qwen3", SCANNED, None),
        ("qwen3", "checkpoint", 1),
        ("qwen3_moe", "checkpoint", None),
    ),
)
def test_inside_a_shard_map_functions_may_close_over_what_differs(name: str, layout: str, first: int | None):
    """Also where devices then choose other experts, and where layers may be skipped."""
    params, _, cfg = model_on(mesh_of("auto"), name)
    tokens = tokens_of(name)[:2, :3]
    states = jax.random.normal(jax.random.key(0), (*tokens.shape, cfg.hidden_size))
    options: dict[str, Any] = {"inputs_embeds": states}
    if first is not None:
        options["first_layer"] = jnp.int32(first)

    def one(params: ParamTree, vector: jax.Array) -> jax.Array:
        changes = {("resid_pre", 1): lambda x, _: x + vector, ("z", 2): lambda x, _: x * vector[0]}
        return models.forward(params, tokens, cfg, interventions=changes, **options)

    vectors = jax.random.normal(jax.random.key(1), (2, cfg.hidden_size)) * 3
    agree(*on_two_devices(one, lay_out(params, cfg, layout), vectors))

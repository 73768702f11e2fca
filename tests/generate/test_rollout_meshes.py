"""`generate_fn` under a mesh of the caller's: each device generates its own rows and has no other row's KV."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ferrum_jax import generate_fn, kv_spec
from ferrum_jax.contract import Sampling
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.kvcache import state
from ferrum_jax.models import Edit, adapters, specs
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops import native
from tests.meshes import agree, by_data, collectives, mesh_of, model_on, tokens_of
from tests.tiers import by_default

pytestmark = pytest.mark.devices

FAMILIES = ("llama31", "gemma2", "mixtral", "deepseek3", "gpt_oss")
LENGTHS: Any = np.array([9, 3, 7, 5], np.int32)
SEEDS: Any = np.array([5, 2**32 - 1, 0, 8], np.uint32)
HOW = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1)


def generate(params: ParamTree, tokens: Any, lengths: Any, seeds: Any, kv: Any = None, **options: Any) -> Any:
    return generate_fn(params, kv, tokens, lengths, seeds, max_tokens=6, sampling=HOW, **options)


@pytest.mark.parametrize("name", by_default(FAMILIES, "llama31"))
@pytest.mark.parametrize("kind", by_default(("explicit", "auto"), "explicit"))
def test_rows_divided_over_devices_are_the_same_and_so_is_their_kv(name: str, kind: str):
    mesh = mesh_of(kind)
    params, divided, cfg = model_on(mesh, name)
    rows = tokens_of(name), LENGTHS, SEEDS
    alone, kv = jax.jit(partial(generate, cfg=cfg))(params, *rows)
    own = {} if kind == "explicit" else {"sharding": NamedSharding(mesh, P("data"))}
    found, spread = jax.jit(partial(generate, cfg=cfg, **own))(divided, *by_data(mesh, rows))
    np.testing.assert_array_equal(found.token_ids, alone.token_ids)
    agree(found.logprobs, alone.logprobs)
    agree(spread, kv)
    assert spread.k.sharding.spec[:2] == (None, "data")


@pytest.mark.parametrize("kind", by_default(("explicit", "auto"), "explicit"))
def test_rows_divided_over_devices_keep_their_adapters(kind: str):
    mesh = mesh_of(kind)
    params, divided, cfg = model_on(mesh, "llama31")
    stacks = adapters.stack_specs(cfg, adapters.LoraSpec(max_loras=2, max_rank=3))
    loras = specs.map_specs(lambda _, one: jax.random.normal(jax.random.key(8), one.shape) / 4, stacks)
    rows = tokens_of("llama31"), LENGTHS, SEEDS, np.array([1, -1, 0, 1], np.int32)

    def each(params: ParamTree, tokens: Any, lengths: Any, seeds: Any, used: Any, **own: Any) -> Any:
        return generate(params, tokens, lengths, seeds, cfg=cfg, loras=loras, adapters=used, **own)[0]

    own = {} if kind == "explicit" else {"sharding": NamedSharding(mesh, P("data"))}
    alone = jax.jit(each)(params, *rows)
    found = jax.jit(partial(each, **own))(divided, *by_data(mesh, rows))
    np.testing.assert_array_equal(found.token_ids, alone.token_ids)
    agree(found.logprobs, alone.logprobs)
    plain, _ = jax.jit(partial(generate, cfg=cfg))(params, *rows[:3])
    changed = np.abs(plain.logprobs - alone.logprobs).max(axis=1) > 1e-3
    assert changed.tolist() == [True, False, True, True]


@pytest.mark.parametrize("kind", by_default(("explicit", "auto"), "explicit"))
def test_a_population_of_rollouts_may_divide_its_rows(kind: str):
    mesh = mesh_of(kind)
    params, divided, cfg = model_on(mesh, "llama31")
    rows = tokens_of("llama31"), LENGTHS, SEEDS
    shape = cfg.num_hidden_layers, cfg.hidden_size
    steering = jnp.stack([jnp.zeros(shape), jnp.full(shape, 3.0)])
    own = {} if kind == "explicit" else {"sharding": NamedSharding(mesh, P("data"))}

    def each(params: ParamTree, *rows: Any, **own: Any) -> Any:
        answer = partial(generate, params, *rows, cfg=cfg, **own)
        return jax.vmap(lambda add: answer(steering=add)[0].token_ids)(steering)

    alone = jax.jit(each)(params, *rows)
    found = jax.jit(partial(each, **own))(divided, *by_data(mesh, rows))
    np.testing.assert_array_equal(found, alone)
    assert (alone[0] != alone[1]).any()


@pytest.mark.parametrize("kind", by_default(("explicit", "auto"), "auto"))
def test_no_kv_moves_between_devices(kind: str):
    mesh, name = mesh_of(kind), "llama31"
    _, divided, cfg = model_on(mesh, name)
    own = {} if kind == "explicit" else {"sharding": NamedSharding(mesh, P("data"))}
    kv = state.empty(kv_spec(divided, cfg, rows=4, positions=15))
    kv = jax.device_put(kv, NamedSharding(mesh, P(None, "data", "model")))
    rows = by_data(mesh, (tokens_of(name), LENGTHS, SEEDS))
    found = collectives(partial(generate, cfg=cfg, **own), divided, *rows, kv)
    size = cfg.hidden_size
    assert len(found) == 4 * cfg.num_hidden_layers  # two sums a layer, for prompts and for a token of each row
    assert {one.split()[1] for one in found} == {"all-reduce"}
    assert {frozenset(one.split("[")[1].split("]")[0].split(",")) for one in found} == {
        frozenset({str(size), "18"}),
        frozenset({str(size), "2"}),
    }


@pytest.mark.parametrize("name", by_default(FAMILIES, "llama31"))
def test_inside_a_shard_map_whose_types_are_checked_it_gives_the_same_and_has_gradients(name: str):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params, _, cfg = model_on(mesh, name)
    rows = tokens_of(name), LENGTHS, SEEDS

    def both(params: ParamTree, *rows: Any) -> Any:
        out, kv = generate(params, *rows, cfg=cfg)
        tokens, lengths, seeds = rows

        def logprob(params: ParamTree) -> jax.Array:
            return generate_fn(params, None, tokens, lengths, seeds, cfg, max_tokens=2)[0].logprobs.sum()

        return out, kv, jax.grad(logprob)(params)

    each = P("data")
    specs: dict[str, Any] = {"in_specs": (P(), each, each, each), "out_specs": (each, P(None, "data"), P())}
    found, kv, slopes = jax.jit(jax.shard_map(both, mesh=mesh, **specs, check_vma=True))(params, *rows)
    alone, expected_kv, expected = jax.jit(both)(params, *rows)
    np.testing.assert_array_equal(found.token_ids, alone.token_ids)
    agree((found.logprobs, kv, slopes), (alone.logprobs, expected_kv, expected))


@pytest.mark.parametrize("kind", by_default(("explicit", "auto"), "explicit"))
def test_edits_of_rows_are_divided_with_them(kind: str):
    mesh, name = mesh_of(kind), "qwen3"
    params, divided, cfg = model_on(mesh, name)
    own = {} if kind == "explicit" else {"sharding": NamedSharding(mesh, P("data"))}
    layers, heads, width = cfg.num_hidden_layers, cfg.num_attention_heads, cfg.head_dim

    def edited(params: ParamTree, *rows: Any, by_head: Any, by_layer: Any, scale: Any, **own: Any) -> Any:
        changes = {
            ("z", 1): Edit(add=by_head),
            ("resid_post", None): Edit(add=by_layer),
            ("pattern", 0): Edit(scale=scale),
            ("mlp_out", 2): lambda x, positions: jnp.where(positions[..., None] > 5, x * 0.7, x),
        }
        return generate(params, *rows, cfg=cfg, interventions=changes, **own)[0]

    keys = jax.random.split(jax.random.key(0), 3)
    edits = {
        "by_head": jax.random.normal(keys[0], (4, 1, heads, width)),
        "by_layer": jax.random.normal(keys[1], (layers, 4, 1, cfg.hidden_size)),
        "scale": jax.random.uniform(keys[2], (4, heads, 1, 1)),
    }
    rows = tokens_of(name), LENGTHS, SEEDS
    expected = jax.jit(edited)(params, *rows, **edits)
    found = jax.jit(partial(edited, **own))(divided, *by_data(mesh, rows), **edits)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    agree(found.logprobs, expected.logprobs)


def test_what_devices_do_not_divide_is_refused():
    mesh, name = mesh_of("auto"), "qwen3"
    params, _, cfg = model_on(mesh, name)
    own = {"sharding": NamedSharding(mesh, P("data"))}
    with pytest.raises(InvalidParameterError, match="3 rows cannot be divided over 2 devices"):
        generate(params, tokens_of(name)[:3], LENGTHS[:3], SEEDS[:3], cfg=cfg, **own)
    spec = kv_spec(params, cfg, rows=5, positions=15)
    with pytest.raises(InvalidParameterError, match="5 KV blocks cannot be divided over 2 devices"):
        generate(params, tokens_of(name), LENGTHS, SEEDS, state.empty(spec), cfg=cfg, **own)


@pytest.mark.skipif(native.instruction_set() is None, reason="there are no CPU kernels")
def test_kernels_of_the_cpu_run_inside_a_shard_map_whose_types_are_checked():
    mesh, name = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), "qwen3"
    params, _, cfg = model_on(mesh, name)
    rows, each = (tokens_of(name), LENGTHS, SEEDS), P("data")
    run = partial(generate, cfg=cfg, attention="cpu")
    specs: dict[str, Any] = {"in_specs": (P(), each, each, each), "out_specs": (each, P(None, "data"))}
    found, kv = jax.jit(jax.shard_map(run, mesh=mesh, **specs, check_vma=True))(params, *rows)
    expected, expected_kv = jax.jit(run)(params, *rows)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    agree((found.logprobs, kv), (expected.logprobs, expected_kv))

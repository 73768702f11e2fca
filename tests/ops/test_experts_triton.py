"""The GPU kernel of experts, interpreted on the CPU or run on a GPU, gives each choice's output."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ferrum_jax import ModelConfig, models
from ferrum_jax.ops import experts_triton, moe
from ferrum_jax.ops.experts_triton import TiledWeight
from ferrum_jax.ops.kernel_use import kernels
from ferrum_jax.ops.linear import StackedWeight, linear
from ferrum_jax.ops.moe import swiglu, weigh_experts
from ferrum_jax.ops.quantised import quantise_weight
from tests import tiny
from tests.tiers import by_default

TOLERANCE = {"bfloat16": 4e-2, "float16": 2e-3}  # of outputs of the order of one: three products, each rounded
EXPERTS, WIDE, MODEL, CHOSEN = 5, 48, 80, 2

Arrays = tuple[jax.Array, ...]


@pytest.fixture(autouse=True)
def many_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than two choices are many: the weights of fewer are gathered."""
    monkeypatch.setattr(moe, "GATHERED", 1)


def weights(dtype: str, layers: int = 1) -> Arrays:
    rng = np.random.default_rng(0)
    shapes = ((EXPERTS, WIDE, MODEL), (EXPERTS, WIDE, MODEL), (EXPERTS, MODEL, WIDE))
    return tuple(jnp.asarray(rng.standard_normal((layers, *one)) * one[2] ** -0.5, dtype) for one in shapes)


def tokens(count: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws tokens, their experts, of which one is never chosen, and shares."""
    rng = np.random.default_rng(count)
    chosen = np.argsort(rng.standard_normal((count, EXPERTS - 1)))[:, :CHOSEN].astype(np.int32)
    shares = rng.uniform(0.2, 1, (count, CHOSEN)).astype(np.float32)
    return jnp.asarray(rng.standard_normal((count, MODEL)), dtype), jnp.asarray(chosen), jnp.asarray(shares)


def by_every_expert(x: jax.Array, chosen: jax.Array, shares: jax.Array, own: Arrays) -> NDArray[np.float64]:
    """Returns the weighted sums in float64."""
    x64, gate, up, down = (np.asarray(array, np.float64) for array in (x, *own))
    wide = np.einsum("xd,efd->xef", x64, gate)
    wide = wide / (1 + np.exp(-wide)) * np.einsum("xd,efd->xef", x64, up)
    outs = np.take_along_axis(np.einsum("xef,edf->xed", wide, down), np.asarray(chosen)[..., None], axis=1)
    return (outs * np.asarray(shares)[..., None]).sum(axis=1)


def run(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, own: tuple[Any, ...], first: int | None = None
) -> jax.Array:
    def function(*arrays: Any) -> jax.Array:
        x, chosen, shares, gate, up, down = arrays
        with kernels("triton"):
            return weigh_experts(
                x, chosen, shares, (gate, up, down), swiglu, None if first is None else jnp.int32(first)
            )

    assert "multiply_experts" in str(jax.make_jaxpr(function)(x, chosen, shares, *own))
    return jax.jit(function)(x, chosen, shares, *own)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("count", [2, 7, 150])  # tiles of 16 and of 64 rows
def test_the_kernel_equals_float64(count: int, dtype: str):
    x, chosen, shares = tokens(count, dtype)
    own = tuple(one[0] for one in weights(dtype))
    found = run(x, chosen, shares, own)
    wanted, tolerance = by_every_expert(x, chosen, shares, own), TOLERANCE[dtype]
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=tolerance, atol=tolerance)


def test_a_layers_experts_are_read_in_the_stack_of_all_layers():
    x, chosen, shares = tokens(9, "bfloat16")
    layers = weights("bfloat16", layers=3)
    found = run(x, chosen, shares, tuple(StackedWeight(one, jnp.int32(1)) for one in layers))
    np.testing.assert_array_equal(found, run(x, chosen, shares, tuple(one[1] for one in layers)))


@pytest.mark.parametrize("layers", [1, 2], ids=["alone", "stacked"])
def test_experts_that_other_devices_hold_add_nothing(layers: int):
    x, chosen, shares = tokens(9, "bfloat16")
    every = weights("bfloat16", layers)
    own = tuple(one[0] for one in every)
    parts = []
    for first, last in ((0, 2), (2, EXPERTS)):
        here = tuple(one[:, first:last] for one in every)
        held = tuple(StackedWeight(one, jnp.int32(0)) for one in here) if layers > 1 else tuple(one[0] for one in here)
        parts.append(np.asarray(run(x, chosen, shares, held, first), np.float32))
    np.testing.assert_allclose(sum(parts), np.asarray(run(x, chosen, shares, own), np.float32), rtol=0, atol=2e-2)


def test_an_expert_may_have_biases():
    x, chosen, shares = tokens(11, "bfloat16")
    rng = np.random.default_rng(3)
    weight = jnp.asarray(rng.standard_normal((EXPERTS, MODEL, MODEL)) * MODEL**-0.5, "bfloat16")
    bias = jnp.asarray(rng.standard_normal((EXPERTS, MODEL)), "bfloat16")

    def function(x: jax.Array, stacks: tuple[jax.Array, jax.Array]) -> jax.Array:
        with kernels("triton"):
            return weigh_experts(x, chosen, shares, stacks, lambda own, rows: linear(rows, *own))

    found = jax.jit(function)(x, (weight, bias))
    outs = np.einsum("xd,efd->xef", np.asarray(x, np.float64), np.asarray(weight, np.float64)) + np.asarray(bias)
    outs = np.take_along_axis(outs, np.asarray(chosen)[..., None], axis=1)
    wanted = (outs * np.asarray(shares)[..., None]).sum(axis=1)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=4e-2)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 150), st.integers(1, 200), st.sampled_from([16, 32]), st.lists(st.integers(-1, 2), min_size=1))
def test_products_of_any_size_and_tiles_of_no_expert(inputs: int, outputs: int, rows: int, experts: list[int]):
    rng = np.random.default_rng(inputs)
    x = jnp.asarray(rng.integers(-3, 4, (len(experts) * rows, inputs)), "bfloat16")
    stack = jnp.asarray(rng.integers(-1, 2, (3, outputs, inputs)), "bfloat16")
    found = experts_triton.product(x, TiledWeight(stack, jnp.asarray(experts, jnp.int32)))
    wide, whole = np.asarray(stack, np.float32), np.asarray(x, np.float32).reshape(len(experts), rows, inputs)
    wanted = [
        np.zeros((rows, outputs)) if one < 0 else own @ wide[one].T for own, one in zip(whole, experts, strict=True)
    ]
    np.testing.assert_array_equal(found, jnp.asarray(np.concatenate(wanted), "bfloat16"))


def test_the_weights_of_few_choices_are_gathered():
    x, chosen, shares = tokens(1, "bfloat16")
    with kernels("triton"):
        stacks = tuple(one[0] for one in weights("bfloat16"))
        made = jax.make_jaxpr(functools.partial(weigh_experts, expert=swiglu))(x, chosen, shares, stacks)
    assert "multiply_experts" not in str(made)


def test_it_takes_weights_of_sixteen_bits_alone_and_only_where_it_is_asked_for():
    x, stack = jnp.zeros((4, MODEL), "bfloat16"), weights("bfloat16")[0][0]
    assert not experts_triton.can_multiply(x, stack)
    with kernels("triton"):
        assert experts_triton.can_multiply(x, stack)
        assert not experts_triton.can_multiply(x.astype("float16"), stack)
        assert not experts_triton.can_multiply(x.astype("float32"), stack.astype("float32"))
        assert not experts_triton.can_multiply(x, quantise_weight(stack, "int8"))


@pytest.mark.parametrize("name", by_default(["mixtral", "qwen3_moe", "deepseek3", "gpt_oss"], "gpt_oss"))
def test_a_model_that_attends_by_triton_multiplies_its_experts_so(name: str, monkeypatch: pytest.MonkeyPatch):
    cfg = ModelConfig.from_hf(tiny.CONFIGS[name] | {"num_hidden_layers": 2, "first_k_dense_replace": 1})
    params = models.init_params(cfg, jax.random.key(0), "bfloat16")
    tokens = jnp.asarray([[3, 1, 4, 1, 5]])

    def logits() -> jax.Array:
        function = functools.partial(models.forward, cfg=cfg, attention="triton")
        assert ("multiply_experts" in str(jax.make_jaxpr(function)(params, tokens))) == is_used
        return jax.jit(function)(params, tokens)

    is_used = True
    found = logits()
    monkeypatch.setattr(experts_triton, "can_multiply", lambda *_: False)
    is_used = False
    np.testing.assert_allclose(found, logits(), rtol=0, atol=0.05 * np.abs(found).max())


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("count", [2, 32, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_real_sizes_on_a_gpu(count: int, dtype: str):
    experts, wide, model, num_chosen = 32, 768, 2048, 8
    keys = jax.random.split(jax.random.key(count), 5)
    shapes = ((experts, wide, model), (experts, wide, model), (experts, model, wide))
    own = tuple(
        jax.random.normal(key, one, dtype) * jnp.asarray(one[2] ** -0.5, dtype)
        for key, one in zip(keys[:3], shapes, strict=True)
    )
    x, scores = jax.random.normal(keys[3], (count, model), dtype), jax.random.normal(keys[4], (count, experts))
    shares, chosen = jax.lax.top_k(jax.nn.softmax(scores), num_chosen)
    found = np.asarray(run(x, chosen, shares, own), np.float64)
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(
        found[:32], by_every_expert(x[:32], chosen[:32], shares[:32], own), rtol=tolerance, atol=tolerance
    )

"""Experts by tiles are what every expert on every token would give, weighted."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from ferrum_jax.config import ExpertsConfig
from ferrum_jax.models.feed_forward import route
from ferrum_jax.ops.linear import linear
from ferrum_jax.ops.moe import _argsort_on_cpu, _outputs, clamped_swiglu, swiglu, weigh_experts
from ferrum_jax.ops.quantised import dequantise_weight, quantise_weight
from tests.tiers import by_default

TOLERANCE = 1e-5  # float32 sums of up to 12 products of the order of one, in another order
EXPERTS, WIDE, MODEL, CHOSEN = 7, 12, 10, 3
ROUTER = ExpertsConfig(
    num_experts=EXPERTS,
    num_experts_per_tok=CHOSEN,
    moe_intermediate_size=WIDE,
    norm_topk_prob=True,
    sparse_layers=(True,),
)

Arrays = tuple[NDArray[np.float32], ...]
FORMS = {1: "a loop over tiles", 3: "several at once", 1000: "all at once"}
forms = pytest.mark.parametrize("at_once", by_default(FORMS, 1, 3), ids=FORMS.values())


def weights(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = ((EXPERTS, WIDE, MODEL), (EXPERTS, WIDE, MODEL), (EXPERTS, MODEL, WIDE))
    return tuple((rng.standard_normal(shape) * shape[2] ** -0.5).astype(np.float32) for shape in shapes)


def tokens(count: int, seed: int = 1) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Draws tokens and their experts, half of whose choices crowd upon a few experts."""
    rng = np.random.default_rng([seed, count])
    scores = rng.standard_normal((count, EXPERTS)) + np.where(np.arange(count)[:, None] % 2, np.arange(EXPERTS), 0)
    return rng.standard_normal((count, MODEL)).astype(np.float32), np.argsort(-scores)[:, :CHOSEN].astype(np.int32)


def by_every_expert(x: NDArray, chosen: NDArray, gate: NDArray, up: NDArray, down: NDArray) -> NDArray[np.float64]:
    """Returns each choice's output in float64, `[X, U, D]`."""
    x, gate, up, down = (array.astype(np.float64) for array in (x, gate, up, down))
    wide = np.einsum("xd,efd->xef", x, gate)
    wide = wide / (1 + np.exp(-wide)) * np.einsum("xd,efd->xef", x, up)
    return np.take_along_axis(np.einsum("xef,edf->xed", wide, down), chosen[..., None], axis=1)


@forms
@pytest.mark.parametrize("count", by_default([1, 5, 60], 60))
def test_each_choice_gives_its_experts_output(count: int, at_once: int):
    x, chosen = tokens(count)
    found = jax.jit(partial(_outputs, swiglu, largest=4, at_once=at_once))(x, chosen, weights())
    np.testing.assert_allclose(found, by_every_expert(x, chosen, *weights()), atol=TOLERANCE)


@pytest.mark.parametrize("shape", [(1,), (300,), (3, 50)], ids=str)
def test_choices_are_sorted_by_expert_and_then_by_token(shape: tuple[int, ...]):
    experts = np.random.default_rng(0).integers(0, EXPERTS, shape).astype(np.int32)
    run = jax.vmap(_argsort_on_cpu) if len(shape) > 1 else _argsort_on_cpu
    np.testing.assert_array_equal(jax.jit(run)(experts), np.argsort(experts, axis=-1, kind="stable"))


@forms
def test_any_load_is_served_whole(at_once: int):
    x, _ = tokens(29)
    run = jax.jit(partial(_outputs, swiglu, largest=4, at_once=at_once))
    for first in range(EXPERTS - CHOSEN + 1):
        chosen = np.tile(np.arange(first, first + CHOSEN, dtype=np.int32), (29, 1))
        np.testing.assert_allclose(run(x, chosen, weights()), by_every_expert(x, chosen, *weights()), atol=TOLERANCE)


@forms
def test_what_other_tokens_and_unchosen_experts_hold_reaches_nobody(at_once: int):
    x, chosen = tokens(9)
    chosen[chosen == 4] = 0  # nobody's expert
    run = jax.jit(partial(_outputs, swiglu, largest=4, at_once=at_once))
    clean = run(x, chosen, weights())
    spoilt = x.copy()
    spoilt[3] = np.nan
    poisoned = tuple(np.where(np.arange(EXPERTS)[:, None, None] == 4, np.nan, weight) for weight in weights())
    found = np.array(run(spoilt, chosen, poisoned))
    assert np.isnan(found[3]).all()
    np.testing.assert_array_equal(np.delete(found, 3, axis=0), np.delete(np.array(clean), 3, axis=0))


def combined(x: jax.Array, logits: jax.Array, *experts: jax.Array) -> jax.Array:
    chosen, shares, _ = route(logits, ROUTER)
    return weigh_experts(x, chosen, shares, tuple(experts), swiglu)


def dense(x: jax.Array, logits: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Weighs every expert's output by the softmax over the best logits, the others masked."""
    least = jnp.sort(logits, axis=-1)[:, -CHOSEN, None]
    shares = jax.nn.softmax(jnp.where(logits >= least, logits, -jnp.inf), axis=-1)
    wide = jax.nn.silu(jnp.einsum("xd,efd->xef", x, gate)) * jnp.einsum("xd,efd->xef", x, up)
    return jnp.einsum("xef,edf,xe->xd", wide, down, shares)


def batch(count: int) -> list[jax.Array]:
    """Draws rows of six tokens, and their logits."""
    rng = np.random.default_rng(count)
    return [jnp.asarray(rng.standard_normal((count, 6, size)), jnp.float32) for size in (MODEL, EXPERTS)]


@pytest.mark.slow
def test_gradients_are_those_of_every_expert_on_every_token():
    x, logits = (leaf[0] for leaf in batch(1))
    every = tuple(range(5))
    found, expected = (
        jax.jit(jax.grad(lambda *args, run=run: (run(*args) ** 2).sum(), argnums=every))(x, logits, *weights())
        for run in (combined, dense)
    )
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * np.abs(theirs).max())


def test_vmapped_and_scanned_is_one_after_another():
    x, logits = batch(3)
    expected = np.stack([dense(*one, *map(jnp.asarray, weights())) for one in zip(x, logits, strict=True)])
    mapped = jax.jit(jax.vmap(combined, in_axes=(0, 0, None, None, None)))(x, logits, *weights())
    np.testing.assert_allclose(mapped, expected, atol=TOLERANCE)

    experts = tuple(map(jnp.asarray, weights()))

    @jax.jit
    def scanned(x: jax.Array, logits: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, one: (carry, combined(*one, *experts)), None, (x, logits))[1]

    np.testing.assert_allclose(scanned(x, logits), expected, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("groups", by_default([1, 2], 2))
def test_quantised_experts_are_what_they_stand_for(groups: int):
    x, logits = (leaf[0] for leaf in batch(1))
    kept = [quantise_weight(jnp.asarray(weight), "int8", groups) for weight in weights()]
    plain = [dequantise_weight(weight, jnp.float32) for weight in kept]
    np.testing.assert_allclose(jax.jit(combined)(x, logits, *kept), dense(x, logits, *plain), atol=TOLERANCE)


def test_shares_are_of_all_experts_or_of_those_chosen():
    logits = np.random.default_rng(3).standard_normal((5, EXPERTS)).astype(np.float32)
    likely = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(-1, keepdims=True)
    best = np.argsort(-logits)[:, :CHOSEN]
    routers = (replace(ROUTER, norm_topk_prob=choice) for choice in (False, True))
    plain, renormalised = (route(jnp.asarray(logits), router) for router in routers)
    expected = np.take_along_axis(likely, best, axis=1)
    np.testing.assert_array_equal(plain[0], best)
    np.testing.assert_allclose(plain[1], expected, rtol=1e-6)
    np.testing.assert_allclose(renormalised[1], expected / expected.sum(-1, keepdims=True), rtol=1e-6)


LIMIT, ALPHA = 0.7, 1.4


def clamped_expert(own: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    both = linear(x, own["into"], own["into_bias"])
    return linear(clamped_swiglu(both[:, ::2], both[:, 1::2], ALPHA, LIMIT), own["back"], own["back_bias"])


def clamped_stacks() -> dict[str, jax.Array]:
    """Draws experts of one joint first product, with biases."""
    rng = np.random.default_rng(9)
    shapes = {"into": (2 * WIDE, MODEL), "into_bias": (2 * WIDE,), "back": (MODEL, WIDE), "back_bias": (MODEL,)}
    drawn = {name: rng.standard_normal((EXPERTS, *shape)) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    return {name: jnp.asarray(leaf, jnp.float32) for name, leaf in drawn.items()}


def clamped(x: jax.Array, logits: jax.Array, stacks: dict[str, jax.Array]) -> jax.Array:
    chosen, shares, _ = route(logits, ROUTER)
    return weigh_experts(x, chosen, shares, stacks, clamped_expert)


def clamped_dense(x: jax.Array, logits: jax.Array, stacks: dict[str, jax.Array]) -> jax.Array:
    """Weighs every expert's output, written out, by the softmax over the best logits."""
    least = jnp.sort(logits, axis=-1)[:, -CHOSEN, None]
    shares = jax.nn.softmax(jnp.where(logits >= least, logits, -jnp.inf), axis=-1)
    wide = jnp.einsum("xd,efd->xef", x, stacks["into"]) + stacks["into_bias"]
    gate, up = wide.reshape(*wide.shape[:2], WIDE, 2)[..., 0], wide.reshape(*wide.shape[:2], WIDE, 2)[..., 1]
    gate = jnp.where(gate > LIMIT, LIMIT, gate)
    up = jnp.where(up > LIMIT, LIMIT, jnp.where(up < -LIMIT, -LIMIT, up))
    inner = (up + 1) * gate / (1 + jnp.exp(-ALPHA * gate))
    return jnp.einsum("xe,xed->xd", shares, jnp.einsum("xef,edf->xed", inner, stacks["back"]) + stacks["back_bias"])


@pytest.mark.slow
def test_clamped_experts_with_biases_and_their_gradients_are_those_of_every_expert():
    (x, logits), stacks = (leaf[0] for leaf in batch(1)), clamped_stacks()
    (found, mine), (expected, theirs) = (
        jax.jit(jax.value_and_grad(lambda *args, run=run: (run(*args) ** 2).sum(), argnums=(0, 1, 2)))(
            x, logits, stacks
        )
        for run in (clamped, clamped_dense)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for own, other in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.slow
@forms
def test_clamped_experts_of_any_load_mapped_over_are_every_experts_output(at_once: int):
    x, chosen = tokens(29)
    stacks = clamped_stacks()
    run = jax.jit(jax.vmap(partial(_outputs, clamped_expert, largest=4, at_once=at_once), in_axes=(0, 0, None)))
    found = run(np.stack([x, -x]), np.stack([chosen, chosen[::-1]]), stacks)
    for own, picked, outs in zip((x, -x), (chosen, chosen[::-1]), found, strict=True):
        each = jax.vmap(clamped_expert, in_axes=(0, None), out_axes=1)(stacks, jnp.asarray(own))
        expected = np.take_along_axis(np.asarray(each), picked[..., None], axis=1)
        np.testing.assert_allclose(outs, expected, atol=TOLERANCE)

"""Attention in plain JAX against float64: soft caps, sinks, and prompts in query blocks."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.kvcache.state import KvState, Layout
from ferrum_jax.ops import attention_xla
from ferrum_jax.ops.attention import attend
from ferrum_jax.ops.attention_xla import BATCHED_TOKENS
from tests.ops.paged import LAYER, Case, Filled, as_query_blocks, expected, fill
from tests.tiers import by_default

TOLERANCE = 2e-6  # float32 sums in another order; outputs are of the order of one
CASE = Case(lengths=(37, 0, 5, 0), counts=(3, 0, 1, 7), tokens=7, softcap=0.7, window=33)
CAPS_AND_SINKS = itertools.product([0.7, None], [True, False])
SINKS = np.array([-3.0, -1.0, 0.0, 1.0, 2.5, 30.0], np.float32)  # some nothing, some almost all

attend_jitted = jax.jit(attend, static_argnames=("scale", "window", "softcap", "backend"))


@pytest.mark.parametrize(("softcap", "has_sinks"), by_default(CAPS_AND_SINKS, (0.7, True)))
def test_soft_caps_and_sinks_are_those_of_the_papers(softcap: float | None, has_sinks: bool):
    case = replace(CASE, softcap=softcap)
    filled = fill(case, "products")
    call = functools.partial(attend_jitted, scale=case.head_dim**-0.5, window=case.window, softcap=softcap)
    found = call(filled.q, filled.kv, LAYER, filled.rows, sinks=jnp.asarray(SINKS) if has_sinks else None)
    np.testing.assert_allclose(found, expected(case, filled, SINKS if has_sinks else None), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("size", by_default([1, 3, 4, 7], 3))
def test_blocks_of_queries_of_any_size_give_the_same(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_xla, "QUERY_BLOCK", size)
    filled = fill(CASE, "products")
    call = functools.partial(attend, scale=CASE.head_dim**-0.5, window=CASE.window, softcap=CASE.softcap)
    found = jax.jit(functools.partial(call, layer=LAYER))(filled.q, filled.kv, rows=filled.rows)
    np.testing.assert_allclose(found, expected(CASE, filled), rtol=0, atol=TOLERANCE)


PROMPT = Case(lengths=(21,), counts=(57,), tokens=60, columns=7)  # its table has blocks that nobody has written
SIZES = (BATCHED_TOKENS, BATCHED_TOKENS + 3)  # rows that are walked together, and one by one


def call(case: Case, filled: Filled, sinks: jax.Array | None = None) -> jax.Array:
    return attend_jitted(
        filled.q, filled.kv, LAYER, filled.rows,
        scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap, sinks=sinks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "window", "softcap", "sinks"),
    [("products", None, None, None), ("positions", 23, None, SINKS), ("latent", 1, 0.7, SINKS)],
    ids=["plain", "window and sinks", "latent"],
)
@pytest.mark.parametrize("size", by_default(SIZES, SIZES[1]))
def test_a_prompt_in_query_blocks_equals_the_prompt_in_one_row(
    size: int, layout: Layout, window: int | None, softcap: float | None, sinks: np.ndarray | None
):
    case = replace(PROMPT, window=window, softcap=softcap)
    filled = fill(case, layout)
    if layout == "latent":
        filled = replace(filled, values=filled.keys)
    given = None if sinks is None else jnp.asarray(sinks)
    blocks = call(case, as_query_blocks(filled, size), given)
    found = blocks.reshape(-1, *blocks.shape[2:])
    wanted = expected(case, filled, sinks)[0]
    np.testing.assert_allclose(found[: case.tokens], wanted, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(call(case, filled, given)[0], wanted, rtol=0, atol=TOLERANCE)
    assert not found[case.tokens :].any()  # padding


@pytest.mark.parametrize("window", by_default([None, 9], 9))
def test_long_rows_of_any_lengths_equal_float64(window: int | None):
    case = Case(lengths=(37, 0, 5, 0), counts=(20, 0, 1, 19), tokens=20, window=window)
    filled = fill(case, "products")
    np.testing.assert_allclose(call(case, filled), expected(case, filled), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_query_blocks_have_the_gradients_of_one_row_also_under_vmap():
    filled = fill(PROMPT, "products")
    whole = jax.tree.map(jnp.nan_to_num, filled.kv)
    target = jax.random.normal(jax.random.key(0), (PROMPT.tokens, *filled.q.shape[2:]))

    def loss(q: jax.Array, kv: KvState[jax.Array], size: int | None) -> jax.Array:
        given = replace(filled, q=q, kv=kv)
        given = given if size is None else as_query_blocks(given, size)
        out = attend(given.q, kv, LAYER, given.rows, scale=0.25, window=23)
        return jnp.sum(out.reshape(-1, *out.shape[2:])[: PROMPT.tokens] * target)

    batch = jnp.stack([filled.q, 2 * filled.q])
    slopes = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None, None)), static_argnums=2)
    expected, found = slopes(batch, whole, None), slopes(batch, whole, SIZES[-1])
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
        assert float(jnp.abs(other).max()) > 0.1


def test_another_backend_refuses_them():
    filled = fill(CASE, "interleaved")
    refused = functools.partial(attend, filled.q, filled.kv, LAYER, filled.rows, scale=1.0, window=None)
    with pytest.raises(UnsupportedError, match="'tpu' has no soft cap of scores, 'xla' has"):
        refused(softcap=1.0, backend="tpu")
    with pytest.raises(UnsupportedError, match="'tpu' has no sinks, 'xla' has"):
        refused(sinks=jnp.asarray(SINKS), backend="tpu")

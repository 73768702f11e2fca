"""Attention over parts, merged, is attention over the whole."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.ops.attention_triton import merge

TOLERANCE = 1e-6  # float32
ROWS, KEYS, WIDTH = 5, 23, 7


def attention(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax average of values in float64, and the log-sum-exp; nothing seen gives NaN and minus infinity."""
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(scores.astype(np.float64))
        return weights @ values / weights.sum(-1, keepdims=True), np.log(weights.sum(-1))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), cuts=st.sets(st.integers(0, KEYS), max_size=3), spread=st.sampled_from([1.0, 30.0]))
def test_merging_any_division_of_the_positions_gives_the_whole(seed: int, cuts: set[int], spread: float):
    rng = np.random.default_rng(seed)
    scores, values = rng.standard_normal((ROWS, KEYS)) * spread, rng.standard_normal((KEYS, WIDTH))
    edges = [0, *sorted(cuts), KEYS]
    parts = [attention(scores[:, a:b], values[a:b]) for a, b in itertools.pairwise(edges)]
    outs, lses = (jnp.asarray(np.stack(side), jnp.float32) for side in zip(*parts, strict=True))
    out, lse = jax.jit(merge)(outs, lses)
    whole, log_sum = attention(scores, values)
    # A log-sum near 60 is itself rounded to 4e-6, and what it weighs with it.
    np.testing.assert_allclose(out, whole, rtol=0, atol=4 * TOLERANCE if spread > 1 else TOLERANCE)
    np.testing.assert_allclose(lse, log_sum, rtol=TOLERANCE, atol=TOLERANCE)


def test_parts_that_saw_nothing_count_for_nothing_even_if_they_hold_nan():
    outs = jnp.array([[[1.0, 2.0]], [[jnp.nan, jnp.nan]]])
    out, lse = merge(outs, jnp.array([[0.5], [-jnp.inf]]))
    np.testing.assert_array_equal(out, [[1.0, 2.0]])
    np.testing.assert_array_equal(lse, [0.5])
    out, lse = merge(outs, jnp.zeros((2, 1)))
    assert np.isnan(out).all()  # but where they saw something, it shows
    out, lse = merge(outs, jnp.full((2, 1), -jnp.inf))
    np.testing.assert_array_equal(out, [[0.0, 0.0]])
    np.testing.assert_array_equal(lse, [-np.inf])

"""Attention over parts, merged, is attention over the whole."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.ops.attention_triton import LOG2E, merge

TOLERANCE = 1e-6  # float32
ROWS, KEYS, WIDTH = 5, 23, 7


together = jax.jit(partial(merge, parts=((0, 4), (4, 2), (6, 1)), dtype=jnp.dtype(jnp.float32), interpret=True))


def merged(outs: np.ndarray, log_sums: np.ndarray) -> np.ndarray:
    return np.asarray(together(jnp.asarray(outs, jnp.float32), jnp.asarray(log_sums * LOG2E, jnp.float32)))


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
    outs, log_sums = (np.stack(side) for side in zip(*parts, strict=True))
    whole, _ = attention(scores, values)
    # A log-sum of base two near 90 is itself rounded to 4e-6, and so is what each of two parts weighs.
    np.testing.assert_allclose(merged(outs, log_sums), whole, rtol=0, atol=4 * TOLERANCE if spread > 1 else TOLERANCE)


def test_parts_that_saw_nothing_count_for_nothing_even_if_they_hold_nan():
    seen, nan = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(1, ROWS, WIDTH), np.full((1, ROWS, WIDTH), np.nan)
    outs, nothing = np.concatenate([seen, nan]), np.full((1, ROWS), -np.inf)
    np.testing.assert_array_equal(merged(outs, np.concatenate([np.full((1, ROWS), 0.5), nothing])), seen[0])
    assert np.isnan(merged(outs, np.zeros((2, ROWS)))).all()  # but where they saw something, it shows
    np.testing.assert_array_equal(merged(outs, np.concatenate([nothing, nothing])), np.zeros((ROWS, WIDTH)))

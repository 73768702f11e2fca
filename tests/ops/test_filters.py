"""Each filter against NumPy, in float64 and by its definition, of XLA's code and of the CPU's kernel."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ferrum_jax.ops.sampling import NUM_CANDIDATES, filter_threshold

pytestmark = pytest.mark.usefixtures("with_kernels")

V = 7
SLACK = 1e-5  # of a probability: float32 sums may fall on either side of a bound
SIZES = st.one_of(st.sampled_from([-np.inf, -30.0, 0.0, 1.0, 1.5]), st.floats(-12, 12, width=32, allow_subnormal=False))
LOGITS = st.lists(SIZES, min_size=V, max_size=V).filter(lambda row: max(row) > -np.inf)  # ties and -inf are common


@partial(jax.jit, static_argnames="has_branches")
def run(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, has_branches: bool = True
) -> jax.Array:
    """Sets what a filter does not keep to -inf."""
    scaled = logits - logits.max(axis=-1, keepdims=True)
    kept = scaled >= filter_threshold(scaled, top_k, top_p, min_p, has_branches=has_branches)[:, None]
    return jnp.where(kept, logits, -jnp.inf)


def kept_by(row: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> NDArray[np.bool_]:
    """Which tokens the definitions keep, ties with the last one included."""
    logits = np.asarray(
        np.asarray(row, np.float32) - np.float32(max(row)), np.float64
    )  # ties are of float32 differences
    ranked = np.sort(logits)[::-1]
    ranked = ranked[ranked >= ranked[min(top_k or len(ranked), len(ranked)) - 1]]  # with the ties of the k-th
    weights = np.exp(ranked - ranked[0])
    probabilities = weights / weights.sum()
    nucleus = len(ranked) if top_p >= 1 else 1 + np.sum(np.cumsum(probabilities)[:-1] < top_p)
    likely = np.sum(probabilities[:nucleus] >= min_p * probabilities[0])
    return logits >= ranked[max(likely, 1) - 1]


def apply(
    row: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, *, has_branches: bool = True
) -> NDArray[np.float32]:
    given = (jnp.array([row], jnp.float32), jnp.array([top_k], jnp.int32))
    given = *given, jnp.array([top_p], jnp.float32), jnp.array([min_p], jnp.float32)
    return np.asarray(run(*given, has_branches=has_branches))[0]


def check(row: list[float], **filters: Any) -> None:
    for has_branches in (True, False):
        _check(row, apply(row, **filters, has_branches=has_branches), filters)


def _check(row: list[float], found: NDArray[np.float32], filters: dict[str, Any]) -> None:
    kept = found > -np.inf
    top_p, min_p = filters.get("top_p", 1.0), filters.get("min_p", 0.0)
    fewest = kept_by(row, **(filters | {"top_p": top_p if top_p >= 1 else top_p - SLACK, "min_p": min_p * (1 + SLACK)}))
    most = kept_by(row, **(filters | {"top_p": top_p if top_p >= 1 else top_p + SLACK, "min_p": min_p * (1 - SLACK)}))
    real = np.asarray(row) > -np.inf
    best = np.asarray(row) == max(row)
    assert np.all(kept[(fewest & real) | best])
    assert not np.any(kept & ~most)
    np.testing.assert_array_equal(found[kept], np.asarray(row, np.float32)[kept])


@settings(deadline=None)
@given(row=LOGITS, k=st.one_of(st.integers(1, V + 3), st.just(2**31 - 1)))
def test_top_k_keeps_the_k_best_and_their_ties(row: list[float], k: int):
    check(row, top_k=k)


@settings(deadline=None)
@given(row=LOGITS, p=st.one_of(st.sampled_from([1e-30, 1e-7, 0.5]), st.floats(2**-23, 1.0, width=32)))
@example(row=[0.0] * V, p=0.5)
@example(row=[0.0, 0.0, -30.0, -30.0, -30.0, -30.0, -30.0], p=1.0)
def test_the_nucleus_is_the_fewest_tokens_that_reach_p(row: list[float], p: float):
    check(row, top_p=p)


@settings(deadline=None)
@given(row=LOGITS, p=st.floats(0.0, 1.0, width=32, allow_subnormal=False))
@example(row=[2.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0], p=1.0)
def test_min_p_keeps_what_is_likely_enough_beside_the_best(row: list[float], p: float):
    check(row, min_p=p)


@settings(max_examples=300, deadline=None)
@given(
    row=LOGITS,
    top_k=st.integers(0, V + 1),
    top_p=st.floats(2**-23, 1.0, width=32),
    min_p=st.floats(0.0, 1.0, width=32, allow_subnormal=False),
)
@example(row=[-np.inf] * 4 + [0.0, 1.0, 2**-52], top_k=0, top_p=0.75, min_p=0.0)
def test_the_filters_follow_each_other(row: list[float], top_k: int, top_p: float, min_p: float):
    check(row, top_k=top_k, top_p=top_p, min_p=min_p)


def test_the_nucleus_is_taken_of_what_top_k_left():
    row = np.log([0.3, 0.2, 0.15, 0.1, 0.1, 0.1, 0.05]).tolist()  # among two: 0.6 and 0.4
    assert np.isfinite(apply(row, top_p=0.55)).sum() == 3
    assert np.isfinite(apply(row, top_k=2, top_p=0.55)).sum() == 1


@settings(deadline=None)
@given(row=LOGITS)
def test_filters_that_are_off_change_nothing(row: list[float]):
    np.testing.assert_array_equal(apply(row), np.asarray(row, np.float32))


def test_filters_that_are_off_change_nothing_where_the_sum_of_probabilities_rounds_up():
    logits = jax.random.normal(jax.random.key(3), (1, 50_000)) * 4
    off = (jnp.zeros(1, jnp.int32), jnp.ones(1), jnp.zeros(1))
    np.testing.assert_array_equal(run(logits, *off), logits)


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-30}, {"top_p": 0.0}, {"min_p": 1.0}, {"min_p": 2.0}])
def test_the_strictest_filters_leave_the_best_token(filters: dict[str, Any]):
    assert np.flatnonzero(np.isfinite(apply([1, 5, 2, -np.inf, 0, 4, 3], **filters))).tolist() == [1]


def test_rows_are_filtered_each_by_its_own_settings():
    row = [1.0, 5.0, 2.0, -np.inf, 0.0, 4.0, 3.0]
    wanted = [(0, 1.0, 0.0), (2, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.3)]
    top_k, top_p, min_p = (jnp.array(column) for column in zip(*wanted, strict=True))
    together = run(jnp.array([row] * 4), top_k.astype(jnp.int32), top_p, min_p)
    for found, (k, p, m) in zip(together, wanted, strict=True):
        np.testing.assert_array_equal(found, apply(row, k, p, m))


@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0, 12.0])  # from nearly uniform to a handful of tokens
@pytest.mark.parametrize("filters", [{"top_k": 40}, {"top_k": 700}, {"top_p": 0.3}, {"top_p": 0.97}, {"min_p": 0.02},
                                     {"top_k": 600, "top_p": 0.9, "min_p": 0.001},
                                     {"top_k": 2**31 - 1, "top_p": 0.9}], ids=str)  # fmt: skip
@pytest.mark.parametrize(
    "size", [5 * NUM_CANDIDATES, 20_000]
)  # some keep more candidates than XLA's code has, or the kernel
def test_a_filter_of_many_tokens_keeps_what_one_of_few_would(size: int, spread: float, filters: dict[str, Any]):
    row = (np.random.default_rng(7).normal(size=size) * spread).astype(np.float32).tolist()
    check(row, **filters)

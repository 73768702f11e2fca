"""What the CPU kernel that chooses tokens is by itself: XLA's choice to the bit, and right past its own limits."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from ferrum_jax.ops import sampling
from ferrum_jax.ops.kernel_use import kernels
from ferrum_jax.ops.sampling import SampleInputs
from tests.ops.conftest import needs_kernels

pytestmark = needs_kernels

ROWS = 3
KEPT = 8192  # tokens between two scores, as in choose.h


@jax.jit
def by_kernel(scores: Any, inputs: Any) -> Any:
    with kernels("cpu"):
        return sampling.choose(scores, inputs)


by_xla = jax.jit(sampling.choose)


def inputs_of(
    temperature: Any, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0, seed: Any = 0, rows: int = ROWS
) -> SampleInputs[Any]:
    def column(value: Any, dtype: Any) -> NDArray[Any]:
        return np.broadcast_to(np.asarray(value, dtype), rows)

    return SampleInputs(
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        seed=column(seed, np.uint32),
        position=np.arange(rows, dtype=np.int32) + 5,
    )


def drawn_scores(seed: int, size: int, spread: float) -> NDArray[np.float32]:
    """Some with many ties, some with tokens that may not be chosen."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((ROWS, size), np.float32) * np.float32(spread) + rng.integers(-50, 50)
    if seed % 3 == 0:
        scores = np.round(scores * 2) / 2
    if seed % 4 == 0:
        scores[:, 1:][:, rng.random(size - 1) < 0.4] = -np.inf
    return scores


@pytest.mark.parametrize("size", [1, 7, 300, 20_000])
def test_the_kernel_and_xla_choose_the_same_bits(size: int):
    """Without top-p and min-p, whose sums and logarithms are rounded otherwise."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        options = [
            rng.choice(np.array(of), ROWS) for of in ([0, 1e-30, 0.5, 1, 5], [0, 1, 2, 50, 300, 4999, 2**31 - 1])
        ]
        inputs = inputs_of(*options, seed=rng.integers(0, 2**32, ROWS))
        scores = drawn_scores(seed, size, 3.0)
        jax.tree.map(np.testing.assert_array_equal, by_kernel(scores, inputs), by_xla(scores, inputs))


def test_a_token_that_lacks_much_is_drawn_as_often_as_it_is_likely():
    """Each of 20,000 tokens lacks 12, which a noise beyond 9 makes up for; together they are a ninth."""
    rows, count = 400, 20_000
    scores = np.full(count + 1, -12.0, np.float32)
    scores[7] = 0.0
    found = np.asarray(by_kernel(np.tile(scores, (rows, 1)), inputs_of(1.0, seed=5, rows=rows))[0])
    others = count * np.exp(-12)
    assert np.mean(found != 7) == pytest.approx(others / (1 + others), abs=0.05)
    assert len({*found}) > rows / 20


@pytest.mark.parametrize(("top_k", "top_p"), [(4999, 1.0), (0, 0.5), (4999, 0.5)])
def test_more_equal_scores_than_the_kernel_keeps_are_all_kept(top_k: int, top_p: float):
    scores = np.full((ROWS, 2 * KEPT + 3), -3.0, np.float32)
    scores[1, :200] = 4.0  # 200 of these weigh more than half
    _, thresholds = by_kernel(scores, inputs_of(1.0, top_k, top_p, seed=3))
    assert thresholds.tolist() == [0.0, -7.0 if top_p == 1 else 0.0, 0.0]


def test_a_row_is_chosen_as_alone():
    scores = drawn_scores(5, 5000, 2.0)
    inputs = inputs_of([1.0, 0.0, 0.6], [0, 0, 40], [0.9, 1.0, 1.0], 0.0, seed=[1, 2, 3])
    ids, thresholds = by_kernel(scores, inputs)
    for row in range(ROWS):
        own = jax.tree.map(operator.itemgetter(slice(row, row + 1)), inputs)
        alone = by_kernel(scores[row : row + 1], own)
        assert (alone[0][0], alone[1][0]) == (ids[row], thresholds[row])


@pytest.mark.parametrize("function", [sampling.choose, sampling.draw, sampling.distribution, sampling.log_distribution])
def test_only_serving_programs_have_the_kernel(function: Any):
    scores, inputs = jnp.ones((ROWS, 61)), jax.device_put(inputs_of(1.0, top_p=0.9))
    for use in (False, True):
        with kernels("cpu" if use else "xla"):
            lowered = jax.jit(lambda *given: function(*given)).lower(scores, inputs).as_text()
        assert ("ferrum_choose" in lowered) == use

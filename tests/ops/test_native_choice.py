"""The CPU kernel that chooses tokens: by the definitions in float64, and bit for bit what XLA's code chooses."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ferrum_jax.ops import native, sampling
from ferrum_jax.ops.sampling import SampleInputs

pytestmark = pytest.mark.skipif(native.instruction_set() is None, reason=f"no kernels: {native.library()}")

ROWS = 3
SIZES = 1, 7, 300, 20_000  # of vocabularies: one, less than a vector, more than the kernel keeps
TEMPERATURES, TOP_K, TOP_P = (
    (0.0, 1e-30, 0.5, 1.0, 5.0),
    (0, 1, 2, 50, 300, 4999, 2**31 - 1),
    (0.0, 0.1, 0.95, 0.999, 1.0),
)
MIN_P = 0.0, 0.01, 0.5, 1.0


@jax.jit
def by_kernel(scores: Any, inputs: Any) -> Any:
    with native.kernels(True):
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


def lowest_kept(scores: NDArray[np.float64], top_k: int, top_p: float, min_p: float) -> float:
    """Returns what a token has to score, relative to the best, by the definitions of the filters."""
    ranked = np.sort(scores)[::-1]
    lowest = ranked[top_k - 1] if 0 < top_k < len(ranked) else -np.inf
    if top_p < 1:
        mass = np.exp(ranked[ranked >= lowest])
        inside = np.cumsum(mass) - mass < top_p * mass.sum()
        lowest = ranked[max(0, inside.sum() - 1)]
    return min(0.0, max(lowest, np.log(min_p) if min_p > 0 else -np.inf))


def check(scores: NDArray[np.float32], inputs: SampleInputs[Any]) -> None:
    """The tokens that are kept are those of the definitions, and the one with the largest sum is chosen."""
    ids, thresholds = map(np.asarray, by_kernel(scores, inputs))
    every = np.arange(scores.shape[1], dtype=np.int32)
    for row, (token, threshold) in enumerate(zip(ids, thresholds, strict=True)):
        if inputs.temperature[row] == 0:
            assert (token, threshold) == (scores[row].argmax(), -np.inf)
            continue
        exact = (scores[row].astype(np.float64) - scores[row].max()) / inputs.temperature[row]
        top_k, top_p, min_p = int(inputs.top_k[row]), float(inputs.top_p[row]), float(inputs.min_p[row])
        rounding = 1e-5 if top_p < 1 else 0.0
        least, most = (lowest_kept(exact, top_k, top_p * (1 + by), min_p) for by in (rounding, -rounding))
        near = 1e-6 * max(1.0, -threshold) if np.isfinite(threshold) else 0.0
        assert least - near <= threshold <= most + near
        noise = np.asarray(
            sampling.gumbel(*jax.device_put((inputs.seed[row], inputs.position[row], every))), np.float64
        )
        sums = exact + noise
        assert exact[token] >= threshold - near
        assert sums[token] >= sums[exact > threshold + near].max(initial=-np.inf) - 1e-6 * max(1.0, abs(sums[token]))


def drawn_scores(seed: int, size: int, spread: float, *, coarse: bool, masked: bool) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((ROWS, size), np.float32) * np.float32(spread) + rng.integers(-50, 50)
    if coarse:  # many ties
        scores = np.round(scores * 2) / 2
    if masked:
        scores[:, 1:][:, rng.random(size - 1) < 0.4] = -np.inf
    return scores


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_chosen_is_what_the_definitions_say(data: st.DataObject):
    size, seed = data.draw(st.sampled_from(SIZES)), data.draw(st.integers(0, 2**32 - 1))
    spread = data.draw(st.sampled_from([0.01, 1.0, 3.0, 30.0]))
    scores = drawn_scores(seed, size, spread, coarse=data.draw(st.booleans()), masked=data.draw(st.booleans()))
    options = [
        data.draw(st.lists(st.sampled_from(of), min_size=ROWS, max_size=ROWS))
        for of in (TEMPERATURES, TOP_K, TOP_P, MIN_P)
    ]
    check(scores, inputs_of(*options, seed=seed))


@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_and_xla_choose_the_same_bits(size: int):
    """Without top-p and min-p, whose sums and logarithms are rounded otherwise."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        scores = drawn_scores(seed, size, 3.0, coarse=seed % 3 == 0, masked=seed % 4 == 0)
        options = [rng.choice(np.array(of), ROWS) for of in (TEMPERATURES, TOP_K)]
        inputs = inputs_of(*options, seed=rng.integers(0, 2**32, ROWS))
        jax.tree.map(np.testing.assert_array_equal, by_kernel(scores, inputs), by_xla(scores, inputs))


def test_unlikely_tokens_are_drawn_as_often_as_they_are_likely():
    """Each of 20,000 tokens lacks 12, which a noise beyond 9 makes up for; together they are a ninth."""
    rows, scores = 400, np.full(SIZES[-1] + 1, -12.0, np.float32)
    scores[7] = 0.0
    found = np.asarray(by_kernel(np.tile(scores, (rows, 1)), inputs_of(1.0, seed=5, rows=rows))[0])
    others = SIZES[-1] * np.exp(-12)
    assert np.mean(found != 7) == pytest.approx(others / (1 + others), abs=0.05)
    assert len({*found}) > rows / 20


def test_more_equal_scores_than_the_kernel_keeps_are_all_kept():
    scores = np.full((ROWS, SIZES[-1]), -3.0, np.float32)
    scores[1, :200] = 4.0
    for top_k, top_p in ((4999, 1.0), (0, 0.5), (4999, 0.5)):
        inputs = inputs_of(1.0, top_k, top_p, seed=3)
        check(scores, inputs)
        assert by_kernel(scores, inputs)[1][0] == 0


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_what_is_drawn_is_among_what_is_kept(kernels: bool, softcap: float):
    @jax.jit
    def sampled(scores: Any, inputs: Any) -> Any:
        with native.kernels(kernels):
            return sampling.sample(jnp.tanh(scores / softcap) * softcap if softcap else scores, inputs)

    for seed in range(60):
        rng = np.random.default_rng(seed)
        options = [
            rng.choice(np.array(of), ROWS) for of in ([0.1, 0.7, 3.0], [0, 1, 5, 40], [0.5, 0.9, 1.0], [0.0, 0.2])
        ]
        scores = rng.standard_normal((ROWS, 61), np.float32) * np.float32(5)
        found = sampled(scores, inputs_of(*options, seed=seed))
        processed = np.asarray(found.processed_logprobs)
        assert np.all((processed > -np.inf) & (processed <= 1e-5))


@pytest.mark.parametrize("temperature", [1e-38, 2e38])
def test_what_is_forbidden_stays_so_at_any_temperature(temperature: float):
    scores = drawn_scores(0, 61, 3.0, coarse=False, masked=False)
    scores[:, :50] = -np.inf
    for choose in (by_kernel, by_xla):
        for top_p in (1.0, 0.9):
            for seed in range(5):
                assert np.all(np.asarray(choose(scores, inputs_of(temperature, 0, top_p, seed=seed))[0]) >= 50)


def test_rows_are_drawn_as_often_as_they_are_likely():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))
    rows, kept = 20_000, np.array([0.5, 0.25, 0.125, 0, 0]) / 0.875
    found, _ = by_kernel(np.tile(logits, (rows, 1)), inputs_of(1.0, 0, 0.8, seed=7, rows=rows))
    np.testing.assert_allclose(np.bincount(found, minlength=5) / rows, kept, atol=0.015)
    found, _ = by_kernel(np.tile(logits, (rows, 1)), inputs_of(1.0, seed=8, rows=rows))
    np.testing.assert_allclose(np.bincount(found, minlength=5) / rows, np.exp(logits), atol=0.015)


@pytest.mark.parametrize("size", [1, 5, 40, 4100])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_token_is_chosen_of_any_scores(size: int, temperature: float):
    most = np.finfo(np.float32).max
    ends = (np.nan, 0.0), (np.inf, 0.0), (np.nan, np.inf), (-np.inf, -np.inf), (most, -most), (0.0, 0.0)
    nucleus = {"top_p": 0.9}, {"top_p": 0.0}, {"top_k": 3, "top_p": 0.5}
    filtered: list[dict[str, Any]] = [{}, {"top_k": 2}, {"min_p": 0.1}, *nucleus]
    for value, others in ends:
        for at in {0, size // 2, size - 1}:
            for filters in filtered:
                scores = np.full((ROWS, size), others, np.float32)
                scores[1, at] = value
                ids, _ = by_kernel(scores, inputs_of(temperature, **filters))
                assert np.all((ids >= 0) & (ids < size))
                if value != others:
                    assert ids[1] == at
                if np.isneginf(others):
                    assert list(ids) == [0] * ROWS


def test_a_row_is_chosen_as_alone():
    scores = drawn_scores(3, 5000, 2.0, coarse=False, masked=False)
    inputs = inputs_of([1.0, 0.0, 0.6], [0, 0, 40], [0.9, 1.0, 1.0], 0.0, seed=[1, 2, 3])
    ids, thresholds = by_kernel(scores, inputs)
    for row in range(ROWS):
        own = jax.tree.map(operator.itemgetter(slice(row, row + 1)), inputs)
        alone = by_kernel(scores[row : row + 1], own)
        assert (alone[0][0], alone[1][0]) == (ids[row], thresholds[row])


def test_only_serving_programs_have_the_kernel():
    scores, inputs = drawn_scores(0, 61, 1.0, coarse=False, masked=False), inputs_of(1.0, top_p=0.9)
    assert "ferrum_choose" not in by_xla.lower(scores, inputs).as_text()
    for function in (sampling.draw, sampling.distribution, sampling.log_distribution):
        with native.kernels(True):
            assert (
                "ferrum_choose"
                in jax.jit(lambda *given, function=function: function(*given)).lower(scores, inputs).as_text()
            )

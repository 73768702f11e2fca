"""Choices against NumPy, and the law that a row's draw is its own, of XLA's code and of the CPU's kernel."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ferrum_jax.ops.kernel_use import kernels
from ferrum_jax.ops.sampling import (
    Choice,
    SampleInputs,
    argmax,
    best,
    likeliest,
    penalise_counts,
    penalise_repetition,
    sample,
)

pytestmark = pytest.mark.usefixtures("with_kernels")

V = 11
ROWS = (1, 8)
NUMBERS = np.array([-np.inf, -3.0, 0.0, 1.0, 1.5, 80.0, np.inf, np.nan], np.float32)  # ties are common
run = jax.jit(sample)


def inputs(rows: int, vocab: int = V, /, **settings: Any) -> SampleInputs[jax.Array]:
    """Sampling of every row alike, or of each by an array; greedy by default."""

    def column(name: str, dtype: Any, default: float) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(settings.get(name, default), dtype), rows)

    return SampleInputs(
        temperature=column("temperature", jnp.float32, 0.0),
        top_k=column("top_k", jnp.int32, 0),
        top_p=column("top_p", jnp.float32, 1.0),
        min_p=column("min_p", jnp.float32, 0.0),
        repetition_penalty=column("repetition_penalty", jnp.float32, 1.0),
        seed=column("seed", jnp.uint32, 0),
        position=column("position", jnp.int32, 0),
        seen=jnp.broadcast_to(jnp.asarray(settings.get("seen", False), bool), (rows, vocab)),
    )


@functools.cache
def noise(rows: int, vocab: int = V, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, vocab)) * 3


def penalised(logits: NDArray[Any], seen: NDArray[np.bool_], penalty: float) -> NDArray[Any]:
    out = logits.copy()
    for at in np.flatnonzero(seen):
        out[at] = out[at] / penalty if out[at] > 0 else out[at] * penalty
    return out


@pytest.mark.slow
def test_temperature_0_takes_the_best_token_whatever_the_other_settings():
    logits = noise(8)
    found = run(logits, inputs(8, top_k=3, top_p=0.1, min_p=0.9, seed=np.arange(8)))
    np.testing.assert_array_equal(found.token_ids, np.argmax(logits, axis=-1))


def test_greedy_rows_stay_greedy_beside_drawn_ones():
    logits = jnp.tile(noise(1), (8, 1))
    heat = np.where(np.arange(8) % 2, 30.0, 0.0)
    found = np.asarray(run(logits, inputs(8, temperature=heat, seed=np.arange(8), top_k=[0, 0, 5, 5] * 2)).token_ids)
    assert set(found[::2]) == {int(np.argmax(logits[0]))}
    assert len(set(found[1::2])) > 1


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}])
def test_the_strictest_filters_are_greedy(filters: dict[str, float]):
    logits = noise(8)
    found = run(logits, inputs(8, temperature=5.0, seed=np.arange(8), **filters))
    np.testing.assert_array_equal(found.token_ids, np.argmax(logits, axis=-1))


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-37, 3e-39, 1e-44])
def test_the_smallest_temperatures_are_greedy(temperature: float):
    logits = jnp.sort(noise(8) + 40)  # the best is last, and all would overflow
    found = run(logits, inputs(8, temperature=temperature, seed=np.arange(8)))
    np.testing.assert_array_equal(found.token_ids, np.argmax(logits, axis=-1))


@settings(max_examples=50, deadline=None)
@given(data=st.data(), size=st.sampled_from(ROWS))
def test_a_draw_depends_on_its_own_seed_and_position_alone(data: st.DataObject, size: int):
    at = data.draw(st.integers(0, size - 1))
    seed, position = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(0, 10**6))
    mine = {
        "temperature": data.draw(st.sampled_from([0.0, 0.7, 4.0])),
        "top_k": data.draw(st.sampled_from([0, 4])),
        "top_p": data.draw(st.sampled_from([1.0, 0.8])),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.7])),
        "seed": seed,
        "position": position,
    }
    seen = np.arange(V) % 3 == 0
    row = noise(1, seed=1)
    alone = run(row, inputs(1, **mine, seen=seen))
    # The rows beside it take every branch that this one does not.
    beside = {"temperature": 2.0, "top_k": 2, "top_p": 0.5, "repetition_penalty": 3.0, "seed": 5, "position": 6}
    columns = {name: np.full(size, beside[name], np.float64) for name in mine}
    for name, value in mine.items():
        columns[name][at] = value
    together = run(noise(size, seed=2).at[at].set(row[0]), inputs(size, **columns, seen=seen))
    assert int(together.token_ids[at]) == int(alone.token_ids[0])
    np.testing.assert_allclose(together.logprobs[at], alone.logprobs[0], rtol=1e-6)


def _draws(logits: NDArray[Any], count: int, **settings: Any) -> NDArray[np.int64]:
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1))
    found = run(rows, inputs(count, len(logits), **settings)).token_ids
    return np.bincount(np.asarray(found), minlength=len(logits))


DRAWS = 4000
# The 99.9th percentile of chi-square with 6 degrees of freedom. A right sampler exceeds it once in a thousand choices
# of the seeds below, which are fixed: the test cannot fail by chance.
LIMIT = 22.46


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_are_distributed_as_the_softmax_says(temperature: float, vary: str):
    logits = np.array([1.0, 0.5, 0.0, -0.5, 1.5, 0.2, -1.0])
    counts = _draws(logits, DRAWS, temperature=temperature, **{vary: np.arange(DRAWS)})
    weights = np.exp(logits / temperature)
    expected = DRAWS * weights / weights.sum()
    assert np.sum((counts - expected) ** 2 / expected) < LIMIT


@pytest.mark.slow
def test_filtered_draws_are_distributed_as_the_softmax_of_what_is_left():
    logits = np.array([1.0, 0.5, -np.inf, -0.5, 1.5, 0.2, -1.0, -3.0, 0.9, 0.1])
    counts = _draws(logits, DRAWS, temperature=1.0, top_k=7, seed=np.arange(DRAWS))
    left = np.argsort(logits)[-7:]
    weights = np.exp(logits[left])
    expected = DRAWS * weights / weights.sum()
    assert counts.sum() == counts[left].sum()
    assert np.sum((counts[left] - expected) ** 2 / expected) < LIMIT


@pytest.mark.slow
def test_another_seed_or_position_gives_another_draw():
    logits = np.zeros(50)
    same = {"temperature": 1.0, "seed": 9, "position": 4}
    assert np.count_nonzero(_draws(logits, 64, **same)) == 1
    assert np.count_nonzero(_draws(logits, 64, **(same | {"seed": np.arange(64)}))) > 20
    assert np.count_nonzero(_draws(logits, 64, **(same | {"position": np.arange(64)}))) > 20


@pytest.mark.slow
@settings(deadline=None)
@given(
    row=st.lists(st.floats(-20, 20, width=32, allow_subnormal=False), min_size=V, max_size=V),
    seen=st.lists(st.booleans(), min_size=V, max_size=V),
    penalty=st.floats(0.25, 4, width=32),
)
def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits(
    row: list[float], seen: list[bool], penalty: float
):
    logits = np.asarray(row, np.float32)
    found = penalise_repetition(jnp.array([row]), jnp.array([seen]), jnp.array([penalty]))[0]
    np.testing.assert_allclose(found, penalised(logits, np.asarray(seen), penalty), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("penalty", [float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)])
def test_what_penalties_make_of_finite_logits_is_finite(penalty: float):
    logits = jnp.array([[5.0, 4.0, -3.0, -jnp.inf, 0.0]])
    seen, ones = jnp.ones((1, 5), bool), jnp.ones(1)
    counts = jnp.full((1, 5), 7)
    most = float(np.finfo(np.float32).max)
    for found in (
        penalise_repetition(logits, seen, ones * penalty),
        penalise_counts(logits, counts, ones * most, ones * most),
        penalise_counts(logits, counts, -ones * most, -ones * most),
    ):
        assert np.isfinite(found).tolist() == [[True, True, True, False, True]]
        assert found[0, 3] == -np.inf
    found = run(logits.repeat(8, 0), inputs(8, 5, repetition_penalty=penalty, seen=seen.repeat(8, 0), temperature=1.0))
    assert np.isfinite(found.processed_logprobs).all()
    assert (found.token_ids != 3).all()


@pytest.mark.slow
def test_greedy_choice_is_of_the_penalised_logits():
    logits = jnp.full((8, V), -9.0).at[:, :3].set(jnp.array([[4.0, 3.0, -1.0], [-3.0, -2.0, -2.5]] * 4))
    seen = (jnp.arange(V) == 0) | ((jnp.arange(V) == 1) & (jnp.arange(8) % 2 == 1)[:, None])
    found = run(logits, inputs(8, repetition_penalty=2.0, seen=seen))
    assert found.token_ids.tolist() == [1, 2] * 4


@settings(deadline=None)
@given(penalty=st.sampled_from([1.0, 2.0]), temperature=st.sampled_from([0.0, 0.3, 3.0]), top_k=st.integers(0, 3))
def test_logprobs_are_those_of_the_unchanged_logits(penalty: float, temperature: float, top_k: int):
    logits = noise(8)
    asked = inputs(8, repetition_penalty=penalty, temperature=temperature, top_k=top_k, seen=np.arange(V) < 5)
    found = run(logits, asked)
    wide = np.asarray(logits, np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(expected, np.asarray(found.token_ids)[:, None], axis=-1)[:, 0]
    np.testing.assert_allclose(found.logprobs, chosen, atol=1e-5)


@pytest.mark.slow
def test_sampling_is_the_same_row_by_row_under_vmap():
    logits = noise(8)
    asked = inputs(
        8, temperature=[0, 1, 2, 3] * 2, top_k=[0, 5] * 4, repetition_penalty=1.3, seed=np.arange(8), seen=[True] * V
    )

    def one(row: jax.Array, mine: SampleInputs[jax.Array]) -> Choice[jax.Array]:
        return jax.tree.map(lambda leaf: leaf[0], sample(row[None], jax.tree.map(lambda leaf: leaf[None], mine)))

    with kernels("xla"):  # they have no batching rule
        mapped = jax.jit(jax.vmap(one))(logits, asked)
    whole = run(logits, asked)
    np.testing.assert_array_equal(whole.token_ids, mapped.token_ids)
    np.testing.assert_allclose(whole.logprobs, mapped.logprobs, rtol=1e-6)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_what_is_drawn_is_among_what_is_kept(softcap: float | None):
    """Also where a program computes the scores anew for each use, rounded otherwise, as XLA does with soft caps."""

    @jax.jit
    def sampled(logits: jax.Array, given: SampleInputs[jax.Array]) -> jax.Array:
        return sample(logits if softcap is None else jnp.tanh(logits / softcap) * softcap, given).processed_logprobs

    for seed in range(60):
        rng = np.random.default_rng(seed)
        options = {
            "temperature": [0.1, 0.7, 3.0],
            "top_k": [0, 1, 5, 40],
            "top_p": [0.5, 0.9, 1.0],
            "min_p": [0.0, 0.2],
        }
        asked = inputs(3, 61, seed=seed, **{name: rng.choice(np.array(of), 3) for name, of in options.items()})
        plain = replace(asked, repetition_penalty=None, seen=None)
        found = np.asarray(sampled(noise(3, 61, seed), plain))
        assert np.all((found > -np.inf) & (found <= 1e-5))


ENDS = (np.nan, 0.0), (np.inf, 0.0), (np.nan, np.inf), (-np.inf, -np.inf), (3e38, -3e38), (0.0, 0.0)
FILTERS: list[dict[str, Any]] = [{}, {"top_k": 2}, {"min_p": 0.1}, {"top_p": 0.9}, {"top_p": 0.0}]
FILTERS += [{"top_k": 3, "top_p": 0.5}]


@pytest.mark.parametrize("size", [1, 5, 40, 4100])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_token_is_chosen_of_any_scores(size: int, temperature: float):
    for value, others in ENDS:
        for at in {0, size // 2, size - 1}:
            for filters in FILTERS:
                scores = np.full((3, size), others, np.float32)
                scores[1, at] = value
                found = np.asarray(
                    run(jnp.asarray(scores), inputs(3, size, temperature=temperature, **filters)).token_ids
                )
                assert np.all((found >= 0) & (found < size))
                if value != others and (np.isfinite(value) or (temperature == 0 and value > others)):
                    assert found[1] == at


@pytest.mark.parametrize("temperature", [1e-38, 3e38])
def test_what_is_forbidden_stays_so_at_any_temperature(temperature: float):
    logits = noise(8, 61).at[:, :50].set(-jnp.inf)
    for top_p in (1.0, 0.9):
        found = run(logits, inputs(8, 61, temperature=temperature, top_p=top_p, seed=np.arange(8)))
        assert np.all(np.asarray(found.token_ids) >= 50)
        assert np.all(np.isfinite(found.processed_logprobs))


@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 7), (64, 1), (64, 20), (333, 20), (333, 64), (5000, 20)])
def test_the_best_come_first_and_of_equals_the_first(size: int, count: int):
    find = jax.jit(functools.partial(best, count=count))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        some = NUMBERS[:6] if seed % 4 else NUMBERS  # an eighth that are not numbers take every place
        x = rng.standard_normal((3, size), np.float32) if seed % 2 else rng.choice(some, (3, size))
        if seed % 3 == 0:
            x[0].sort()
        order = np.lexsort((-x, ~np.isnan(x)))[:, :count]  # what is not a number is above all numbers
        values, ids = find(x)
        np.testing.assert_array_equal(ids, order)
        np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis=1))
        are_numbers = ~np.isnan(x).any(axis=1)
        np.testing.assert_array_equal(jax.jit(argmax)(x)[are_numbers], order[are_numbers, 0])


def test_the_likeliest_tokens_have_their_log_probabilities():
    logits = noise(5, 300)
    ids, logprobs = jax.jit(likeliest)(logits)
    expected = np.asarray(jax.nn.log_softmax(logits))
    order = np.argsort(-expected, kind="stable")[:, : ids.shape[1]]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, order, axis=1), rtol=1e-5)

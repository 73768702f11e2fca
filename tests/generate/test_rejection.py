"""Rejection sampling: the target's distribution, whatever the draft's.

Chi-square tests have fixed seeds and fail at p < 1e-4: a right implementation would fail one in 10,000 choices of seed.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from ferrum_jax import SamplingParams
from ferrum_jax.generate.drafts import Draft, DraftSource, PromptLookup
from ferrum_jax.generate.model_draft import ModelDraft
from ferrum_jax.generate.rejection import Purpose, accept, draw, uniform
from ferrum_jax.generate.scheduler import Scheduler
from tests.generate.drafting import MarkovLLM, Scripted, finish, request

V, COUNT = 4, 4
LEAST_ODDS = 1e-4


def check_likely(found: NDArray, expected: NDArray) -> None:
    """Compares counts with probabilities by chi-square; cells that expect fewer than 5 are counted together."""
    expected = expected * found.sum()
    assert found[expected == 0].sum() == 0
    rare = expected < 5
    counts = np.append(found[~rare], found[rare].sum())
    hopes = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(counts[hopes > 0], hopes[hopes > 0]).pvalue > LEAST_ODDS


@pytest.mark.parametrize(
    ("seed", "draws"), [(0, 1500), *(pytest.param(seed, 6000, marks=pytest.mark.slow) for seed in range(4))]
)
def test_accepted_and_redrawn_tokens_have_the_targets_distribution(seed: int, draws: int):
    random = np.random.default_rng(seed)
    draft, target = random.dirichlet(np.ones(V), 2), random.dirichlet(np.ones(V), 3)
    found, num_accepted = np.zeros((V, V)), 0
    for trial in range(draws):
        tokens = [draw(q, uniform(trial, 7 + at, Purpose.PROPOSE)) for at, q in enumerate(draft)]
        given = accept(tokens, draft, target, seed=trial, position=7)
        num_accepted += len(given) - 1
        second = given[1] if len(given) > 1 else draw(target[1], random.random())
        found[given[0], second] += 1
    check_likely(found.ravel(), np.outer(target[0], target[1]).ravel())
    first, both = (np.minimum(draft[at], target[at]).sum() for at in range(2))
    rate = first + first * both  # a token is accepted with one minus the distance of the distributions
    assert num_accepted / draws == pytest.approx(rate, abs=5 * 0.5 * 2 / draws**0.5)


def test_equal_distributions_accept_everything_and_disjoint_ones_nothing():
    one, other = np.array([[0.5, 0.5, 0, 0]] * 3), np.array([[0, 0, 0.25, 0.75]] * 3)
    for trial in range(200):
        assert accept([0, 1], one[:2], one, seed=trial, position=3)[:2] == [0, 1]
        (token,) = accept([0, 1], one[:2], other, seed=trial, position=3)
        assert token in (2, 3)


def test_a_draw_never_gives_what_cannot_be():
    weights = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    assert [draw(weights, number) for number in (0.0, 0.29, 0.31, 1 - 2**-53, 1.0)] == [1, 1, 3, 3, 3]


def test_every_purpose_position_and_seed_has_a_number_of_its_own():
    numbers = {uniform(*place) for place in itertools.product(range(9), range(9), Purpose)}
    assert len(numbers) == 9 * 9 * 3
    assert all(0 <= number < 1 for number in numbers)


PARAMS: dict[str, Any] = {"temperature": 0.8, "top_k": 3, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3}
ASKED = SamplingParams(**PARAMS)


def law(logits: NDArray, seen: Sequence[int], params: SamplingParams) -> NDArray[np.float64]:
    """What ordinary sampling draws from, written down once more."""
    scores = logits.astype(np.float64)
    for token in set(seen):
        scores[token] *= params.repetition_penalty if scores[token] <= 0 else 1 / params.repetition_penalty
    p = np.exp(scores / params.temperature)
    order = np.argsort(-p)
    p[order[params.top_k or len(p) :]] = 0
    p /= p.sum()
    p[order[np.cumsum(p[order]) - p[order] >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def joint(model: MarkovLLM, prompt: list[int]) -> NDArray[np.float64]:
    """The probability of every answer of COUNT tokens."""
    exact = np.zeros((V,) * COUNT)
    for tokens in itertools.product(range(V), repeat=COUNT):
        sequence, probability = list(prompt), 1.0
        for token in tokens:
            probability *= law(model.table[sequence[-1]], sequence, ASKED)[token]
            sequence.append(token)
        exact[tokens] = probability
    return exact


SOURCES: dict[str, Callable[[], DraftSource]] = {
    "one fixed proposal": lambda: Scripted(lambda want: Draft([2, 0][: want.count]), 2),
    "prompt lookup": lambda: PromptLookup(2, 2),
    "the best of a model": lambda: ModelDraft(MarkovLLM(V, seed=9), 2, drawing="best"),
    "shared noise": lambda: ModelDraft(MarkovLLM(V, seed=9), 2, drawing="shared"),
    "noise of its own": lambda: ModelDraft(MarkovLLM(V, seed=9), 2, drawing="own"),
}


@pytest.mark.parametrize(
    ("name", "draws"),
    [("noise of its own", 800)] + [pytest.param(name, 6000, marks=pytest.mark.slow) for name in SOURCES],
)
def test_answers_have_the_targets_distribution(name: str, draws: int):
    model, prompt = MarkovLLM(V, seed=5), [1, 2, 0, 1]
    engine = Scheduler(model, max_rows=64, chunk_tokens=1000, drafts=SOURCES[name]())
    requests = [request(engine, prompt, COUNT, seed=seed, **PARAMS) for seed in range(draws)]
    finish(engine, requests)
    found = np.zeros((V,) * COUNT)
    for one in requests:
        found[tuple(one.answer)] += 1
    check_likely(found.ravel(), joint(model, prompt).ravel())
    assert engine.speculator is not None
    assert 0.02 < engine.speculator.accepted / engine.speculator.drafted < 0.95

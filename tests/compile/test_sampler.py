"""The sampler's programs against NumPy: every option, alone and in mixed batches."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from numpy.typing import NDArray

from ferrum_jax.compile import sampler
from ferrum_jax.compile.sampler import (
    MAX_TOP_LOGPROBS,
    DistributionKey,
    Sampled,
    SampleKey,
    SamplerSpec,
    SamplerState,
    SlotSettings,
    VerifyKey,
)
from ferrum_jax.compile.scores import ProcessedScoreKey, score_processed
from ferrum_jax.compile.step import ProgramContext
from ferrum_jax.ops.sampling import gumbel
from tests.ops.conftest import needs_kernels

V, SLOTS = 61, 9
SPEC = SamplerSpec(num_slots=SLOTS, vocab_size=V, capacity=20)
NOBODY = SLOTS
ALLOWED = np.arange(V) % 3 == 1
EVERY_OPTION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "tiny temperature": {"temperature": 1e-6},
    "top-k": {"temperature": 1.1, "top_k": 4},
    "top-p": {"temperature": 0.9, "top_p": 0.6},
    "min-p": {"temperature": 1.5, "min_p": 0.2},
    "all filters": {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.7, "seen": np.array([3, 5]), "generated": np.array([7, 7])},
    "presence": {"presence_penalty": 1.5, "generated": np.array([1, 2, 2])},
    "frequency": {"frequency_penalty": -0.7, "generated": np.array([4, 4, 9])},
    "bias": {"bias": {5: 4.0, 6: -np.inf, 60: 3.0}},
    "mask": {"allowed": ALLOWED},
    "allowed ids": {"allowed_ids": (2, 40, 59)},
    "stop ids later": {"min_position": 9, "stop_ids": (0, 11, 17)},
    "stop ids now": {"min_position": 8, "stop_ids": (0, 11, 17)},
    "drawn, all of it": {
        "temperature": 1.2, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4,
        "frequency_penalty": 0.2, "bias": {8: 2.0}, "allowed": ~ALLOWED, "min_position": 30, "stop_ids": (2, 3),
        "seen": np.array([0, 2, 8]), "generated": np.array([20, 21, 21]),
    },
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize(
    "key", [SampleKey(2), VerifyKey(1, 2), DistributionKey(1, 2), ProcessedScoreKey(1, 2)], ids=str
)
def test_kernels_choose_and_sum_where_they_attend(key: Any):
    for attention in ("cpu", "xla"):
        context = ProgramContext(None, None, None, jax.device_put(sampler.initial(SPEC)), attention=attention)
        lowered = key.lower(context).as_text()
        assert ("ferrum_choose" in lowered) == (attention == "cpu")
        assert ("ferrum_logsumexp" in lowered) == (attention == "cpu" and not isinstance(key, DistributionKey))
        assert "module @jit_traced" not in lowered


def reference(row: NDArray[np.float32], settings: SlotSettings, position: int) -> tuple[int, float, NDArray[Any]]:
    """Returns the token, its processed log-probability and the scores it was chosen from, by the definitions."""
    scores = row.astype(np.float64)
    for token, bias in settings.bias.items():
        scores[token] += bias
    if position < settings.min_position:
        scores[list(settings.stop_ids)] = -np.inf
    if settings.allowed is not None:
        scores[~settings.allowed] = -np.inf
    if settings.allowed_ids is not None:
        scores[np.setdiff1d(np.arange(V), settings.allowed_ids)] = -np.inf
    counts = np.bincount(np.array([] if settings.generated is None else settings.generated, int), minlength=V)
    seen = counts > 0
    if settings.seen is not None:
        seen[settings.seen] = True
    penalised = np.where(scores > 0, scores / settings.repetition_penalty, scores * settings.repetition_penalty)
    scores = np.where(seen, penalised, scores)
    scores = scores - settings.presence_penalty * (counts > 0) - settings.frequency_penalty * counts
    scaled = (scores - scores.max()) / (settings.temperature or 1.0)
    if settings.temperature == 0:
        token = int(np.argmax(scores))
        return token, scaled[token] - np.log(np.exp(scaled).sum()), scaled
    ranked = np.sort(scaled)[::-1]
    kept = scaled >= (ranked[settings.top_k - 1] if 0 < settings.top_k < V else -np.inf)
    mass = np.where(kept, np.exp(scaled), 0.0)
    order = np.argsort(-mass, kind="stable")
    before = np.cumsum(mass[order]) - mass[order]
    if settings.top_p < 1:
        kept &= scaled >= scaled[order][before < settings.top_p * mass.sum()][-1]
    kept &= np.exp(scaled) >= settings.min_p
    scaled = np.where(kept, scaled, -np.inf)
    noise = gumbel(jnp.uint32(settings.seed), jnp.int32(position), jnp.arange(V, dtype=jnp.int32))
    token = int(np.argmax(scaled + np.asarray(noise, np.float64)))
    return token, scaled[token] - np.log(np.exp(scaled).sum()), scaled


@pytest.fixture(scope="module", params=["xla", pytest.param("cpu", marks=needs_kernels)])
def attention(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def programs(attention: str) -> dict[str, Callable[..., Any]]:
    context = ProgramContext(None, None, None, sampler.initial(SPEC), attention=attention)
    return {
        "sample": jax.jit(context.spread(sampler.sample, (), ())),
        **{way: jax.jit(functools.partial(sampler.sample, way=way)) for way in sampler.WAYS[:-1]},
        "verify": jax.jit(context.spread(sampler.verify, (), ())),
        "configure": jax.jit(sampler.configure, static_argnames="vocab_size"),
        "score": jax.jit(functools.partial(score_processed, blocks=4)),
    }


def configured(programs: dict[str, Callable[..., Any]], settings: list[SlotSettings]) -> SamplerState[jax.Array]:
    state: Any = jax.device_put(sampler.initial(SPEC))
    for slot, one in enumerate(settings):
        state = programs["configure"](state, sampler.pack_settings(slot, one, SPEC), vocab_size=V)
    return state


def sampled(
    programs: dict[str, Callable[..., Any]], state: SamplerState[jax.Array], logits: NDArray[Any], rows: list[list[int]]
) -> tuple[SamplerState[jax.Array], Sampled[Any]]:
    """Samples rows of (slot, position), filled up with rows of nobody: one program does for all tests."""
    count = len(rows)
    padded, full = np.full((SLOTS, 2), NOBODY, np.int32), np.zeros((SLOTS, V), np.float32)
    padded[:count], full[:count] = rows, logits
    after, found = programs["sample"](state, full, padded)
    return after, jax.tree.map(lambda leaf: np.asarray(leaf)[:count], found)


def logits_of(seed: int, rows: int = SLOTS) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=(rows, V)) * 2).astype(np.float32)


@pytest.mark.parametrize("name", EVERY_OPTION)
@pytest.mark.parametrize("beside", ["alone", "among eight"])
def test_every_option_chooses_what_its_definition_says(name: str, beside: str, programs: dict[str, Callable[..., Any]]):
    settings = SlotSettings(seed=3, num_logprobs=2, **EVERY_OPTION[name])
    others = [SlotSettings(seed=at, **one) for at, one in enumerate(list(EVERY_OPTION.values())[: SLOTS - 1])]
    state = configured(programs, [settings, *others])
    for seed in range(5):
        logits = logits_of(seed)
        rows = np.array([[at, 8] for at in range(SLOTS)], np.int32)
        if beside == "alone":
            rows[1:, 0] = NOBODY
        _, found = programs["sample"](state, logits, rows)
        token, processed, _ = reference(logits[0], settings, 8)
        packed = np.asarray(found.packed)
        assert packed[0, 0] == token
        raw, mine = packed[0, 1:].copy().view(np.float32)
        assert mine == pytest.approx(processed, abs=1e-4)
        model = logits[0].astype(np.float64)
        assert raw == pytest.approx(model[token] - np.log(np.exp(model).sum()), abs=1e-4)
        assert np.asarray(found.top_ids)[0, :2].tolist() == np.argsort(-model, kind="stable")[:2].tolist()


@pytest.mark.parametrize("beside", ["alone", "among eight"])
def test_every_option_chooses_the_same_without_branches(beside: str, programs: dict[str, Callable[..., Any]]):
    """In the first way that suffices for all rows of a step, as a GPU has it."""
    every = [SlotSettings(seed=at, num_logprobs=at % 2 - 1, **one) for at, one in enumerate(EVERY_OPTION.values())]
    batches = [[one] for one in every] if beside == "alone" else [every[:SLOTS], every[-SLOTS:]]
    used = set()
    for batch in batches:
        state = configured(programs, batch)
        way = max((one.way for one in batch), key=sampler.WAYS.index)
        used.add(way)
        rows = np.array([[at if at < len(batch) else NOBODY, 8] for at in range(SLOTS)], np.int32)
        for seed in range(5):
            _, wanted = programs["sample"](state, logits_of(seed), rows)
            after, found = programs[way](state, logits_of(seed), rows)
            for at, one in enumerate(batch):
                token, *bits = np.asarray(found.packed)[at]
                assert token == np.asarray(wanted.packed)[at, 0]
                assert np.asarray(after.last_tokens)[at] == token
                assert np.asarray(after.counts)[at, token] == np.asarray(state.counts)[at, token] + 1
                if one.num_logprobs == 0:
                    mine, theirs = (np.array(each, np.int32).view(np.float32) for each in (bits, wanted.packed[at, 1:]))
                    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
    assert used == ({sampler.DRAW, sampler.FILTER} if beside == "alone" else {sampler.FILTER})


def test_the_first_way_that_suffices_is_taken():
    assert SlotSettings().way == SlotSettings(temperature=1.0, num_logprobs=0).way == sampler.DRAW
    assert SlotSettings(top_p=0.5).way == sampler.DRAW  # greedy: nothing is filtered
    assert SlotSettings(temperature=1.0, top_p=0.5).way == SlotSettings(bias={1: 1.0}).way == sampler.FILTER
    assert SlotSettings(num_logprobs=1).way == sampler.BRANCHES


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_every_option_chooses_the_same_where_nothing_but_the_token_is_wanted(
    name: str, programs: dict[str, Callable[..., Any]]
):
    settings = SlotSettings(seed=3, **EVERY_OPTION[name])
    state = configured(programs, [settings])
    rows = np.array([[0, 8], *([NOBODY, 8] for _ in range(SLOTS - 1))], np.int32)
    for seed in range(5):
        logits = logits_of(seed)
        _, found = programs["sample"](state, logits, rows)
        assert np.asarray(found.packed)[0].tolist() == [reference(logits[0], settings, 8)[0], 0, 0]


def test_alternatives_are_of_the_distribution_that_was_asked_for(programs: dict[str, Callable[..., Any]]):
    settings = [
        SlotSettings(temperature=0.7, top_k=5, seed=1, num_logprobs=7, is_processed=processed, bias={9: 50.0})
        for processed in (False, True)
    ]
    state = configured(programs, settings)
    logits = np.repeat(logits_of(1, 1), 2, axis=0)
    _, found = sampled(programs, state, logits, [[0, 4], [1, 4]])
    top_ids, top = found.top_ids, found.top_logprobs
    raw = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    np.testing.assert_allclose(top[0], np.sort(raw)[::-1][:MAX_TOP_LOGPROBS], atol=1e-5)
    _, _, scaled = reference(logits[0], settings[1], 4)
    expected = np.sort(scaled - np.log(np.exp(scaled).sum()))[::-1][:MAX_TOP_LOGPROBS]
    assert top_ids[1, 0] == 9
    np.testing.assert_allclose(top[1, :5], expected[:5], atol=1e-4)
    assert np.all(np.isneginf(top[1, 5:]))


def test_chosen_tokens_are_counted_for_the_penalties_of_their_own_slot(programs: dict[str, Callable[..., Any]]):
    settings = [SlotSettings(frequency_penalty=0.6, presence_penalty=0.2), SlotSettings()]
    state = configured(programs, settings)
    logits, answer = logits_of(4, 2), []
    for position in range(10):
        expected, _, _ = reference(logits[0], replace(settings[0], generated=np.array(answer, int)), position)
        state, found = sampled(programs, state, logits, [[0, position], [1, position]])
        answer.append(int(found.packed[0, 0]))
        assert answer[-1] == expected == int(state.last_tokens[0])
        assert int(found.packed[1, 0]) == logits[1].argmax()
    assert len(set(answer)) > 2


def test_rows_of_nobody_change_nothing(programs: dict[str, Callable[..., Any]]):
    state = configured(programs, [SlotSettings(temperature=1.0, seed=at) for at in range(SLOTS)])
    after, _ = sampled(programs, state, logits_of(0, 3), [[NOBODY, NOBODY]] * 3)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"frequency_penalty": 0.8, "temperature": 0.6}], ids=str)
def test_verifying_chooses_and_counts_as_sampling_token_by_token(
    options: dict[str, Any], programs: dict[str, Callable[..., Any]]
):
    settings = SlotSettings(seed=11, **options)
    logits = logits_of(6, 4)
    plain = configured(programs, [settings])
    answer = []
    for at in range(4):
        plain, found = sampled(programs, plain, logits[at : at + 1], [[0, 6 + at]])
        answer.append(int(found.packed[0, 0]))
    for agreeing in range(4):  # drafted tokens that are right
        drafted = [*answer[:agreeing], *((token + 1) % V for token in answer[agreeing:3])]
        row = np.array([[0, 5, 4, 50, *drafted]], np.int32)
        after, found = programs["verify"](configured(programs, [settings]), logits, row)
        chosen = np.asarray(found.packed)[:, 0].tolist()
        assert chosen[: agreeing + 1] == answer[: agreeing + 1]
        assert int(after.last_tokens[0]) == answer[agreeing]
        counts = np.bincount(answer[: agreeing + 1], minlength=V)
        np.testing.assert_array_equal(np.asarray(after.counts)[0], counts)


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_given_tokens_score_by_the_definition_across_blocks_and_calls(
    name: str, programs: dict[str, Callable[..., Any]]
):
    """Five tokens of one slot in blocks of two, a block of another between calls, and a block of nobody."""
    settings, other = SlotSettings(**EVERY_OPTION[name]), SlotSettings(frequency_penalty=1.0)
    given, logits = [4, 7, 7, 4, 11], logits_of(3, 8)
    blocks = [[0, 20, 2, 9, 4, 4, 7], [0, 22, 2, 7, 7, 7, 4], [1, 3, 2, 1, 7, 7, 7], [NOBODY, 0, 0, 0, 0, 0, 0]]
    state = configured(programs, [settings, other])
    state, first = programs["score"](state, logits, np.array(blocks, np.int32).ravel())
    rest = np.array([[0, 24, 1, 4, 0, 11, 0], *([blocks[-1]] * 3)], np.int32).ravel()
    after, last = programs["score"](state, logits, rest)
    found, known = [*np.asarray(first)[:4], np.asarray(last)[0]], list(EVERY_OPTION[name].get("generated", []))
    for at, token in enumerate(given):
        _, _, scaled = reference(logits[at % 4], replace(settings, generated=np.array(known, int)), 21 + at)
        assert found[at] == pytest.approx(scaled[token] - np.log(np.exp(scaled).sum()), rel=1e-5, abs=1e-4)
        known.append(token)
    np.testing.assert_array_equal(np.asarray(after.counts)[0], np.bincount(known, minlength=V))
    assert np.asarray(after.counts)[1:].sum() == 2


@pytest.mark.parametrize("key", [SampleKey(2), pytest.param(VerifyKey(1, 2), marks=pytest.mark.slow)])
def test_the_programs_serialise_after_they_have_run(
    key: SampleKey | VerifyKey, attention: str, programs: dict[str, Callable[..., Any]]
):
    settings = [SlotSettings(temperature=1.0, top_k=5, top_p=0.5)]
    shapes: Any = sampler.initial(SPEC)
    lowered = key.lower(ProgramContext(None, None, None, jax.device_put(shapes), attention=attention))
    program = lowered.compile()
    rows = np.array([[0, 3], [0, 4]] if isinstance(key, SampleKey) else [[0, 3, 2, 1, 1]], np.int32)
    _, before = program(configured(programs, settings), *jax.device_put((logits_of(0, 2), rows)))
    payload, in_tree, out_tree = serialize_executable.serialize(program)
    loaded = serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, execution_devices=jax.local_devices()[:1]
    )
    _, after = loaded(configured(programs, settings), *jax.device_put((logits_of(0, 2), rows)))
    np.testing.assert_array_equal(after.packed, before.packed)

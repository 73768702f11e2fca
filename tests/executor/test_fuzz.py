"""Whatever is handed in, the answer is right or a `FerrumError`, and an error changes nothing."""

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ferrum_jax import LlmExecutor
from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract import (
    DecodedRun,
    DecodeInput,
    DecodeRun,
    ExecutorState,
    FerrumError,
    FullLogits,
    LogitsReturnPolicy,
    PrefillInput,
    Sampling,
    UnifiedBatch,
    UnifiedBatchItem,
)
from ferrum_jax.contract.answers import choose, score_targets
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.batch import TokenChoice
from tests.executor.answers import TOLERANCE, choose_score, expect_choice, logprobs_of
from tests.executor.asking import prompt
from tests.executor.conftest import Oracle, emptied
from tests.executor.junk import JSON, V, spoiled
from tests.executor.malformed import CALLS, HELD, POLICY, Asked, Built, Later, Scene, Together, resolve
from tests.long import SECONDS, SEED

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def scene(reusing_runner: ModelRunner, loop: asyncio.Runner, adapter_folders: dict[str, str]) -> Scene:
    foreign = loop.run(LlmExecutor(emptied(reusing_runner)).prefill(prompt([1]))).kv_cache
    return Scene(reusing_runner, LlmExecutor(reusing_runner), {"foreign": foreign}, adapter_folders["one"])


def _books(scene: Scene) -> Any:
    """Everything that a refused call must leave as it was."""
    runner = scene.runner
    table = runner._pipeline.table
    tracked = scene.executor._table._live  # what was released behind its back is forgotten when it is asked for
    lengths = {key: (one.length, one.adapter) for key, one in tracked.items() if key in table.live}
    rows = [
        (key, one.slot, list(one.tokens), list(one.blocks))
        for key in table.live
        if (one := table.live.get(key)) is not None
    ]
    metrics = runner.cache_metrics_snapshot(), runner.lora_metrics_snapshot()
    return (
        rows,
        lengths,
        table.pool.num_free,
        metrics,
        list(runner._adapters.loaded),
        scene.executor.status().prefill_operations,
    )


TEXTS = {"a": [1, 2, 3], "live": [4, 5, 6][:HELD]}  # what two sequences hold before every call


def _set(scene: Scene, loop: asyncio.Runner) -> None:
    """Puts the scene back to its beginning."""
    runner = scene.runner
    runner.reset()
    for name in list(runner._adapters.loaded):
        runner.unload_lora(name)
    runner.prefill("a", TEXTS["a"])
    handles = [loop.run(scene.executor.prefill(prompt(TEXTS["live"]))).kv_cache for _ in range(2)]
    scene.executor.release_cache(handles[1].cache_id)
    scene.handles = {
        "live": handles[0],
        "stale": handles[0].with_sequence_length(HELD - 1),
        "released": handles[1],
        "foreign": scene.handles["foreign"],
    }


FULL, ALL = FullLogits(), "all"


class Row(NamedTuple):
    """Tokens that a call has appended, and what it said of them."""

    before: list[int]  # what the sequence held
    tokens: Any
    wanted: LogitsReturnPolicy | str | None  # of the last token, ALL of every one, or None: nothing
    answer: Any
    metadata: Mapping[str, Any] = {}


def _rows(scene: Scene, asked: Asked, found: Any) -> list[Row] | None:
    """The rows of a call that runs the model; None for any other."""
    texts = {"a": TEXTS["a"], scene.handles["live"].cache_id: TEXTS["live"], None: []}

    def text(key: str | None) -> list[int]:
        return texts.get(key, [])

    def held(given: Any) -> list[int]:
        return text(None if given.kv_cache is None else given.kv_cache.cache_id)

    def prefilled(given: Any, output: Any) -> Row:
        if given.metadata.get("ferrum_require_full_logits"):
            return Row(held(given), given.input_ids, ALL, output.logits[0], given.metadata)
        (last,) = output.logits[0]
        return Row(held(given), given.input_ids, FULL, last, given.metadata)

    def decoded(given: Any, output: Any, before: list[int]) -> Row:
        (answer,) = output.logits
        if not isinstance(given.logits_policy, FullLogits):
            (answer,) = answer
        return Row(before, given.input_ids, given.logits_policy, answer, given.metadata)

    match asked.method, [resolve(one, scene) for one in asked.arguments]:
        case "prefill", [given] if asked.of == "executor":
            return [prefilled(given, found)]
        case "decode", [given] if asked.of == "executor":
            return [decoded(given, found, held(given))]
        case "forward_verify", [inputs] if asked.of == "executor":
            ids = [token for given in inputs for token in _ids(given.input_ids)]
            return [decoded(*pair, held(pair[0]) + ids[:at]) for at, pair in enumerate(zip(inputs, found, strict=True))]
        case "batch_prefill", [inputs]:
            return [prefilled(*pair) for pair in zip(inputs, found, strict=True)]
        case "batch_decode", [inputs]:
            return [decoded(*pair, held(pair[0])) for pair in zip(inputs, found, strict=True)]
        case "unified_decode", [batch]:
            return [
                Row(
                    held(one) if one.kv_cache is not None else text(one.seq_id),
                    one.q_tokens,
                    one.logits_policy if one.is_final_chunk else None,
                    answer,
                    one.metadata,
                )
                for one, answer in zip(batch.items, found, strict=True)
            ]
        case "speculative_decode", [given, draft, _]:
            accepted = list(found.accepted_tokens)
            assert accepted == _ids(draft)[: found.acceptance_count]
            return [Row(held(given), _ids(given.input_ids) + accepted, FULL, found.next_logits[0])]
        case "forward", [matrix]:
            return [Row([], *row) for row in zip(matrix, [ALL] * len(found), found, strict=True)]
        case "prefill", [key, tokens]:
            return [Row(text(key), tokens, FULL, found)]
        case "decode", [key, token, _]:
            return [Row(text(key), token, FULL, found)]
        case "forward_verify", [key, tokens]:
            return [Row(text(key), tokens, ALL, found)]
        case "capture", [key, tokens]:
            return [Row(text(key), tokens, ALL, found.logits)]
        case "forward_verify_batch", [rows]:
            return [Row(text(key), tokens, ALL, one) for (key, tokens), one in zip(rows, found, strict=True)]
        case "decode_batch" | "decode_batch_with_full_logits", [rows, *_]:
            return [Row(text(key), token, FULL, one) for (key, token, _), one in zip(rows, found, strict=True)]
        case "decode_batch_with_logits_policy", [rows, policies]:
            answers = zip(rows, policies, found, strict=True)
            return [Row(text(key), token, policy, one) for (key, token, _), policy, one in answers]
        case "unified_forward" | "unified_forward_with_logits_policy", [rows, *policies]:
            answers = zip(rows, policies[0] if policies else [FULL] * len(found), found, strict=True)
            return [
                Row(text(key), tokens, policy if is_final else None, one)
                for (key, tokens, _, is_final), policy, one in answers
            ]
    return None


def _ids(given: Any) -> list[int]:
    return [int(one) for one in np.asarray(given).ravel()]


def _expect(row: Row, oracles: Mapping[str | None, Oracle]) -> None:
    """Fails unless an answer is what the forward without a cache says."""
    tokens, wanted = _ids(row.tokens), row.wanted
    adapter = None if row.metadata.get("ferrum_lora_adapter") is None else "one"  # the only one there is a folder of
    logits = oracles[adapter]([*row.before, *tokens])[-len(tokens) :]
    if wanted is None:
        assert row.answer is None
    elif isinstance(wanted, str | FullLogits):
        np.testing.assert_allclose(row.answer, logits if wanted == ALL else logits[-1], atol=TOLERANCE, rtol=0)
    elif row.answer != (best := choose(logits[-1], wanted)):  # only where two are as good as equal
        scores = [choose_score(logits[-1], wanted, token) for token in (row.answer, best)]
        assert abs(scores[0] - scores[1]) <= 4 * TOLERANCE


def _expect_run(run: DecodeRun, found: DecodedRun, before: list[int], oracle: Oracle) -> None:
    """Fails unless a run's tokens are those that its settings choose one after another."""
    how, ids = run.sampling, found.token_ids
    text = [*before, int(run.token)]
    assert 1 <= len(ids) <= run.max_tokens
    assert len(ids) == run.max_tokens or ids[-1] in run.stop_ids
    assert not set(ids[:-1]) & set(run.stop_ids)
    logits = oracle([*text, *ids[:-1]])[len(before) :]
    wanted = np.take_along_axis(logprobs_of(logits), np.array(ids)[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(found.logprobs, wanted, atol=2 * TOLERANCE, rtol=0)
    settings = SlotSettings(
        temperature=float(how.temperature),
        top_k=int(how.top_k),
        top_p=float(how.top_p),
        min_p=float(how.min_p),
        repetition_penalty=float(how.repetition_penalty),
        seed=int(run.seed),
        seen=np.array(text),
    )
    if settings.temperature and settings.temperature < 0.01:
        return  # a quotient of two logits that rounding alone would change
    for at, token in enumerate(ids):
        expect_choice(TokenChoice(token, 0.0, 0.0), logits[at], settings, ids[:at], len(text) + at)


NOTHING = (
    "release", "truncate_kv", "fork", "prepare", "prepare_kv_capacity", "set_lora_adapter_for_cache", "load_lora",
    "unload_lora", "release_cache", "truncate_kv_for_cache_id",
)  # fmt: skip


def _check(scene: Scene, asked: Asked, found: Any, oracles: Mapping[str | None, Oracle]) -> int:
    """Compares what a call returned with the forward without a cache; returns how many rows it had."""
    if asked.method in NOTHING:
        assert found is None
    elif asked.method == "kv_len":
        assert found == (len(TEXTS["a"]) if asked.arguments == ("a",) else None)
    elif asked.method == "decode_n":
        runs = resolve(asked.arguments[0], scene)
        for run, one in zip(runs, found, strict=True):
            _expect_run(run, one, TEXTS[run.cache_id], oracles[None])
    elif asked.method == "score_batch":
        for (key, tokens, targets), one in zip(asked.arguments[0], found, strict=True):
            logits = oracles[None]([*TEXTS.get(key, []), *_ids(tokens)])[-len(_ids(tokens)) :]
            wanted = score_targets(logits, np.array(_ids(targets)))
            np.testing.assert_allclose(one.logprobs, wanted.logprobs, atol=2 * TOLERANCE, rtol=0)
            np.testing.assert_allclose(logits[range(len(logits)), one.greedy_ids], logits.max(-1), atol=TOLERANCE)
    rows = _rows(scene, asked, found) or []
    for row in rows:
        _expect(row, oracles)
    return len(rows)


def _refused_or_right(
    scene: Scene, loop: asyncio.Runner, call: Callable[[], Any], check: Callable[[Any], None]
) -> None:
    before = _books(scene)

    async def answer() -> Any:
        found = call()
        return await found if inspect.isawaitable(found) else found

    try:
        found = loop.run(answer())
    except FerrumError:
        assert _books(scene) == before
    else:
        check(found)
    assert scene.runner.state is ExecutorState.Ready


FORMS = (list, tuple, np.array, jnp.array, lambda ids: np.array(ids, np.uint8), lambda ids: [np.int64(i) for i in ids])
IDS = st.lists(st.integers(0, V - 1), min_size=1, max_size=5)
ODD_IDS = st.builds(lambda form, ids: form(ids), st.sampled_from(FORMS), IDS)
ODD_ID = st.builds(lambda kind, one: kind(one), st.sampled_from([int, np.int8, np.uint64]), st.integers(0, V - 1))
ODD_FLAG = st.sampled_from([True, False, np.True_, np.False_])
ENDS = {"a": HELD, "b": 0, np.str_("c"): np.int64(0)}  # where each id's next token goes


def _odd_rows(
    *columns: st.SearchStrategy[Any], with_end: int | None = None
) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Rows of different ids, each followed by columns, its end among them at `with_end`."""

    def rows(keys: list[str]) -> st.SearchStrategy[list[tuple[Any, ...]]]:
        ends = [[] if with_end is None else [st.just(ENDS[key])] for key in keys]
        at = with_end or 0
        return st.tuples(
            *(st.tuples(st.just(key), *columns[:at], *end, *columns[at:]) for key, end in zip(keys, ends, strict=True))
        ).map(list)

    return st.lists(st.sampled_from(list(ENDS)), min_size=1, max_size=3, unique=True).flatmap(rows)


def _with_policies(rows: st.SearchStrategy[list[Any]]) -> st.SearchStrategy[tuple[list[Any], list[Any]]]:
    return rows.flatmap(
        lambda given: st.tuples(st.just(given), st.lists(POLICY, min_size=len(given), max_size=len(given)))
    )


def _odd(of: str, method: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Asked]:
    return st.tuples(*arguments).map(lambda given: Asked(of, method, given))


def _odd_input(kind: type, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Built]:
    return st.fixed_dictionaries(fields).map(lambda given: Built(kind, given))


LIVE, DECODES, UNIFIED = st.just(Later("live")), _odd_rows(ODD_ID, with_end=1), _odd_rows(ODD_IDS, ODD_FLAG, with_end=1)
ADAPTED = st.sampled_from([{}, {"ferrum_lora_adapter": "one", "ferrum_lora_path": Later("folder")}])
OPTIONS = st.builds(lambda one, full: one | {"ferrum_require_full_logits": full}, ADAPTED, ODD_FLAG)
PREFILL = _odd_input(PrefillInput, input_ids=ODD_IDS.map(lambda ids: np.array([ids])), metadata=OPTIONS)
DECODE = _odd_input(DecodeInput, input_ids=ODD_ID.map(lambda one: [[one]]), kv_cache=LIVE, logits_policy=POLICY)
SPECULATED = _odd_input(DecodeInput, input_ids=ODD_ID.map(lambda one: [[one]]), kv_cache=LIVE)
ITEM = _odd_input(
    UnifiedBatchItem, seq_id=st.sampled_from(["b", "c"]), q_tokens=ODD_IDS, pos_offset=st.just(np.int8(0)),
    is_final_chunk=ODD_FLAG, metadata=ADAPTED, logits_policy=POLICY,
)  # fmt: skip
RUN = _odd_input(
    DecodeRun, cache_id=st.just("a"), token=ODD_ID, pos=st.just(np.int64(HELD)), max_tokens=st.integers(1, 5),
    sampling=_odd_input(Sampling, temperature=st.sampled_from([0, 0.7]), top_k=st.sampled_from([0, np.int8(3)]),
                        repetition_penalty=st.sampled_from([1, np.float32(1.5)])),
)  # fmt: skip
LEGAL = st.one_of(
    _odd("runner", "prefill", st.sampled_from(list(ENDS)), ODD_IDS),
    _odd("runner", "decode", st.just("a"), ODD_ID, st.just(np.uint8(HELD))),
    _odd("runner", "decode_batch", DECODES),
    _odd("runner", "decode_batch_with_full_logits", DECODES, ODD_FLAG),
    _with_policies(DECODES).map(lambda given: Asked("runner", "decode_batch_with_logits_policy", _together(given))),
    _odd("runner", "decode_n", RUN.map(lambda run: Together([run]))),
    _odd("runner", "forward_verify", st.sampled_from(list(ENDS)), ODD_IDS),
    _odd("runner", "forward_verify_batch", _odd_rows(ODD_IDS)),
    _odd("runner", "capture", st.sampled_from(list(ENDS)), ODD_IDS),
    IDS.flatmap(lambda ids: _odd("runner", "score_batch", _odd_rows(*(st.just(form(ids)) for form in FORMS[1:3])))),
    _odd("runner", "unified_forward", UNIFIED),
    _with_policies(UNIFIED).map(lambda given: Asked("runner", "unified_forward_with_logits_policy", _together(given))),
    _odd("executor", "prefill", PREFILL),
    _odd("executor", "batch_prefill", st.lists(PREFILL, max_size=2).map(Together)),
    _odd("executor", "decode", DECODE),
    _odd("executor", "batch_decode", DECODE.map(lambda one: Together([one]))),
    _odd("executor", "unified_decode", ITEM.map(lambda one: Built(UnifiedBatch, {"items": Together([one])}))),
    _odd("executor", "forward_verify", st.lists(DECODE, min_size=1, max_size=3).map(Together)),
    _odd("executor", "speculative_decode", SPECULATED, ODD_IDS, st.sampled_from([0, 0.5, np.float32(1)])),
    _odd("executor", "forward", IDS.map(lambda ids: jnp.array([ids, ids[::-1]]))),
)


def _together(given: tuple[list[Any], list[Any]]) -> tuple[list[Any], Together]:
    return given[0], Together(given[1])


def _fuzz(
    scene: Scene,
    loop: asyncio.Runner,
    oracles: Mapping[str | None, Oracle],
    examples: int,
    calls: st.SearchStrategy[Asked] = CALLS,
    nth: int | None = None,
) -> int:
    """Asks for so many calls: the same in every run, unless `nth` asks for those of another seed.

    Returns how many rows were compared.
    """
    compared = 0

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=QUIET)
    @given(calls)
    def ask(asked: Asked) -> None:
        def check(found: Any) -> None:
            nonlocal compared
            compared += _check(scene, asked, found, oracles)

        _set(scene, loop)
        _refused_or_right(scene, loop, lambda: asked.make(scene), check)

    (ask if nth is None else seed(SEED + nth)(ask))()
    return compared


def test_a_malformed_call_is_refused_and_changes_nothing(
    scene: Scene, loop: asyncio.Runner, oracles: dict[str | None, Oracle]
):
    _fuzz(scene, loop, oracles, 100)


def test_an_odd_call_that_is_legal_gives_the_logits_of_the_forward_without_a_cache(
    scene: Scene, loop: asyncio.Runner, oracles: dict[str | None, Oracle]
):
    assert _fuzz(scene, loop, oracles, 100, LEGAL) >= 50


PEFT = {
    "peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "exclude_modules": None,
    "layers_to_transform": None, "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none",
    "use_rslora": False, "init_lora_weights": True, "task_type": "CAUSAL_LM", "use_dora": False,
}  # fmt: skip


def _fuzz_folders(scene: Scene, loop: asyncio.Runner, folder: Path, examples: int, nth: int | None = None) -> None:
    weights = Path(scene.folder, "adapter_model.safetensors").read_bytes()

    def loaded(found: Any) -> None:
        assert found is None

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=QUIET)
    @given(spoiled(PEFT, JSON), st.integers(0, 400), st.binary(max_size=9), st.booleans())
    def load(config: dict[str, Any], at: int, junk: bytes, in_config: bool) -> None:
        _set(scene, loop)
        damaged = weights if in_config else weights[:at] + junk + weights[at + len(junk) :]
        (folder / "adapter_config.json").write_text(json.dumps(config if in_config else PEFT), encoding="utf-8")
        (folder / "adapter_model.safetensors").write_bytes(damaged)
        _refused_or_right(scene, loop, lambda: scene.runner.load_lora("one", folder), loaded)

    (load if nth is None else seed(SEED + nth)(load))()


def test_a_damaged_adapter_is_refused_and_changes_nothing(scene: Scene, loop: asyncio.Runner, tmp_path: Path):
    _fuzz_folders(scene, loop, tmp_path, 40)


@pytest.mark.slow
def test_minutes_of_malformed_calls_and_folders_change_nothing(
    scene: Scene, loop: asyncio.Runner, oracles: dict[str | None, Oracle], tmp_path: Path
):
    end = time.monotonic() + SECONDS
    rounds = 0
    print(f"seed {SEED}")
    while time.monotonic() < end:
        _fuzz(scene, loop, oracles, 700, nth=rounds)
        _fuzz(scene, loop, oracles, 300, LEGAL, rounds)
        _fuzz_folders(scene, loop, tmp_path, 200, rounds)
        rounds += 1
    print(f"{1200 * rounds:,} examples, seed {SEED}")

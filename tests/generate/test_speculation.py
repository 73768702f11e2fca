"""`LLM` with speculation: over tiny runners, and how it is asked for."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.contract.errors import (
    CancelledError,
    ConfigError,
    InvalidParameterError,
    NotFoundError,
    UnsupportedError,
)
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.replicas import ReplicatedRunner
from ferrum_jax.generate.drafts import PromptLookup
from ferrum_jax.generate.model_draft import ModelDraft
from ferrum_jax.generate.speculation import Speculation
from ferrum_jax.models.specs import ParamTree
from tests import tiny
from tests.fake import CountingLLM
from tests.generate.conftest import MakeRunner, is_empty
from tests.generate.drafting import RollingLLM
from tests.generate.test_request import letters

COUNT = 20


@pytest.fixture(scope="module")
def drafting(repeating_params: ParamTree, new_runner: MakeRunner) -> Iterator[ModelRunner]:
    with new_runner(repeating_params, strict=True, spec_tokens=3) as runner:
        runner.warmup(progress=False)
        yield runner


@pytest.fixture(scope="module")
def twin(repeating_params: ParamTree, new_runner: MakeRunner) -> Iterator[ModelRunner]:
    with new_runner(repeating_params, strict=True) as runner:
        runner.warmup(progress=False, distributions=True)
        yield runner


@pytest.fixture(scope="module")
def llms(drafting: ModelRunner, twin: ModelRunner) -> dict[str, LLM]:
    """The same model without speculation, with prompt lookup, and with its twin as the draft."""
    asked = {
        "plain": None,
        "lookup": Speculation(num_tokens=3),
        "twin": Speculation(draft=twin, num_tokens=3),
        "own": Speculation(draft=twin, num_tokens=3, drawing="own"),
    }
    return {
        name: LLM.from_model(drafting, letters(), max_rows=4, chunk_tokens=16, speculation=one)
        for name, one in asked.items()
    }


PROMPTS = st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(max_examples=10, deadline=None)
@given(prompts=PROMPTS, temperature=st.sampled_from([0.0, 0.0, 0.7]), penalty=st.sampled_from([1.0, 1.0, 1.2]))
def test_answers_are_those_without_speculation(
    llms: dict[str, LLM], twin: ModelRunner, prompts: list[list[int]], temperature: float, penalty: float
):
    asked = [
        SamplingParams(
            temperature=temperature,
            repetition_penalty=penalty,
            seed=at,
            max_tokens=COUNT,
            stop_token_ids=(3,),
            stop="fb",
        )
        for at in range(len(prompts))
    ]
    plain, *others = (llms[name].generate(prompts, asked) for name in ("plain", "lookup", "twin"))
    for outs in others:
        for out, expected in zip(outs, plain, strict=True):
            same = ("time_to_first_token", "drafted", "accepted", "request_id", "processed_logprobs")
            changed = {name: getattr(out, name) for name in same}
            assert out == replace(expected, **changed)
    for llm in llms.values():
        assert is_empty(llm.runner)
    assert is_empty(twin)


@pytest.mark.parametrize(("name", "temperature"), [("twin", 0.0), ("twin", 0.8), ("own", 0.8)])
def test_a_draft_equal_to_the_target_is_accepted_whole(name: str, temperature: float, llms: dict[str, LLM]):
    asked = [SamplingParams(temperature=temperature, seed=at, max_tokens=21, ignore_eos=True) for at in range(5)]
    outs = llms[name].generate([[at, 1, 4] for at in range(5)], asked)
    assert [(out.drafted, out.accepted) for out in outs] == [(15, 15)] * 5
    assert llms[name].acceptance_rate > 0


@pytest.mark.parametrize(
    "adjusted",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"logit_bias": {5: 2.0}},
        {"allowed_token_ids": tuple(range(9))},
        {"min_tokens": 21, "stop_token_ids": (3,)},
    ],
    ids=lambda one: next(iter(one)),
)
def test_own_draws_of_a_long_prompt_are_accepted_and_the_same_whatever_the_neighbour_asks(
    adjusted: dict[str, Any], llms: dict[str, LLM]
):
    llm, prompts = llms["own"], [[1, 4] * 10, [2, 7, 5] * 6]
    plain = SamplingParams(temperature=0.8, seed=1, max_tokens=21)
    other = replace(plain, **adjusted)
    (alone,), (beside,) = llm.generate(prompts[:1], plain), llm.generate(prompts[1:], other)
    outs = llm.generate(prompts, [plain, other])
    assert [(one.drafted, one.accepted) for one in (alone, beside, *outs)] == [(15, 15)] * 4
    assert [one.token_ids for one in outs] == [alone.token_ids, beside.token_ids]


def test_logprobs_are_those_without_speculation(llms: dict[str, LLM]):
    asked = SamplingParams(max_tokens=COUNT, logprobs=True)
    plain, lookup = (llms[name].generate([[3, 1, 4], [1] * 9], asked) for name in ("plain", "lookup"))
    assert sum(out.accepted for out in lookup) > 0
    for out, expected in zip(lookup, plain, strict=True):
        assert out.token_ids == expected.token_ids
        np.testing.assert_allclose(
            np.array(out.logprobs), np.array(expected.logprobs), atol=1e-5
        )  # float32 sums in another order


def test_after_warmup_speculation_compiles_nothing(llms: dict[str, LLM], compiles: list[str]):
    for llm in llms.values():
        llm.warmup(progress=False)
    compiles.clear()
    for name, llm in llms.items():
        asked = [
            SamplingParams(
                max_tokens=COUNT,
                temperature=at % 2,
                top_k=5 * at,
                seed=at,
                logprobs=at == 2,
                repetition_penalty=1 + at % 3,
            )
            for at in range(5)
        ]
        llm.generate([[1, 2, 1, 2], [3] * 11, [4, 5], [6, 7, 8], [9]], asked)
        assert llm.runner.compile_stats()["compiles_after_warmup"] == 0, name
    assert compiles == []


def test_a_strict_runner_that_was_loaded_without_speculation_is_warm_for_it(new_runner: MakeRunner):
    with new_runner(strict=True, block_size=16) as runner:
        llm = LLM.from_model(runner, speculation=Speculation(num_tokens=3))
        llm.warmup(progress=False)
        (out,) = llm.generate([[1, 2, 3] * 3], SamplingParams(max_tokens=COUNT))
        assert out.drafted > 0


def test_an_abandoned_stream_frees_the_draft_too(llms: dict[str, LLM], twin: ModelRunner):
    stream = llms["twin"].stream([1, 2, 3], SamplingParams(max_tokens=COUNT))
    next(stream)
    stream.close()
    llms["twin"].engine.settle()
    assert is_empty(twin)


def test_preparing_makes_sure_of_what_verifying_needs_and_leaves_no_trace(
    drafting: ModelRunner, monkeypatch: pytest.MonkeyPatch
):
    programs, prepared, used = drafting._programs, set(), set()
    ensure, get = programs.ensure, programs.get
    monkeypatch.setattr(programs, "ensure", lambda keys: (prepared.update(keys := list(keys)), ensure(keys))[1])
    monkeypatch.setattr(programs, "get", lambda key: (used.add(key), get(key))[1])
    most = drafting.plan.buckets.verify_tokens
    with pytest.raises(ConfigError, match=f"expected at most {most - 1}: .* load it with verify_tokens={most + 1}"):
        LLM.from_model(drafting, speculation=Speculation(num_tokens=most))
    llm = LLM.from_model(drafting, max_rows=1, speculation=Speculation(num_tokens=3))
    llm.prepare([1, 2], SamplingParams(temperature=1.0))
    assert is_empty(drafting)
    assert not drafting._pipeline.table.live
    llm.generate([[1, 2]], SamplingParams(max_tokens=COUNT))
    assert llm.acceptance_rate > 0
    assert prepared >= used > set()


CONFIG = {
    "model_type": "llama", "vocab_size": 23, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 20, "max_position_embeddings": 160,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
LADDERS = EngineConfig(decode_rows=(1,), query_blocks=(1,), block_tokens=16)
SIZES: dict[str, Any] = {"max_seqs": 1, "kv_capacity": 32, "engine": LADDERS, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.write_folder(tmp_path_factory.mktemp("tiny"), CONFIG)
    letters().backend.save(str(folder / "tokenizer.json"))
    return folder


def source_of(llm: LLM) -> Any:
    speculator = llm.engine.scheduler.speculator
    return None if speculator is None else speculator.source


def test_the_variable_alone_means_prompt_lookup(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with LLM(folder, **SIZES) as llm:
        assert source_of(llm) is None
        assert llm.acceptance_rate == 0
    monkeypatch.setenv("FERRUM_SPEC_N", "5")
    with LLM(folder, **SIZES) as llm:
        assert isinstance(source_of(llm), PromptLookup)
        assert source_of(llm).num_tokens == 5
        assert llm.runner.plan.buckets.verify_tokens == 6
    with LLM(folder, speculation=Speculation(num_tokens=2), **SIZES) as llm:
        assert source_of(llm).num_tokens == 2  # an argument goes before the variable
    monkeypatch.setenv("FERRUM_SPEC_N", "0")
    with LLM(folder, **SIZES) as llm:
        assert source_of(llm) is None


@pytest.mark.devices
def test_a_mesh_of_the_variable_is_the_targets_not_the_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FERRUM_MESH", "data=2")
    with LLM(folder, speculation=Speculation(draft=folder), **SIZES) as llm:
        source = source_of(llm)
        assert isinstance(source, ModelDraft)
        assert type(source.model) is ModelRunner  # no ReplicatedRunner
        assert isinstance(llm.runner, ReplicatedRunner)


def test_a_path_loads_a_draft_that_goes_with_the_llm(folder: Path):
    with LLM(folder, speculation=Speculation(draft=folder), **SIZES) as llm:
        source = source_of(llm)
        assert isinstance(source, ModelDraft)
        assert source.num_tokens == 4  # where nothing is said
    with pytest.raises(CancelledError, match="closed"):
        source.model.prefill("a", [1])


def test_a_draft_is_loaded_without_bars_where_the_model_is(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    LLM(folder, speculation=Speculation(draft=folder), **SIZES).close()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_draft_and_a_lookup_of_a_path_answer_as_the_model_alone(folder: Path):
    asked = {"alone": None, "lookup": Speculation(num_tokens=5), "draft": Speculation(draft=folder)}
    outs = {}
    for name, speculation in asked.items():
        with LLM(folder, speculation=speculation, **SIZES) as llm:
            outs[name] = llm.generate("cab", SamplingParams(max_tokens=11))[0]
    assert outs["alone"].text == outs["lookup"].text == outs["draft"].text
    assert (outs["draft"].drafted, outs["draft"].accepted) == (8, 8)


def test_a_model_that_was_given_is_not_closed(twin: ModelRunner, new_runner: MakeRunner):
    with new_runner() as runner:
        LLM.from_model(runner, speculation=Speculation(draft=twin)).close()
    assert twin.kv_len("anything") is None


def test_what_makes_no_sense_is_refused(folder: Path, tmp_path: Path):
    wrong: Any = 3
    with pytest.raises(InvalidParameterError, match="draft is a int, expected 'prompt-lookup'"):
        Speculation(draft=wrong)
    with pytest.raises(InvalidParameterError, match="num_tokens is 0"):
        Speculation(num_tokens=0)
    with pytest.raises(InvalidParameterError, match="max_ngram is 0"):
        Speculation(max_ngram=0)
    wrong = "worst"
    with pytest.raises(InvalidParameterError, match="drawing is 'worst', expected 'best', 'shared' or 'own'"):
        Speculation(drawing=wrong)
    with pytest.raises(ConfigError, match="num_tokens is 3, the draft's own is 4"):
        Speculation(draft=PromptLookup(), num_tokens=3)
    with pytest.raises(ConfigError, match="num_tokens is 3, spec_tokens of the engine is 5: give it once"):
        Speculation(num_tokens=3).settle(EngineConfig(spec_tokens=5))
    with pytest.raises(NotFoundError, match="nowhere"):
        LLM(folder, speculation=Speculation(draft=tmp_path / "nowhere"), **SIZES)
    with pytest.raises(ConfigError, match="16 tokens are to be drafted at a time, expected at most 15"):
        LLM(folder, speculation=Speculation(num_tokens=16), **SIZES)
    with pytest.raises(UnsupportedError, match="CountingLLM cannot roll its KV back"):
        LLM.from_model(CountingLLM(), speculation=Speculation())
    with pytest.raises(ConfigError, match="vocabulary of 7 tokens, the target one of 23"):
        LLM(folder, speculation=Speculation(draft=RollingLLM(vocab_size=7)), **SIZES)


def test_the_steps_of_a_draft_are_kept_where_those_of_its_target_are(folder: Path, tmp_path: Path):
    for artifacts, expected in ((False, None), (tmp_path, tmp_path)):
        with LLM(folder, artifacts=artifacts, speculation=Speculation(draft=folder), **SIZES) as llm:
            source = source_of(llm)
            assert isinstance(source, ModelDraft)
            assert isinstance(source.model, ModelRunner)
            kept = source.model.artifacts
            assert (None if kept is None else kept.root) == expected

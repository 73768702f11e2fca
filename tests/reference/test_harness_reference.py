"""lm-evaluation-harness with this package and with its own transformers backend: the same figures, without a hub."""

# pyright: reportMissingImports=false
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import ferrum_jax
from ferrum_jax.config import EngineConfig
from ferrum_jax.contract.errors import RequestValidationError, TokenizerError, UnsupportedError
from ferrum_jax.generate.tokenizer import Tokenizer
from ferrum_jax.serve.server import running
from ferrum_jax.serve.settings import ServerSettings
from scripts.make_references import load_smollm2
from tests import tiny
from tests.generate.test_request import letters
from tests.tiers import by_default

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `eval`")
pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("default")]  # the harness and its libraries have theirs

ROOT = Path(ferrum_jax.__file__).parents[1]
TASKS = ROOT / "examples" / "evaluation"
TOLERANCE = 1e-3  # of log-likelihoods: logits agree within 2e-3
Results = dict[str, Any]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def ours(smollm2_path: Path, offline: None) -> Any:
    harness: Any = importlib.import_module("ferrum_jax.integrations.lm_eval")
    return harness.FerrumLM(str(smollm2_path), max_length=64, batch_size=4, dtype="float32", progress=False)


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory, offline: None) -> Any:
    huggingface: Any = importlib.import_module("lm_eval.models.huggingface")  # not every name of it is typed
    folder = tmp_path_factory.mktemp("tokenizer")
    own = Tokenizer.from_gguf(smollm2_path)
    own.save(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=own.bos_token, eos_token=own.eos_token
    )
    tokenizer.chat_template = own.chat_template
    return huggingface.HFLM(pretrained=load_smollm2(smollm2_path), tokenizer=tokenizer, max_length=64, batch_size=4)


def evaluate(model: Any, limit: int | None) -> Results:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=["capitals", "capitals_text", "capitals_generated"],
        task_manager=manager,
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert found is not None
    return found


@pytest.mark.parametrize("limit", by_default((4, None), 4))
def test_accuracies_and_log_likelihoods_are_those_of_the_harness_own_backend(limit: int | None, ours: Any, theirs: Any):
    mine, reference = evaluate(ours, limit), evaluate(theirs, limit)
    for task, figures in reference["results"].items():
        for name, value in figures.items():
            if isinstance(value, float):
                assert mine["results"][task][name] == pytest.approx(value, rel=1e-3), (task, name)
    assert mine["results"]["capitals"]["acc,none"] == reference["results"]["capitals"]["acc,none"] > 0.5
    for task, samples in reference["samples"].items():
        for own, other in zip(mine["samples"][task], samples, strict=True):
            assert own["arguments"] == other["arguments"]
            for found, expected in zip(own["resps"], other["resps"], strict=True):
                _assert_same(found[0], expected[0])


def _assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, str):
        assert found == expected
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=TOLERANCE)
    else:
        assert found[0] == pytest.approx(expected[0], abs=TOLERANCE)
        assert bool(found[1]) == bool(expected[1])


def _instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    instances: Any = importlib.import_module("lm_eval.api.instance")
    return [instances.Instance(request_type=kind, doc={}, arguments=one, idx=at) for at, one in enumerate(arguments)]


def test_long_empty_and_spaced_texts_are_scored_alike(ours: Any, theirs: Any):
    text = " ".join(f"The number {n} comes before {n + 1}." for n in range(40))
    pairs = _instances("loglikelihood", ("", "Once upon"), ("A cat ", "sat"), (text, " and"), ("1 2 3", " 4 5"))
    for found, expected in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        _assert_same(found, expected)
    texts = _instances("loglikelihood_rolling", (text,), ("Short.",))
    for found, expected in zip(ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts), strict=True):
        assert found == pytest.approx(expected, abs=10 * TOLERANCE)  # a sum over hundreds of tokens


def test_conversations_are_laid_out_alike(ours: Any, theirs: Any):
    history = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "One is"}]
    assert ours.apply_chat_template(history[:1]) == theirs.apply_chat_template(history[:1])
    for last in ("One is", "n", "One is "):  # the second is in the template's end of a message, too
        history[1]["content"] = last
        found, expected = (one.apply_chat_template(history, add_generation_prompt=False) for one in (ours, theirs))
        assert found == expected
    assert ours.chat_template(True) == theirs.chat_template(True)


def test_a_template_without_a_system_role_gets_none_as_in_the_harness(
    ours: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('Role not supported') }}{% endif %}"
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    )
    monkeypatch.setattr(ours, "tokenizer", replace(ours.tokenizer, chat_templates={"default": template}))
    monkeypatch.setattr(theirs.tokenizer, "chat_template", template)
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
    found = ours.apply_chat_template(history)
    assert found == theirs.apply_chat_template(history) == "<user>Name a colour."
    assert "Role not supported: rendering the conversation without its system prompt" in caplog.text
    with pytest.raises(TokenizerError, match="Role not supported"):
        ours.apply_chat_template([{"role": "assistant", "content": "Blue"}, *history])
    with pytest.raises(TokenizerError, match="Role not supported"):
        ours.apply_chat_template([{"role": "assistant", "content": "Blue"}])


def test_an_engine_may_be_given_and_the_pool_bounds_the_length(tmp_path: Path, offline: None):
    harness: Any = importlib.import_module("ferrum_jax.integrations.lm_eval")
    config = tiny.CONFIGS["llama_yarn_options"] | {"vocab_size": 23, "eos_token_id": 7}
    folder = tiny.write_folder(tmp_path / "tiny", config)
    letters().backend.save(str(folder / "tokenizer.json"))
    sizes = EngineConfig(block_size=16, kv_blocks=2)
    for reuses, more in (
        (False, {"engine": sizes}),  # which may have what excludes it, such as `window_kv`
        (True, {"engine": sizes, "prefix_cache": True}),
        (True, {"block_size": 16, "kv_blocks": 2}),
        (False, {"engine": replace(sizes, prefix_cache=False)}),
        (False, {"block_size": 16, "kv_blocks": 2, "prefix_cache": False}),
    ):
        model = harness.FerrumLM(str(folder), batch_size=2, max_length=100, progress=False, **more)
        with model.llm as llm:
            assert llm.runner.plan.prefix_cache is reuses
            assert model.max_length == 32
            (score,) = model.loglikelihood_rolling(_instances("loglikelihood_rolling", ("abc" * 20,)))
            assert score < 0


def test_generation_arguments_are_understood_or_refused(ours: Any):
    ask = ours.generate_until
    (greedy,) = ask(_instances("generate_until", ("The capital of France is", {"max_gen_toks": 6, "until": "."})))
    assert "Paris" in greedy
    assert "." not in greedy
    drawn = {"max_gen_toks": 12, "do_sample": True, "temperature": 1.5, "seed": 3}
    assert ask(_instances("generate_until", ("Once", drawn), ("Once", drawn)))[0] != ""
    with pytest.raises(UnsupportedError, match="num_beams is 4, there is no beam search"):
        ask(_instances("generate_until", ("Once", {"num_beams": 4})))
    with pytest.raises(UnsupportedError, match=r"'num_return'. are unknown, known are .*max_new_tokens, .*num_beams"):
        ask(_instances("generate_until", ("Once", {"num_return": 1})))
    with pytest.raises(RequestValidationError, match="max_gen_toks is 64, the maximal length 64"):
        ask(_instances("generate_until", ("Once", {"max_gen_toks": 64})))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_gen_toks": None},
        {"max_completion_tokens": 2},
        {"max_completion_tokens": 2, "max_tokens": 3},
        {"max_completion_tokens": 2, "max_tokens": 3, "max_new_tokens": 4, "num_beams": 1},
        {"max_completion_tokens": 2, "max_tokens": 3, "max_new_tokens": 4, "max_gen_toks": 5},
        {"max_completion_tokens": 2, "max_tokens": 3, "max_new_tokens": 4, "max_gen_toks": None},
    ],
)
def test_the_length_of_an_answer_has_the_names_and_priorities_of_the_harness(ours: Any, asked: dict[str, Any]):
    utils: Any = importlib.import_module("lm_eval.models.utils")
    expected = utils.normalize_gen_kwargs(asked, ours.max_gen_toks)["max_gen_toks"]
    assert ours._params(asked).max_tokens == expected


def test_the_command_line_knows_the_model(smollm2_path: Path, offline: None):
    arguments = f"--tasks capitals --include_path {TASKS} --limit 2 --model ferrum_jax"
    model = ["--model_args", f"pretrained={smollm2_path},max_length=64"]
    command = [sys.executable, "-m", "ferrum_jax.integrations.lm_eval", *arguments.split(), *model]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|capitals|" in done.stdout


@pytest.mark.parametrize("limit", by_default((4, None), 4))
def test_over_http_the_figures_are_the_same(
    limit: int | None, ours: Any, smollm2_path: Path, tmp_path: Path, offline: None
):
    api: Any = importlib.import_module("lm_eval.models.openai_completions")
    Tokenizer.from_gguf(smollm2_path).save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    with running(ours.llm, ServerSettings(model="smol")) as server:
        remote = api.LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions", model="smol", tokenizer=str(tmp_path), max_length=64,
            num_concurrent=4, batch_size=2,
        )  # fmt: skip
        mine, reference = evaluate(remote, limit), evaluate(ours, limit)
    assert set(mine["results"]) == set(reference["results"])
    for task, figures in reference["results"].items():
        for name, value in figures.items():
            if isinstance(value, float):
                assert mine["results"][task][name] == pytest.approx(value, rel=1e-3), (task, name)
    for task, samples in reference["samples"].items():
        for own, other in zip(mine["samples"][task], samples, strict=True):
            for one, two in zip(own["filtered_resps"], other["filtered_resps"], strict=True):
                if isinstance(two, tuple):
                    assert one[0] == pytest.approx(two[0], abs=TOLERANCE)
                    assert one[1] == two[1]
                elif isinstance(two, float):  # of a whole text
                    assert one == pytest.approx(two, abs=TOLERANCE)
                else:
                    assert one == two

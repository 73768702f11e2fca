"""Adapters as models, what trainers do, metrics, and what a server tells of itself."""

import asyncio
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import ml_dtypes
import openai
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save_file

import ferrum_jax
from ferrum_jax import LLM, SamplingParams, Speculation
from ferrum_jax.contract.errors import ConfigError, FerrumError, ResourceExhaustedError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.loading import load
from ferrum_jax.serve import service
from ferrum_jax.serve.admission import Admission
from ferrum_jax.serve.answers import AnswerProgress, Caller
from ferrum_jax.serve.app import describe_api, endpoints_of
from ferrum_jax.serve.errors import ApiError
from ferrum_jax.serve.server import Server, running, url_of
from ferrum_jax.serve.settings import ServerSettings
from tests import tiny
from tests.executor.conftest import make_runner
from tests.fake import CountingLLM
from tests.generate.conftest import is_empty
from tests.generate.drafting import MarkovLLM
from tests.serve.conftest import SEATS, openai_client
from tests.serve.models import spelled
from tests.serve.test_load import SECONDS, until

ASK: dict[str, Any] = {"prompt": "the quick", "max_tokens": 10, "temperature": 0}


@pytest.fixture
def root(adapter_folders: dict[str, str]) -> str:
    return str(Path(adapter_folders["one"]).parent)


def unload_all(runner: ModelRunner) -> None:
    for name in list(runner._adapters.loaded):
        runner.unload_lora(name)


def test_adapters_are_models_that_come_and_go(
    serve: Any, llm: LLM, runner: ModelRunner, adapter_folders: dict[str, str], root: str
):
    server = serve(llm, adapter_root=root, adapters={"first": adapter_folders["one"]})
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http, openai_client(server) as client:
        assert [one.id for one in client.models.list()] == ["tiny", "first"]
        found = http.post("/v1/load_lora_adapter", json={"lora_name": "second", "lora_path": adapter_folders["two"]})
        assert found.status_code == 200, found.text
        assert [one.id for one in client.models.list()] == ["tiny", "first", "second"]
        assert client.models.retrieve("second").parent == "tiny"
        texts = {
            name: client.completions.create(model=name, **ASK).choices[0].text for name in ("tiny", "first", "second")
        }
        for name, adapter in (("tiny", None), ("first", "first"), ("second", "second")):
            params = SamplingParams(max_tokens=10)
            assert texts[name] == llm.generate("the quick", params, lora_request=adapter)[0].text
        assert len(set(texts.values())) == 3
        again = http.post("/v1/load_lora_adapter", json={"lora_name": "first", "lora_path": adapter_folders["two"]})
        assert again.status_code == 409
        taken = http.post("/v1/load_lora_adapter", json={"lora_name": "tiny", "lora_path": adapter_folders["two"]})
        assert taken.status_code == 409
        full = http.post("/v1/load_lora_adapter", json={"lora_name": "third", "lora_path": adapter_folders["three"]})
        assert full.status_code == 503
        for path in ("/etc", "../..", f"{root}/../..", "\0"):
            wrong = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
            assert wrong.status_code in (400, 403), path
        nothing = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": f"{root}/nothing"})
        assert nothing.status_code == 404
        for name in ("first", "second"):
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "first"}).status_code == 404
        with pytest.raises(openai.NotFoundError, match="'first' does not exist"):
            client.completions.create(model="first", **ASK)
        assert runner.lora_metrics_snapshot()["adapter_count"] == 0


def test_an_adapter_that_fits_nothing_is_a_400_that_says_why(
    serve: Any, llm: LLM, adapter_folders: dict[str, str], tmp_path: Path
):
    folder = tmp_path / "own"
    shutil.copytree(adapter_folders["one"], folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["nothing_here"]}))
    server = serve(llm, adapter_root=str(tmp_path))
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http:
        found = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "own"})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "lora_path"), found.text
    assert "target_modules" in found.json()["error"]["message"]


def test_an_adapter_is_unloaded_when_the_last_request_under_it_has_ended(
    serve: Any, llm: LLM, runner: ModelRunner, adapter_folders: dict[str, str], root: str
):
    server = serve(llm, adapter_root=root, adapters={"first": adapter_folders["one"]})
    with (
        httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http,
        openai_client(server) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        stream = client.completions.create(
            model="first", prompt="ab", max_tokens=80, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = iter(stream)
        next(pieces)
        gone = pool.submit(http.post, "/v1/unload_lora_adapter", json={"lora_name": "first"})
        assert len(list(pieces)) >= 1
        assert gone.result().status_code == 200
        assert runner.lora_metrics_snapshot()["adapter_count"] == 0
    unload_all(runner)


def test_an_adapter_that_could_not_be_unloaded_stays_a_model(
    serve: Any, llm: LLM, runner: ModelRunner, adapter_folders: dict[str, str], root: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    server = serve(llm, adapter_root=root, adapters={"first": adapter_folders["one"]})

    def refuse(_: str) -> None:
        raise ResourceExhaustedError("a sequence uses it")

    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http:
        with monkeypatch.context() as patched:
            patched.setattr(runner, "unload_lora", refuse)
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": "first"}).status_code == 503
        assert http.post("/v1/completions", json=ASK | {"model": "first"}).status_code == 200
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "first"}).status_code == 200
        assert http.get("/v1/models/first").status_code == 404
    assert runner.lora_metrics_snapshot()["adapter_count"] == 0


def test_an_adapter_that_cannot_be_loaded_keeps_the_server_from_starting(llm: LLM, tmp_path: Path):
    with pytest.raises(FerrumError), running(llm, ServerSettings(adapters={"a": str(tmp_path)})):
        pass


def test_a_server_that_does_not_start_leaves_no_adapter_loaded(
    llm: LLM, runner: ModelRunner, adapter_folders: dict[str, str], tmp_path: Path
):
    for more, error in (({"broken": str(tmp_path)}, FerrumError), ({"tiny": adapter_folders["two"]}, ConfigError)):
        settings = ServerSettings(model="tiny", adapters={"first": adapter_folders["one"]} | more)
        with pytest.raises(error), running(llm, settings):
            pass
        assert runner.lora_metrics_snapshot()["adapter_count"] == 0


def test_the_url_of_an_ipv6_address_is_one():
    assert httpx.URL(url_of("::1", 80)).host == "::1"
    assert url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000"


def test_the_capacity_is_that_of_the_pool(serve: Any, params: Any):
    with make_runner(params, replace(SEATS, kv_blocks=4)) as runner:
        server = serve(LLM.from_model(runner, spelled(37)))
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
            assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 32
            long = complete(http, max_tokens=50)
            assert (long.status_code, long.json()["error"]["param"]) == (400, "max_tokens"), long.text
            longer = http.post("/v1/completions", json=ASK | {"prompt": [1] * 33})
            assert longer.json()["error"]["code"] == "context_length_exceeded", longer.text


CONFIG: dict[str, Any] = tiny.CONFIGS["llama3"] | {"vocab_size": 37, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one model."""
    made = []
    for seed in (1, 2):
        folder = tiny.write_folder(tmp_path_factory.mktemp("weights"), CONFIG)
        save_file(tiny.tensors(CONFIG, seed), folder / "model.safetensors", metadata={"format": "pt"})
        made.append(folder)
    return made


@pytest.fixture(scope="module")
def trained(folders: list[Path]) -> Iterator[tuple[Server, LLM]]:
    runner = load(folders[0], dtype="float32", max_seqs=2, kv_capacity=64, kv_blocks=20, block_size=8, quantize="none",
                  prefix_cache=True, progress=False)  # fmt: skip
    settings = ServerSettings(model="tiny", trainer_endpoints=True, quantize="none", drain_seconds=5)
    with runner, running(llm := LLM.from_model(runner, spelled(37)), settings) as server:
        yield server, llm
        llm.close()


@pytest.fixture
def trainer(trained: tuple[Server, LLM]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=trained[0].url, timeout=60, trust_env=False) as one:
        yield one
        one.post("/resume")


def complete(http: httpx.Client, **more: Any) -> httpx.Response:
    return http.post("/v1/completions", json=ASK | {"ignore_eos": True} | more)


def test_weights_of_another_checkpoint_are_set_while_serving(
    trainer: httpx.Client, trained: tuple[Server, LLM], folders: list[Path], tmp_path: Path
):
    texts, versions = [], []
    for folder in (folders[1], folders[0]):
        found = trainer.post("/update_weights", json={"path": str(folder), "live": "keep"})
        assert found.status_code == 200, found.text
        versions.append(found.json()["weight_version"])
        texts.append(complete(trainer).json()["choices"][0]["text"])
        with _alone(folder) as alone:
            expected = alone.generate("the quick", SamplingParams(max_tokens=10, ignore_eos=True))[0].text
        assert texts[-1] == expected
    assert versions == [1, 2]
    assert texts[0] != texts[1]
    other = tiny.write_folder(tmp_path, CONFIG | {"rms_norm_eps": 0.3})
    found = trainer.post("/update_weights", json={"path": str(other)})
    assert found.status_code == 400
    assert "rms_norm_eps is 0.3 there" in found.json()["error"]["message"]
    for wrong in ({"path": "/nowhere"}, {"path": str(folders[0]), "live": "later"}, {}):
        assert trainer.post("/update_weights", json=wrong).status_code in (400, 404)


def test_weights_that_cannot_be_read_are_a_400_that_says_why(trainer: httpx.Client, tmp_path: Path):
    tiny.write_folder(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": "many"}))
    found = trainer.post("/update_weights", json={"path": str(tmp_path)})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "path"), found.text
    assert "num_attention_heads" in found.json()["error"]["message"]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()  # no file
    found = trainer.post("/update_weights", json={"path": str(tmp_path)})
    assert found.status_code == 400, found.text


@pytest.mark.devices
def test_weights_for_a_mesh_are_read_on_the_host(folders: list[Path], monkeypatch: pytest.MonkeyPatch):
    read, asked = service.load_params, []
    monkeypatch.setattr(service, "load_params", lambda *of, **how: asked.append(how["device"]) or read(*of, **how))
    runner = load(folders[0], dtype="float32", max_seqs=2, kv_capacity=64, mesh={"model": 2}, progress=False)
    settings = ServerSettings(model="tiny", trainer_endpoints=True)
    with runner, running(llm := LLM.from_model(runner, spelled(37)), settings) as server:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
            assert http.post("/update_weights", json={"path": str(folders[1])}).json() == {"weight_version": 1}
            found = complete(http, temperature=0).json()["choices"][0]["text"]
        llm.close()
    with _alone(folders[1]) as alone:
        assert found == alone.generate("the quick", SamplingParams(max_tokens=10, ignore_eos=True))[0].text
    assert [device.platform for device in asked] == ["cpu"]


def test_updates_that_wait_for_requests_to_end_do_not_hold_up_the_pause_that_ends_them(
    trainer: httpx.Client, trained: tuple[Server, LLM], folders: list[Path], monkeypatch: pytest.MonkeyPatch
):
    server, llm = trained
    entered, gate, execute = threading.Event(), threading.Event(), llm.runner.execute

    def slowly(batch: Any) -> Any:
        entered.set()
        assert gate.wait(SECONDS)
        return execute(batch)

    monkeypatch.setattr(llm.model, "execute", slowly)
    before, many = llm.runner.params_version, min(32, (os.cpu_count() or 1) + 4)  # asyncio's threads
    with ThreadPoolExecutor(many + 2) as pool:
        answer = pool.submit(complete, trainer, max_tokens=50)
        assert entered.wait(SECONDS)
        weights = {"path": str(folders[0]), "live": "wait"}
        updates = [pool.submit(trainer.post, "/update_weights", json=weights) for _ in range(many)]
        time.sleep(0.5)  # for all of them to come
        assert not any(one.done() for one in updates)
        paused = pool.submit(trainer.post, "/pause", json={"mode": "abort"})
        until(lambda: server.service.admission.is_paused)
        gate.set()
        assert answer.result().json()["choices"][0]["finish_reason"] == "abort"
        assert paused.result().json() == {"is_paused": True}
        versions = sorted(one.result().json()["weight_version"] for one in updates)
    assert versions == list(range(before + 1, before + many + 1))


def test_a_resume_ends_a_pause_for_good(trainer: httpx.Client, trained: tuple[Server, LLM], monkeypatch: Any):
    server, llm = trained
    gate, entered = threading.Event(), threading.Event()
    step = llm.engine.scheduler.step

    def held() -> Any:
        entered.set()
        gate.wait(SECONDS)
        return step()

    monkeypatch.setattr(llm.engine.scheduler, "step", held)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(complete, trainer, max_tokens=5)
        assert entered.wait(SECONDS)
        paused = pool.submit(trainer.post, "/pause", json={"mode": "abort"})
        until(lambda: server.service.admission.is_paused)
        assert trainer.post("/resume").json() == {"is_paused": False}
        gate.set()
        answer.result()
        assert paused.result().json() == {"is_paused": False}
    assert complete(trainer).status_code == 200


@pytest.mark.parametrize("asked", [None, "auto", "int8 of the environment"])
def test_weights_are_read_in_the_bits_in_which_the_others_are_served(
    asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a checkpoint in 16 bits, which a CPU's kernels serve as it is unless it is quantised."""
    folder = tiny.write_folder(tmp_path, CONFIG)
    half = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tiny.tensors(CONFIG).items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    quantize = asked if asked in (None, "auto") else None
    if quantize != asked:
        monkeypatch.setenv("FERRUM_QUANTIZE", "int8")
    runner = load(folder, max_seqs=1, kv_capacity=64, progress=False, quantize=quantize)
    settings = ServerSettings(model="tiny", trainer_endpoints=True, quantize=quantize)
    with runner, running(llm := LLM.from_model(runner, spelled(37)), settings) as server:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
            before = complete(http).json()["choices"][0]["text"]
            found = http.post("/update_weights", json={"path": str(folder)})
            assert found.status_code == 200, found.text
            assert complete(http).json()["choices"][0]["text"] == before
        llm.close()


def _alone(folder: Path) -> LLM:
    runner = load(folder, dtype="float32", max_seqs=1, kv_capacity=64, progress=False, quantize="none")
    return LLM.from_model(runner, spelled(37))


def test_a_pause_lets_end_what_runs_and_begin_nothing(trainer: httpx.Client, trained: tuple[Server, LLM]):
    server, _ = trained
    with ThreadPoolExecutor(4) as pool:
        running_one = pool.submit(complete, trainer, max_tokens=50)
        until(lambda: bool(server.service.live) or running_one.done())
        assert trainer.post("/pause").json() == {"is_paused": True}
        assert running_one.done() or not server.service.live
        assert running_one.result().json()["usage"]["completion_tokens"] == 50
        waiting = pool.submit(complete, trainer)
        until(lambda: server.service.admission.live == 1)
        time.sleep(0.05)
        assert not waiting.done()
        assert 'vllm:num_requests_waiting{model_name="tiny"} 1.0' in trainer.get("/metrics").text
        assert trainer.get("/is_paused").json() == {"is_paused": True}
        late = complete(trainer, max_time=0.05)
        assert late.status_code == 408
        assert trainer.post("/resume").json() == {"is_paused": False}
        assert waiting.result().status_code == 200
    assert 'vllm:num_requests_waiting{model_name="tiny"} 0.0' in trainer.get("/metrics").text
    assert trainer.get("/is_paused").json() == {"is_paused": False}
    assert trainer.post("/pause", json={"mode": "keep"}).status_code == 400


def test_a_pause_may_end_what_runs_with_what_it_has(
    trainer: httpx.Client, trained: tuple[Server, LLM], monkeypatch: pytest.MonkeyPatch
):
    server, llm = trained
    calls, gate = itertools.count(), threading.Event()
    execute = llm.runner.execute

    def slowly(batch: Any) -> Any:
        if next(calls) >= 5:
            assert gate.wait(SECONDS)
        return execute(batch)

    monkeypatch.setattr(llm.model, "execute", slowly)
    with ThreadPoolExecutor(2) as pool, trainer.stream(
        "POST", "/v1/completions", json=ASK | {"ignore_eos": True, "max_tokens": 50, "stream": True}
    ) as stream:  # fmt: skip
        lines = stream.iter_lines()
        assert "finish_reason" in next(lines)
        paused = pool.submit(trainer.post, "/pause", json={"mode": "abort"})
        until(lambda: server.service.admission.is_paused)
        gate.set()
        rest = [line for line in lines if line]
        assert '"finish_reason":"abort"' in rest[-2]
        assert paused.result().json() == {"is_paused": True}
    trainer.post("/resume")
    assert complete(trainer).status_code == 200


def test_a_pause_ends_what_has_not_all_its_scores_yet(
    trainer: httpx.Client, trained: tuple[Server, LLM], monkeypatch: pytest.MonkeyPatch
):
    server, llm = trained
    gate, execute = threading.Event(), llm.runner.execute
    messages, put = [], llm.engine._put

    def slowly(batch: Any) -> Any:
        assert gate.wait(SECONDS)
        return execute(batch)

    def putting(message: Any) -> None:
        put(message)
        messages.append(message)

    monkeypatch.setattr(llm.model, "execute", slowly)
    monkeypatch.setattr(llm.engine, "_put", putting)
    scored = ASK | {"echo": True, "logprobs": 1, "prompt": [1] * 40}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(complete, trainer, **scored), pool.submit(complete, trainer, prompt_logprobs=1)]
        asked.append(pool.submit(complete, trainer, **scored))  # three, for two rows
        until(lambda: len(server.service.live) == 3)
        paused = pool.submit(trainer.post, "/pause", json={"mode": "abort"})
        until(lambda: len(messages) >= 4)  # three requests and their end
        gate.set()
        for answer in asked:
            found = answer.result()
            assert (found.status_code, found.json()["choices"][0]["finish_reason"]) == (200, "abort"), found.text
        choices = [answer.result().json()["choices"][0] for answer in asked]
        told = [choices[1]["prompt_logprobs"], *(one["logprobs"]["token_logprobs"] for one in choices[::2])]
        assert any(None in one[1:] for one in told)  # of the one that waited for a row, whichever came last
        assert paused.result().json() == {"is_paused": True}


def test_known_prefixes_are_forgotten(trainer: httpx.Client, trained: tuple[Server, LLM]):
    _, llm = trained
    prompt = "a prompt of several blocks of tokens"

    def hits() -> int:
        return int(llm.runner.cache_metrics_snapshot()["hits"])

    complete(trainer, prompt=prompt)
    before = hits()
    complete(trainer, prompt=prompt)
    assert hits() == before + 1
    assert trainer.post("/reset_prefix_cache").status_code == 200
    complete(trainer, prompt=prompt)
    assert hits() == before + 1


NAMES = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total",
    "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "time_per_output_token_seconds_bucket",
    "request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_params_n_bucket",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
]  # fmt: skip


def figures(http: httpx.Client) -> dict[str, float]:
    text = http.get("/metrics").text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    assert all(one.labels["model_name"] == "tiny" for one in samples)
    return {
        one.name + "".join(f",{value}" for key, value in sorted(one.labels.items()) if key != "model_name"): one.value
        for one in samples
    }


def test_metrics_have_vllms_names_and_count_what_was_done(serve: Any, llm: LLM):
    server = serve(llm)
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http:
        text = http.get("/metrics").text
        assert [name for name in NAMES if f"vllm:{name}{{" not in text] == []
        assert "ferrum:" in text
        before = figures(http)
        prompt = "metrics prompt of more than one block"
        for more in ({}, {"stream": True}, {"n": 2, "temperature": 1.0}, {"prompt_logprobs": 0}):
            body = ASK | {"prompt": prompt, "ignore_eos": True} | more
            assert http.post("/v1/completions", json=body).status_code == 200
        assert http.post("/v1/completions", json=ASK | {"n": 0}).status_code == 400
        after = figures(http)
        assert figures(http)["vllm:prefix_cache_hits_total"] == after["vllm:prefix_cache_hits_total"]
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:generation_tokens_total"] == 50
    assert grown["vllm:prompt_tokens_total"] == 5 * len(prompt)
    assert grown["vllm:request_success_total,length"] == 5
    assert grown["vllm:time_to_first_token_seconds_count"] == 5
    assert grown["vllm:inter_token_latency_seconds_count"] == 5 * 9
    assert grown["vllm:e2e_request_latency_seconds_count"] == 5
    for rest in ("count", "sum"):
        names = (f"vllm:{one}_seconds_{rest}" for one in ("inter_token_latency", "time_per_output_token"))
        assert grown[next(names)] == grown[next(names)] > 0
    assert 0 < grown["vllm:time_to_first_token_seconds_sum"] < grown["vllm:e2e_request_latency_seconds_sum"]
    assert (grown["vllm:request_params_n_count"], grown["vllm:request_params_n_sum"]) == (4, 5)
    assert grown["vllm:prefix_cache_queries_total"] == 3 * len(prompt)  # scores of a prompt need all of it computed
    assert grown["vllm:prefix_cache_hits_total"] == 2 * (len(prompt) // 8 * 8)
    assert grown["ferrum:http_responses_total,400"] == 1
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    others = {one for family in prometheus_client.REGISTRY.collect() for one in [family.name]}
    assert not any(one.startswith(("vllm", "ferrum")) for one in others)  # the registry is the server's own


def test_metrics_tell_what_runs_and_which_share_of_the_kv_it_holds(
    serve: Any, llm: LLM, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
):
    scheduler, entered, gate = llm.engine.scheduler, threading.Event(), threading.Event()
    step = scheduler.step

    def held() -> None:
        if scheduler.num_running == 2 and not is_empty(runner):
            entered.set()
            assert gate.wait(SECONDS)
        step()

    monkeypatch.setattr(scheduler, "step", held)
    with httpx.Client(base_url=serve(llm).url, timeout=SECONDS, trust_env=False) as http, ThreadPoolExecutor(1) as pool:
        answers = pool.submit(complete, http, prompt=["the quick brown fox", "ab"])
        assert entered.wait(SECONDS)
        told, blocks = figures(http), runner.kv_slot_capacity_snapshot()
        gate.set()
        assert answers.result().status_code == 200
    assert told["vllm:num_requests_running"] == 2
    usage = 1 - blocks.free_blocks / blocks.total_blocks
    assert told["vllm:kv_cache_usage_perc"] == told["vllm:gpu_cache_usage_perc"] == usage > 0


def test_metrics_count_preemptions_and_drafts(serve: Any):
    model = MarkovLLM(vocab_size=23, seed=0)  # its answers repeat themselves
    model.pool = 40
    server = serve(LLM.from_model(model, max_rows=4, speculation=Speculation(num_tokens=3)))
    counted, count_answer = [], server.service.metrics.count_answer

    def seen(choice: AnswerProgress, reason: str) -> float:
        counted.append(choice.request)
        return count_answer(choice, reason)

    server.service.metrics.count_answer = seen
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http:
        found = complete(http, prompt=[[1, 2], [3, 4], [5, 6]], max_tokens=30)
        assert found.status_code == 200, found.text
        told = figures(http)
    assert told["vllm:num_preemptions_total"] == sum(one.preemptions for one in counted) > 0
    drafted, accepted = sum(one.drafted for one in counted), sum(one.accepted for one in counted)
    assert told["vllm:spec_decode_num_draft_tokens_total"] == drafted > accepted
    assert told["vllm:spec_decode_num_accepted_tokens_total"] == accepted > 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_ended_counts_though_the_request_runs_out_of_time(
    is_stream: bool, scripted: Any, monkeypatch: pytest.MonkeyPatch
):
    model, _, server = scripted()
    model.says("a")
    decode = model.decode

    def slow(*args: Any) -> Any:
        time.sleep(0.1)
        return decode(*args)

    monkeypatch.setattr(model, "decode", slow)
    prompts = [model.tokenizer.encode("<go>a"), model.tokenizer.encode("never ends")]
    ask = {"prompt": prompts, "max_tokens": 1000, "max_time": 3.0, "stream": is_stream}
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http:
        found = http.post("/v1/completions", json=ask)
        assert "deadline_exceeded" in found.text
        told = figures(http)
    assert (told["vllm:request_success_total,stop"], told["vllm:request_success_total,abort"]) == (1, 1)


def test_times_count_from_when_a_request_came(serve: Any, llm: LLM):
    server = serve(llm, trainer_endpoints=True)
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http, ThreadPoolExecutor(1) as pool:
        for body, names in (
            (ASK, ("time_to_first_token", "e2e_request_latency")),
            (ASK | {"max_tokens": 0, "echo": True, "logprobs": 0}, ("e2e_request_latency",)),
        ):
            before = figures(http)
            assert http.post("/pause", json={}).status_code == 200
            asked = pool.submit(http.post, "/v1/completions", json=body)
            until(lambda: server.service.admission.live == 1)
            time.sleep(0.3)
            assert http.post("/resume").status_code == 200
            assert asked.result().status_code == 200
            after = figures(http)
            for name in names:
                assert after[f"vllm:{name}_seconds_sum"] - before[f"vllm:{name}_seconds_sum"] > 0.3


def test_what_a_server_tells_of_itself(http: httpx.Client):
    assert http.get("/version").json() == {"version": ferrum_jax.__version__}
    assert http.get("/health").json() == {"status": "ok"}
    (card,) = http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 96)
    told = http.get("/openapi.json").json()
    assert told["openapi"] == "3.1.0"
    assert "/v1/chat/completions" in told["paths"]
    assert {"/pause", "/is_paused"} & told["paths"].keys() == set()
    assert {"/pause", "/is_paused"} <= describe_api(endpoints_of(ServerSettings(trainer_endpoints=True)))[
        "paths"
    ].keys()
    assert told["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["in"] == "path"
    found = set(re.findall(r'"#/components/schemas/(\w+)"', http.get("/openapi.json").text))
    assert found <= told["components"]["schemas"].keys()
    fields = told["components"]["schemas"]["CompletionBody"]
    assert fields["additionalProperties"] is False
    assert {"prompt", "echo", "prompt_logprobs", "max_time"} <= fields["properties"].keys()


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(serve: Any, runner: ModelRunner):
    server = serve(LLM.from_model(runner))
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http:
        more = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "return_token_ids": True, "logprobs": 1}
        found = http.post("/v1/completions", json=more).json()["choices"][0]
        expected = LLM.from_model(runner).generate([1, 2, 3], SamplingParams(max_tokens=5))[0]
        assert (found["text"], found["token_ids"]) == ("", expected.token_ids)
        for path, body in (
            ("/v1/completions", {"prompt": "abc"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "abc"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            assert http.post(path, json=body).status_code == 400, path
        for stream in (False, True):  # an echo scores the prompt, whose text is as empty as the answer's
            found = http.post("/v1/completions", json=more | {"echo": True, "max_tokens": 0, "stream": stream})
            assert found.status_code == 200, found.text
            events = [found.text] if not stream else [line[6:] for line in found.text.splitlines() if "choices" in line]
            choices = [choice for one in events for choice in json.loads(one)["choices"]]
            assert "".join(one["text"] for one in choices) == ""
            (told,) = [one["logprobs"]["token_logprobs"] for one in choices if one["logprobs"]["tokens"]]
            assert (told[0], len(told)) == (None, 3)
            assert all(one < 0 for one in told[1:])


def test_a_format_of_tools_that_there_is_not_is_refused(llm: LLM):
    with pytest.raises(ConfigError, match="tool_parser is 'x'"), running(llm, ServerSettings(tool_parser="x")):
        pass


class Patient:
    """A caller that waits for ever."""

    async def wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    def check(self) -> None:
        """Nothing ends it."""


def test_a_second_unload_of_an_adapter_is_refused_and_admits_nobody_while_the_first_waits():
    async def main() -> None:
        admission, caller = Admission(4, 4), cast(Caller, Patient())

        async def unload() -> None:
            async with admission.leaving("tuned"):
                raise ApiError(503, "in use elsewhere")

        async with asyncio.timeout(5), admission.admit(1, "tuned", caller):
            first = asyncio.ensure_future(unload())
            await asyncio.sleep(0)
            with pytest.raises(ApiError, match="being unloaded already") as caught:
                await admission.leaving("tuned").__aenter__()
            assert caught.value.status == 409
            with pytest.raises(ApiError, match="is being unloaded"):
                await admission.admit(1, "tuned", caller).__aenter__()
        with pytest.raises(ApiError, match="in use elsewhere"):
            await first
        async with admission.admit(1, "tuned", caller):
            assert admission.users == {"tuned": 1}
        assert not admission.users  # of adapters that nobody uses, no name is kept

    asyncio.run(main())


def test_a_request_that_a_pause_holds_back_does_not_keep_its_adapter():
    async def main() -> str:
        admission, caller = Admission(4, 4), cast(Caller, Patient())
        admission.close()

        async def held() -> None:
            async with admission.admit(1, "tuned", caller):
                raise AssertionError("it began while its adapter left")

        waiting = asyncio.ensure_future(held())
        await asyncio.sleep(0)
        async with asyncio.timeout(5), admission.leaving("tuned"):
            admission.resume()
            with pytest.raises(ApiError, match="is being unloaded") as caught:
                await waiting
        assert admission.live == 0
        return str(caught.value)

    assert "tuned" in asyncio.run(main())


class Slow(Patient):
    """A caller that goes on one turn of the event loop after what it waited for."""

    async def wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        await work
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_held", [False, True])
def test_after_a_pause_nothing_begins_before_it_ends(is_held: bool):
    async def main() -> None:
        admission, caller, told = Admission(4, 4), cast(Caller, Slow()), []

        async def request() -> None:
            async with admission.admit(1, None, caller):
                told.append("begins")
                await asyncio.sleep(0)
            told.append("ends")

        if is_held:
            admission.close()
        asked = asyncio.ensure_future(request())
        await asyncio.sleep(0)
        if is_held:
            admission.resume()  # the request has not gone on when the next pause begins
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await admission.pause()
        before = [*told]
        assert before in ([], ["begins", "ends"])
        for _ in range(10):
            await asyncio.sleep(0)
        assert told == before
        admission.resume()
        await asked
        assert told == ["begins", "ends"]

    asyncio.run(main())


def test_a_tilde_in_the_adapter_root_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "adapters").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    own = service.Service(LLM.from_model(CountingLLM()), ServerSettings(adapter_root="~/adapters"))
    assert own.path_of_adapter("one") == str((tmp_path / "adapters" / "one").resolve())
    own.close()

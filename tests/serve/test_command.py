"""`ferrum-jax serve` as a process, and what keeps it from starting."""

import contextlib
import gc
import importlib.util
import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from ferrum_jax import cli
from ferrum_jax.contract.errors import ConfigError, NotFoundError, UnsupportedError
from ferrum_jax.generate.llm import LLM
from ferrum_jax.serve.command import _keys_in, serve
from ferrum_jax.serve.server import Server, bind
from tests import tiny
from tests.serve.models import spelled

CONFIG: dict[str, Any] = tiny.CONFIGS["llama3"] | {"vocab_size": 37, "num_hidden_layers": 1}


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    with pytest.raises(UnsupportedError, match=r"needs uvicorn.*the extra `serve`, as in pip install -e '.\[serve\]'"):
        serve()


def test_the_command_line_imports_no_server():
    heavy = ("starlette", "uvicorn", "pydantic", "jax")
    code = f"import sys, ferrum_jax.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_options_that_cannot_be_are_refused_before_the_model_is_read(tmp_path: Path):
    empty = tmp_path / "keys"
    empty.write_text(" \n")
    commented = tmp_path / "commented"
    commented.write_text("sk-1  # of a friend\n")
    taken = bind("127.0.0.1", 0)
    taken.listen()
    cases: list[dict[str, Any]] = [
        {"api_key_file": empty},
        {"api_key_file": tmp_path / "nothing"},
        {"api_key_file": commented},
        {"adapter": ["name"]},
        {"adapter": ["name=one", "name=two"]},
        {"max_seconds": 0},
        {"tool_parser": "unknown"},
        {"allow_origin": [""]},
        {"adapter_root": str(tmp_path / "nothing")},
        {"port": taken.getsockname()[1]},
    ]
    for wrong in cases:
        with pytest.raises(ConfigError):
            serve("/nowhere", **wrong)
    taken.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adapter": ["a=folder"]}, "--adapter and --adapter-root need --max-loras and --max-lora-rank.* 0 and 0"),
        ({"adapter_root": "/", "max_loras": 2}, "--adapter and --adapter-root need .* 2 and 0"),
        ({"adapter": ["a=one", "b=two"], "max_loras": 1, "max_lora_rank": 8}, "2 adapters, --max-loras is 1"),
    ],
)
def test_adapters_without_room_are_refused_before_the_model_is_read(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        serve("/nowhere", **given)


def test_a_tilde_is_the_home_folder_of_a_file_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "keys").write_text("sk-1\n")
    assert _keys_in(Path("~/keys")) == ["sk-1"]


def test_the_log_leaves_out_which_backends_jax_did_not_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.getLogger("jax"), "level", logging.NOTSET)
    with pytest.raises(NotFoundError):
        serve(str(tmp_path / "nowhere"), port=0)
    assert not logging.getLogger("jax._src.xla_bridge").isEnabledFor(logging.INFO)


def test_collections_leave_out_what_is_there_after_warmup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, calls = tiny.write_folder(tmp_path / "model", CONFIG), []
    spelled(37).save(folder)
    for owner, name in ((LLM, "warmup"), (gc, "freeze"), (Server, "run")):
        monkeypatch.setattr(owner, name, lambda *_, name=name: calls.append(name))
    serve(str(folder), port=0, kv_capacity=64, max_seqs=2)
    assert calls == ["warmup", "freeze", "run"]


def test_the_tokens_of_a_step_are_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, sizes = tiny.write_folder(tmp_path / "model", CONFIG), []
    spelled(37).save(folder)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(
        Server, "run", lambda server, _: sizes.append(server.service.llm.runner.plan.buckets.max_step_tokens)
    )
    serve(str(folder), port=0, kv_capacity=64, max_seqs=1, max_step_tokens=16, warmup=False)
    assert sizes == [16]


@pytest.mark.slow
def test_a_process_serves_and_ends_on_a_signal(tmp_path: Path):
    folder = tiny.write_folder(tmp_path / "model", CONFIG)
    spelled(37).save(folder)
    (tmp_path / "keys").write_text("one\ntwo\n")
    arguments = ["serve", str(folder), "--port", "0", "--kv-capacity", "64", "--max-seqs", "2", "--api-key-file",
                 str(tmp_path / "keys"), "--served-model-name", "tiny"]  # fmt: skip
    code = f"import sys; sys.argv = ['ferrum-jax', *{arguments!r}]; from ferrum_jax import cli; cli.main()"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(found[1] for line in process.stderr if (found := re.match(r"tiny on (http://\S+)", line)))
            with httpx.Client(
                base_url=url, headers={"authorization": "Bearer two"}, timeout=60, trust_env=False
            ) as http:
                for _ in range(200):
                    with contextlib.suppress(httpx.HTTPError):
                        if http.get("/health").status_code == 200:
                            break
                found = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 5, "seed": 1})
                assert found.json()["usage"]["prompt_tokens"] == 2
                assert found.json()["model"] == "tiny"
            process.send_signal(signal.SIGTERM)
            lines = process.stderr.read().splitlines()
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM  # as of an exit: the model was closed
    told = [json.loads(line[line.index("{") :]) for line in lines if '"event": "request"' in line]
    assert any(one["path"] == "/v1/completions" and one["status"] == 200 for one in told)
    assert cli.app is not None

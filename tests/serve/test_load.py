"""Limits, deadlines, disconnects, keys, draining: how a server behaves when not all is well."""

import asyncio
import contextlib
import json
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.contract.errors import ConfigError, DeviceError, UnsupportedError
from ferrum_jax.contract.llm import Logits
from ferrum_jax.executor import ModelRunner
from ferrum_jax.generate.structured import AnswerForm, FormCompiler, Structured
from ferrum_jax.serve import generation
from ferrum_jax.serve import server as server_module
from ferrum_jax.serve.answers import Answers, Wakeups
from ferrum_jax.serve.app import make_app
from ferrum_jax.serve.errors import ApiError
from ferrum_jax.serve.generation import EventStream
from ferrum_jax.serve.server import MOST_PIPELINED, Server, bind, running
from ferrum_jax.serve.service import Service
from ferrum_jax.serve.settings import ServerSettings
from tests.fake import SummingLLM
from tests.generate.conftest import is_empty
from tests.serve.conftest import openai_client
from tests.serve.models import Scripted, characters, json_letters

ASK: dict[str, Any] = {"model": "tiny", "prompt": "ab", "max_tokens": 4, "temperature": 0}
LONG = ASK | {"max_tokens": 2000, "ignore_eos": True}
SECONDS = 20.0  # that anything here may take


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def connections(server: Server, client: socket.socket) -> list[Any]:
    """Returns the server's connections with a client."""
    found: list[Any] = [*server.server_state.connections]
    return [one for one in found if one.client == client.getsockname()]


def whole_answer(raw: socket.socket) -> tuple[int, bytes]:
    """Reads one answer of a connection: its status and its body."""
    answer = HTTPResponse(raw)
    answer.begin()
    return answer.status, answer.read()


@pytest.fixture
def held() -> Iterator[Scripted]:
    """A model whose forwards wait."""
    model = Scripted()
    model.says("x" * 3000)
    model.gate.clear()
    yield model
    model.gate.set()


@contextlib.contextmanager
def serving(model: Scripted, **settings: Any) -> Iterator[tuple[Server, httpx.Client]]:
    llm = LLM.from_model(model, characters(), max_rows=2, chunk_tokens=64)
    try:
        with (
            running(llm, ServerSettings(**{"model": "tiny", "drain_seconds": 1} | settings)) as server,
            httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http,
        ):
            yield server, http
    finally:
        model.gate.set()
        llm.close()


def test_a_full_queue_is_a_429_that_says_when_to_come_again(held: Scripted):
    with serving(held, max_waiting=1) as (server, http), ThreadPoolExecutor(4) as pool:
        running_ones = [pool.submit(http.post, "/v1/completions", json=ASK) for _ in range(3)]
        until(lambda: server.service.admission.live == 3)
        found = http.post("/v1/completions", json=ASK)
        assert found.status_code == 429
        assert int(found.headers["retry-after"]) >= 1
        error = found.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert "at most 3 may" in error["message"]
        impossible = http.post("/v1/completions", json=ASK | {"n": 4, "temperature": 1.0})
        assert impossible.status_code == 400
        assert "at most 3" in impossible.json()["error"]["message"]
        assert http.get("/health").status_code == 200
        with openai_client(server) as client, pytest.raises(openai.RateLimitError):
            client.completions.create(**ASK)
        held.gate.set()
        assert [one.result().status_code for one in running_ones] == [200] * 3
        assert http.post("/v1/completions", json=ASK).status_code == 200
        assert server.service.admission.live == 0


def test_of_those_who_wait_the_most_urgent_is_served_first(held: Scripted):
    with serving(held, max_waiting=4) as (server, http), ThreadPoolExecutor(6) as pool:
        read: list[int] = []
        prefill = held.prefill

        def watched(cache_id: str, tokens: Sequence[int]) -> Any:
            read.append(len(tokens))
            return prefill(cache_id, tokens)

        held.prefill = watched
        engine, handed_over = server.service.llm.engine, []
        submit = engine.submit
        engine.submit = lambda *requests: (submit(*requests), handed_over.extend(requests))  # type: ignore[method-assign]
        asked = []
        for at, priority in enumerate([0, 9, 7, 5, 6]):
            body = ASK | {"prompt": "a" * (10 + priority), "priority": priority}
            asked.append(pool.submit(http.post, "/v1/completions", json=body))
            until(lambda at=at: len(handed_over) == at + 1)  # all wait in the engine, none on its way to it
            if at == 0:
                assert held.entered.wait(SECONDS)
        held.gate.set()
        assert [one.result().status_code for one in asked] == [200] * 5
    assert [one for one in read if one >= 10] == [10, 15, 16, 17, 19]


def test_a_prompt_that_never_began_has_looked_for_no_prefix(held: Scripted):
    with serving(held, max_waiting=1) as (server, http), ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(http.post, "/v1/completions", json=ASK) for _ in range(2)]
        until(lambda: server.service.admission.live == 2)
        assert held.entered.wait(SECONDS)
        assert http.post("/v1/completions", json=ASK | {"max_time": 0.05}).status_code == 408
        held.gate.set()
        assert [one.result().status_code for one in begun] == [200] * 2
        assert server.service.metrics.prefix_queries._value.get() == 2 * len(ASK["prompt"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row_within_a_step(held: Scripted, stream: bool):
    with serving(held, max_waiting=0) as (server, _):
        body = json.dumps(LONG | {"stream": stream, "n": 2, "temperature": 1.0}).encode()
        with socket.create_connection((server.host, server.port), timeout=SECONDS) as raw:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            raw.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            assert held.entered.wait(SECONDS)
            if stream:
                assert b"200 OK" in raw.recv(1000)
        until(lambda: server.service.admission.live == 0)
        forwards = []
        prefill = held.prefill
        held.prefill = lambda *args: (forwards.append(args), prefill(*args))[1]  # type: ignore[method-assign]
        held.gate.set()
        server.service.llm.engine.settle()
        assert held.tokens == {}
        assert len(forwards) <= 2  # the step that ran when the client left may have had both rows
        assert server.service.metrics.finished.labels(model_name="tiny", finished_reason="abort")._value.get() == 2


def test_what_a_stream_holds_is_free_before_its_last_event():
    happened: list[str] = []

    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"

    async def send(message: Any) -> None:
        happened.append(message.get("body", b"start").decode().strip())

    async def answer() -> None:
        stack = contextlib.AsyncExitStack()
        stack.callback(happened.append, "freed")
        http: Any = None
        stream = EventStream(http, stack, chunks(), asyncio.get_running_loop().time() + 60)
        await stream({"type": "http"}, None, send)  # type: ignore[arg-type]

    asyncio.run(answer())
    assert happened == ["start", "data: 1", "freed", "data: [DONE]"]


def test_a_client_that_leaves_a_stream_gives_its_blocks_back(server: Server, runner: ModelRunner):
    with openai_client(server) as client:
        for _ in range(3):
            stream = client.completions.create(model="tiny", prompt="ab", max_tokens=90, stream=True, n=3,
                                               extra_body={"ignore_eos": True})  # fmt: skip
            next(iter(stream))
            stream.close()
    until(lambda: server.service.admission.live == 0)
    server.service.llm.engine.settle()
    assert is_empty(runner)


def test_a_request_ends_at_its_deadline(held: Scripted):
    with serving(held, max_seconds=10) as (server, http):
        found = http.post("/v1/completions", json=ASK | {"max_time": 0.05})
        assert found.status_code == 408
        assert found.headers["x-should-retry"] == "false"
        assert found.json()["error"]["code"] == "deadline_exceeded"
        assert "0.05 seconds" in found.json()["error"]["message"]
        with openai_client(server) as client, pytest.raises(openai.APIError, match=r"0\.05 seconds"):
            list(client.completions.create(**ASK, stream=True, extra_body={"max_time": 0.05}))
        held.gate.set()
        server.service.llm.engine.settle()
        assert held.tokens == {}
    held.gate.clear()
    with serving(held, max_seconds=0.05) as (_, http):  # which no request can exceed
        found = http.post("/v1/completions", json=ASK | {"max_time": 50})
        assert (found.status_code, "0.05 seconds" in found.text) == (408, True)


def test_a_client_that_does_not_read_is_left_after_its_time(monkeypatch: pytest.MonkeyPatch):
    def bind_small(host: str, port: int) -> socket.socket:
        bound = bind(host, port)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of its connections, too
        return bound

    monkeypatch.setattr(server_module, "bind", bind_small)
    monkeypatch.setattr(generation, "UNREAD_SECONDS", 0.2)
    model = Scripted()
    model.says("x" * 3000)
    ask = LONG | {"n": 2, "temperature": 1.0, "logprobs": 20}
    body = json.dumps(ask | {"stream": True, "max_time": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with serving(model, trainer_endpoints=True) as (server, http), socket.socket() as raw:
        assert http.post("/v1/completions", json=ask | {"max_tokens": 4}).status_code == 200  # compiles
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(SECONDS)
        raw.connect((server.host, server.port))
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: any(waiting.flow.write_paused for waiting in connections(server, raw)))
        until(lambda: server.service.admission.live == 0)
        until(lambda: not server.service.live and not server.service.callers)
        assert http.post("/pause", json={}).status_code == 200
        until(lambda: not connections(server, raw))  # although nothing was read


@pytest.mark.parametrize("unread", ["error", "DONE"])
def test_the_last_events_of_a_stream_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, unread: str):
    monkeypatch.setattr(generation, "UNREAD_SECONDS", 0.02)
    happened: list[str] = []

    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        if unread == "error":
            raise ApiError(408, "an error")

    async def send(message: Any) -> None:
        if unread.encode() in message.get("body", b""):
            await asyncio.Event().wait()

    async def answer() -> None:
        stack = contextlib.AsyncExitStack()
        stack.callback(happened.append, "freed")
        http: Any = SimpleNamespace(scope={})
        stream = EventStream(http, stack, chunks(), asyncio.get_running_loop().time())
        scope = {"type": "http", "state": {"abort": lambda: happened.append("aborted")}}
        await asyncio.wait_for(stream(scope, None, send), SECONDS)  # type: ignore[arg-type]

    asyncio.run(answer())
    assert happened == ["freed", "aborted"]


def test_a_body_that_does_not_come_is_a_408(held: Scripted):
    with serving(held, max_seconds=0.2) as (server, _), socket.create_connection((server.host, server.port)) as raw:
        raw.settimeout(SECONDS)
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        assert b"did not come within 0.2 seconds" in raw.recv(1 << 16)


def test_an_answer_that_did_not_come_in_time_took_that_long(held: Scripted):
    with serving(held, max_seconds=0.4) as (server, _):
        whole = server.service.metrics.whole
        assert httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=SECONDS, trust_env=False).status_code == 408
        held.gate.set()
        until(lambda: sum(bucket.get() for bucket in whole._buckets) == 1)
        assert whole._sum.get() >= 0.3


def test_headers_that_do_not_end_are_a_431(held: Scripted):
    with serving(held) as (server, _), socket.create_connection((server.host, server.port)) as raw:
        raw.settimeout(SECONDS)
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200")
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                raw.sendall(b"a" * 8192)
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 431")
        with contextlib.suppress(ConnectionError):
            assert raw.recv(1) == b""


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize("chunks", [b"0\r\n", b"1\r\n{\r\n0\r\n"], ids=["no body", "a body"])
def test_trailers_that_do_not_end_close_the_connection(held: Scripted, chunks: bytes):
    with serving(held) as (server, _), socket.create_connection((server.host, server.port)) as raw:
        raw.settimeout(SECONDS)
        raw.sendall(CHUNKED + chunks)
        with pytest.raises(ConnectionError):
            raw.sendall(b"x-more: y\r\n" * 1_500_000)
        until(lambda: not server.server_state.connections)


@pytest.mark.parametrize("size", [1, 600_000])
def test_a_body_in_chunks_is_no_head(held: Scripted, size: int):
    body = json.dumps(ASK).encode() + b" " * max(20_000, size)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    held.gate.set()
    with serving(held) as (server, _), socket.create_connection((server.host, server.port)) as raw:
        raw.settimeout(SECONDS)
        for _ in range(4):  # more than fits a head, on one connection
            raw.sendall(
                CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces) + b"0\r\nx-more: y\r\n\r\n"
            )
            assert whole_answer(raw)[0] == 200


def test_a_connection_stays_http(held: Scripted, caplog: pytest.LogCaptureFixture):
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    with serving(held) as (server, _):
        for at in range(3):
            with socket.create_connection((server.host, server.port)) as raw:
                raw.settimeout(SECONDS)
                raw.sendall(head + b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
                assert raw.recv(1 << 16).startswith(b"HTTP/1.1 ")
                if at == 2:
                    raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        until(lambda: not server.server_state.connections)
    assert "Traceback" not in caplog.text


def test_a_trailer_is_no_header(held: Scripted):
    with serving(held, api_keys=("key",)) as (server, _), socket.create_connection((server.host, server.port)) as raw:
        raw.settimeout(SECONDS)
        raw.sendall(CHUNKED + b"0\r\nauthorization: Bearer key\r\n\r\n")
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_after_further_requests_is_noticed(
    held: Scripted, stream: bool, caplog: pytest.LogCaptureFixture
):
    body = json.dumps(LONG | {"stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with serving(held) as (server, http):
        with socket.create_connection((server.host, server.port)) as raw:
            raw.sendall(head % len(body) + body)
            until(lambda: server.service.admission.live == 1)
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
            until(lambda: len(connections(server, raw)[0].pipeline) == 2)
        until(lambda: server.service.admission.live == 0)
        held.gate.set()
        assert http.get("/health").status_code == 200
    assert "Traceback" not in caplog.text


def test_requests_sent_together_are_answered_in_their_order(held: Scripted):
    held.gate.set()
    count = MOST_PIPELINED + 3
    with serving(held) as (server, _), socket.create_connection((server.host, server.port)) as raw:
        raw.settimeout(SECONDS)
        raw.sendall(b"".join(b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: %02d\r\n\r\n" % at for at in range(count)))
        received = b""
        while received.count(b"HTTP/1.1 404") < count or not received.endswith(b"}"):
            piece = raw.recv(1 << 16)
            assert piece
            received += piece
    assert re.findall(rb"x-request-id: (\d\d)", received) == [b"%02d" % at for at in range(count)]


def test_a_form_that_takes_long_to_compile_holds_up_only_its_like(monkeypatch: pytest.MonkeyPatch):
    free, compiled, compile_form = threading.Event(), [], FormCompiler.compile

    def slow(self: FormCompiler, structured: Structured) -> AnswerForm:
        compiled.append(structured)
        assert free.wait(SECONDS)
        return compile_form(self, structured)

    monkeypatch.setattr(FormCompiler, "compile", slow)
    llm = LLM.from_model(SummingLLM(vocab_size=37, capacity=256), json_letters(37))
    form = ASK | {"structured_outputs": {"regex": "[a-c]{3}"}, "n": 3, "temperature": 1.0}
    with (
        running(llm, ServerSettings(model="tiny", drain_seconds=1)) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http,
        ThreadPoolExecutor(2) as pool,
    ):
        others = [pool.submit(http.post, "/v1/completions", json=form) for _ in range(2)]
        until(lambda: len(compiled) == 2)
        assert http.post("/v1/completions", json=form | {"max_time": 0.1}).status_code == 408
        assert http.post("/v1/completions", json=ASK).status_code == 200
        free.set()
        for one in others:
            texts = [choice["text"] for choice in one.result().json()["choices"]]
            assert [re.fullmatch("[a-c]{3}", text) is not None for text in texts] == [True] * 3
        until(lambda: server.service.admission.live == 0)
        assert len(compiled) <= 3  # one for each request, not for each of its answers
        long = http.post("/v1/completions", json=ASK | {"structured_outputs": {"regex": "a" * 200_000}})
        assert (long.status_code, "at most 131,072 are taken" in long.text) == (400, True)


def test_a_body_may_be_so_long_and_no_longer(http: httpx.Client, serve: Any, llm: LLM):
    server = serve(llm, max_body_bytes=200, max_prompt_tokens=5)
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as small:
        assert small.post("/v1/completions", json=ASK).status_code == 200
        long = small.post("/v1/completions", json=ASK | {"prompt": "a" * 200})
        assert (long.status_code, long.json()["error"]["code"]) == (413, "body_too_large")
        headers = {"content-type": "application/json"}
        chunked = small.post("/v1/completions", content=(b"x" * 50 for _ in range(10)), headers=headers)
        assert chunked.status_code == 413
        tokens = small.post("/v1/completions", json=ASK | {"prompt": "abcdef"})
        assert (tokens.status_code, tokens.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert http.post("/v1/completions", content=b"{}" + b" " * (17 << 20), headers=headers).status_code == 413


def test_errors_have_one_shape_whatever_is_wrong(http: httpx.Client):
    json_type = {"content-type": "application/json"}
    cases = [
        (http.get("/nowhere"), 404),
        (http.get("/v1/completions"), 405),
        (http.post("/health"), 405),
        (http.post("/v1/completions", content=b"{", headers=json_type), 400),
        (http.post("/v1/completions", content=b"[]", headers=json_type), 400),
        (http.post("/v1/completions", content=b"", headers=json_type), 400),
        (http.post("/v1/completions", content=b"\xff\xfe", headers=json_type), 400),
        (http.post("/v1/completions", content=b"[" * 100_000, headers=json_type), 400),
        (http.post("/v1/completions", content=b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", headers=json_type), 400),
        (http.post("/v1/completions", content=b'{"prompt": "a", "temperature": NaN}', headers=json_type), 400),
        (http.post("/v1/completions", content=b'{"prompt": "\\ud800"}', headers=json_type), 400),
        (http.post("/v1/completions", content=b'{"model": "\\ud800", "prompt": "a"}', headers=json_type), 400),
        (http.post("/v1/completions", data={"prompt": "a"}), 415),
        (http.post("/v1/completions", json=ASK | {"model": "other"}), 404),
        (http.get("/v1/models/other"), 404),
        (http.post("/pause"), 404),
        (http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/"}), 403),
        (http.post("/v1/completions", content=b"{}", headers=json_type | {"content-encoding": "gzip"}), 415),
    ]  # fmt: skip
    for found, status in cases:
        assert found.status_code == status, (found.request.url, found.text)
        assert found.headers["content-type"] == "application/json"
        error = found.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert "Traceback" not in found.text
        assert found.headers["x-request-id"]
    assert cases[1][0].headers["allow"] == "POST"
    assert cases[13][0].json()["error"]["code"] == "model_not_found"


def test_a_model_that_fails_tells_the_client_no_more_than_that(held: Scripted, caplog: pytest.LogCaptureFixture):
    def broken(*_: Any) -> Any:
        raise DeviceError("secret place 0x123")

    held.prefill = broken  # type: ignore[method-assign]
    held.gate.set()
    with caplog.at_level(logging.INFO, "ferrum_jax.serve"), serving(held) as (_, http):
        found = http.post("/v1/completions", json=ASK)
        assert found.status_code == 500
        assert "secret" not in found.text
        assert found.json()["error"]["type"] == "server_error"
        streamed = http.post("/v1/completions", json=ASK | {"stream": True})
        assert streamed.status_code == 200
        events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
        assert json.loads(events[0])["error"]["code"] == "engine_error"
        assert "secret" not in streamed.text
        assert events[-1] == "[DONE]"
    lines = [json.loads(one.getMessage()) for one in caplog.records if '"event": "request"' in one.getMessage()]
    assert ["secret place 0x123" in one["reason"] for one in lines] == [True, True]  # the log tells
    failures = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert len(failures) == 1  # the second failed for the same reason
    assert 'raise DeviceError("secret place 0x123")' in caplog.text


def test_a_stream_that_fails_is_logged_with_its_traceback(held: Scripted, caplog: pytest.LogCaptureFixture):
    def broken(*_: Any) -> Any:
        raise DeviceError("secret place 0x123")

    held.decode = broken  # type: ignore[method-assign]
    held.gate.set()
    with serving(held) as (_, http):
        streamed = http.post("/v1/completions", json=ASK | {"stream": True})
        assert "secret" not in streamed.text
    assert 'raise DeviceError("secret place 0x123")' in caplog.text


def test_an_abort_is_logged_with_its_reason_and_no_traceback(held: Scripted, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "ferrum_jax.serve")
    with serving(held) as (server, http), ThreadPoolExecutor() as pool:
        found = pool.submit(http.post, "/v1/completions", json=LONG)
        assert held.entered.wait(SECONDS)
        closing = pool.submit(server.service.llm.close)
        held.gate.set()
        closing.result()
        assert found.result().status_code == 503
    line = next(json.loads(one.getMessage()) for one in caplog.records if '"event": "request"' in one.getMessage())
    assert (line["status"], line["reason"]) == (503, "this LLM is closed")
    assert "Traceback" not in caplog.text


def test_a_bug_is_a_500_without_a_trace(serve: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    server = serve(llm)
    monkeypatch.setattr(server.service, "adapter_of", lambda _: 1 / 0)
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        found = http.post("/v1/completions", json=ASK)
    assert found.status_code == 500
    assert "division" not in found.text
    assert found.json()["error"]["message"] == "the server failed"


def test_keys_open_everything_but_the_probe(serve: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    server = serve(llm, api_keys=("one", "two"))
    compared: list[Any] = []
    import hmac

    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: (compared.append((a, b)), compare(a, b))[1])
    for key in ("one", "two"):
        with openai_client(server, key) as client:
            assert [one.id for one in client.models.list()] == ["tiny"]
    assert len(compared) == 4  # whichever key is right, all are compared
    with openai_client(server, "three") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        assert http.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere", "/health/"):
            assert http.get(path).status_code == 401
        for value in ("", "Bearer", "Basic one", "one", "Bearer one two", "Bearer \xff"):
            headers = {b"authorization": value.encode("latin-1")}
            found = http.get("/v1/models", headers=headers)
            assert found.status_code == 401, value
            assert found.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/v1/models", headers={"authorization": "bearer one"}).status_code == 200


def test_browser_pages_are_let_in_only_by_name(http: httpx.Client, serve: Any, llm: LLM):
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in http.get("/health", headers=headers).headers
    assert http.options("/v1/completions", headers=headers).status_code == 405
    server = serve(llm, allow_origins=("https://a.example",), api_keys=("k",))
    with httpx.Client(base_url=server.url, trust_env=False) as other:
        assert other.options("/v1/completions", headers=headers).status_code == 200
        assert other.get("/health", headers=headers).headers["access-control-allow-origin"] == "https://a.example"
        wrong = other.get("/v1/models", headers={"origin": "https://a.example"})
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (401, "https://a.example")
        refused = other.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in refused.headers


def test_a_server_that_stops_lets_end_what_runs(held: Scripted):
    held.says("done")
    llm = LLM.from_model(held, characters(), max_rows=2, chunk_tokens=64)
    with ThreadPoolExecutor(2) as pool:
        with running(llm, ServerSettings(model="tiny", drain_seconds=SECONDS)) as server:
            client = httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False)
            chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
            answer = pool.submit(client.post, "/v1/chat/completions", json=chat)
            assert held.entered.wait(SECONDS)

            def release() -> None:
                until(lambda: server.service.admission.is_draining)
                with pytest.raises(httpx.ConnectError):
                    httpx.get(f"{server.url}/health", trust_env=False, timeout=SECONDS)
                held.gate.set()

            released = pool.submit(release)
        released.result()
        found = answer.result()
        assert found.status_code == 200
        assert found.text.endswith("data: [DONE]\n\n")
        pieces = [json.loads(line[6:]) for line in found.text.splitlines() if line and "DONE" not in line]
        assert "".join(one["choices"][0]["delta"].get("content") or "" for one in pieces) == "done"
        client.close()
    llm.close()


def test_a_second_interrupt_ends_what_runs_with_the_answers_of_a_drained_server(held: Scripted):
    with serving(held, drain_seconds=SECONDS) as (server, http), ThreadPoolExecutor(2) as pool:
        started = time.monotonic()
        asked = [pool.submit(http.post, "/v1/completions", json=LONG | {"stream": one}) for one in (False, True)]
        until(lambda: server.service.admission.live == 2)
        server.handle_exit(signal.SIGINT, None)
        until(lambda: server.service.admission.is_draining)
        assert not any(one.done() for one in asked)
        server.handle_exit(signal.SIGINT, None)
        plain, stream = (one.result() for one in asked)
        assert (plain.status_code, plain.json()["error"]["code"]) == (503, "draining")
        assert '"code":"draining"' in stream.text.replace(" ", "")
        assert stream.status_code == 503 or stream.text.endswith("data: [DONE]\n\n")
    assert time.monotonic() - started < SECONDS
    assert not server.force_exit
    server.handle_exit(signal.SIGINT, None)  # has nothing left to end
    assert server.force_exit


def test_an_end_that_is_forced_is_logged_as_no_error(held: Scripted, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR, "uvicorn.error"), serving(held) as (server, _):
        for _ in range(3):
            server.handle_exit(signal.SIGINT, None)
    assert server.force_exit
    assert not caplog.records


def test_a_checkpoint_that_is_read_does_not_hold_a_server_whose_end_is_forced(
    held: Scripted, monkeypatch: pytest.MonkeyPatch
):
    entered, gate = threading.Event(), threading.Event()

    def slowly(*_: Any) -> None:
        entered.set()
        gate.wait(SECONDS)

    monkeypatch.setattr(Service, "_read_weights", slowly)
    try:
        with ThreadPoolExecutor() as pool:
            started = time.monotonic()
            with serving(held, trainer_endpoints=True) as (server, http):
                pool.submit(http.post, "/update_weights", json={"path": "x"})
                assert entered.wait(SECONDS)
                for _ in range(3):
                    server.handle_exit(signal.SIGINT, None)
            assert time.monotonic() - started < SECONDS / 2
    finally:
        gate.set()


def test_a_body_that_has_not_come_does_not_hold_a_server_that_stops(held: Scripted):
    with serving(held) as (server, _), socket.create_connection((server.host, server.port)) as raw:
        raw.settimeout(SECONDS)
        raw.sendall(CHUNKED + b"1\r\n{\r\n")
        until(lambda: bool(server.service._body_timeouts))
        server.should_exit = True
        status, answer = whole_answer(raw)
        assert (status, json.loads(answer)["error"]["code"]) == (503, "draining")
    assert server.service.is_ending


def test_the_end_of_all_requests_spares_a_body_that_is_late_already(held: Scripted):
    problems: list[BaseException] = []

    async def late(service: Service) -> None:
        def end_all() -> None:  # after the timeout has expired, before its task knows
            try:
                service.end_all()
            except RuntimeError as problem:
                problems.append(problem)

        async with asyncio.timeout(0.01) as timeout:
            with service.reading(timeout):
                asyncio.get_running_loop().call_at((timeout.when() or 0) + 1e-9, end_all)
                await asyncio.Event().wait()

    with serving(held) as (server, _):
        with pytest.raises(TimeoutError):
            asyncio.run(late(server.service))
        assert server.service.is_ending
    assert not problems


def test_a_server_that_drains_takes_nothing_more_over_open_connections(serve: Any, llm: LLM):
    server = serve(llm)
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http:
        assert http.get("/health").status_code == 200
        server.service.admission.is_draining = True
        for found in (http.get("/health"), http.post("/v1/completions", json=ASK)):
            assert (found.status_code, found.json()["error"]["code"]) == (503, "draining")
            assert int(found.headers["retry-after"]) > 0


def test_what_does_not_end_in_time_is_ended(held: Scripted):
    before = {thread.ident for thread in threading.enumerate()}
    llm = LLM.from_model(held, characters(), max_rows=2, chunk_tokens=64)
    with ThreadPoolExecutor(1) as pool:
        with running(llm, ServerSettings(model="tiny", drain_seconds=0.2)) as server:
            answer = pool.submit(
                httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=SECONDS, trust_env=False
            )
            assert held.entered.wait(SECONDS)
            started = time.monotonic()
        assert time.monotonic() - started < SECONDS / 2
        found = answer.result()
        assert (found.status_code, found.json()["error"]["code"]) == (503, "draining")
        assert server.service.admission.live == 0
    server.handle_exit(signal.SIGINT, None)  # its event loop is closed
    held.gate.set()
    llm.close()
    assert held.tokens == {}
    until(lambda: {thread.ident for thread in threading.enumerate()} <= before)


def test_each_request_has_an_id_and_a_line_in_the_log(serve: Any, llm: LLM, caplog: pytest.LogCaptureFixture):
    server = serve(llm)
    with httpx.Client(base_url=server.url, trust_env=False) as http, caplog.at_level(logging.INFO, "ferrum_jax.serve"):
        mine = http.post("/v1/completions", json=ASK, headers={"x-request-id": "mine-1"})
        assert mine.headers["x-request-id"] == "mine-1"
        other = http.post("/v1/completions", json=ASK | {"n": "x"}, headers={"x-request-id": "two words"})
        assert other.headers["x-request-id"].startswith("req-")
        until(lambda: sum('"request"' in one.getMessage() for one in caplog.records) == 2)
    lines = [json.loads(one.getMessage()) for one in caplog.records if '"event": "request"' in one.getMessage()]
    assert lines[0] | {"seconds": 0} == {
        "event": "request", "request_id": "mine-1", "method": "POST", "path": "/v1/completions", "status": 200,
        "seconds": 0, "prompt_tokens": 2, "completion_tokens": lines[0]["completion_tokens"], "model": "tiny",
    }  # fmt: skip
    assert lines[1]["status"] == 400
    assert "valid integer" in lines[1]["error"]
    assert "ab" not in json.dumps(lines[0]["path"])  # prompts are not logged


def test_an_address_that_cannot_be_had_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    monkeypatch.setattr("ferrum_jax.serve.server.Server", lambda *given: made.append(given))
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        nobody: Any = None
        with pytest.raises(ConfigError, match="cannot listen on 127"), running(nobody, port=bound.getsockname()[1]):
            pass
    assert made == []


def test_an_address_that_cannot_be_had_is_refused():
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        with pytest.raises(ConfigError, match="cannot listen on 127"):
            bind("127.0.0.1", bound.getsockname()[1])
    for host, port in (("nowhere.invalid", 80), ("a..b", 80), ("127.0.0.1", 1 << 20)):
        with pytest.raises(ConfigError, match=r"cannot listen|expected a number"):
            bind(host, port)


@pytest.mark.parametrize(
    "wrong",
    [{"max_seconds": 0}, {"max_waiting": -1}, {"max_body_bytes": 0}, {"api_keys": ("",)}, {"api_keys": ("é",)},
     {"drain_seconds": -1}, {"max_prompt_tokens": 0}, {"max_seconds": float("nan")}, {"max_seconds": float("inf")},
     {"drain_seconds": float("inf")}, {"api_keys": "secret"}, {"api_keys": ("a ",)}, {"api_keys": 5},
     {"allow_origins": "https://a.b"}, {"trainer_endpoints": "no"}, {"max_seconds": "5"}, {"max_waiting": float("nan")},
     {"adapters": "a=b"}, {"model": 3}, {"api_keys": (5,)}],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ConfigError):
        ServerSettings(**wrong)


def test_a_server_says_so_where_another_has_begun_to_listen_meanwhile(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(ConfigError, match="cannot listen on 127"):
            asyncio.run(Server(llm).startup([second]))
        monkeypatch.setattr(server_module, "bind", lambda *_: second)
        with pytest.raises(ConfigError, match="cannot listen on 127"), running(llm):
            pass


def test_an_application_that_was_shut_down_says_so_when_it_is_started_again(llm: LLM):
    app = make_app(llm)
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
    with pytest.raises(UnsupportedError, match="make another with make_app"), TestClient(app):
        pass


def test_what_an_answer_says_is_not_lost_where_another_fails_at_once():
    model = Scripted()
    model.says("a")
    prefill = model.prefill

    def fail(cache_id: str, tokens: Sequence[int]) -> Logits:
        logits = prefill(cache_id, tokens)
        return np.full_like(logits, np.nan) if len(model.tokens[cache_id]) == 5 else logits

    model.prefill = fail
    llm = LLM.from_model(model, tokenizer=model.tokenizer)

    async def read() -> list[str | None]:
        caller: Any = SimpleNamespace(changed=asyncio.Event(), check=lambda: None, started=0.0)
        groups = [[llm.request(text, SamplingParams(max_tokens=9))] for text in ("<go>", "b")]
        async with Answers(llm, groups, caller, Wakeups(asyncio.get_running_loop())) as answers:
            while not all(one.is_done for (one,) in groups):
                time.sleep(0.001)  # so that the event loop learns of both at the same time
            pieces = await answers.next()
            with pytest.raises(ApiError):
                await answers.next()
        return [piece.finish_reason for piece in pieces]

    assert asyncio.run(read()) == ["stop"]


def test_health_needs_no_key_under_a_mount_either(llm: LLM):
    app = Starlette(routes=[Mount("/llm", make_app(llm, ServerSettings(api_keys=("one",))))])
    with TestClient(app) as client:
        assert client.get("/llm/health").status_code == 200
        assert client.get("/llm/v1/models").status_code == 401

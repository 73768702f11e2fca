"""Random clients, sane and not: afterwards nothing is held, no thread is left, and nothing failed."""

import json
import logging
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ferrum_jax import LLM
from ferrum_jax.executor import ModelRunner
from ferrum_jax.serve.metrics import Metrics
from ferrum_jax.serve.server import Server, running
from ferrum_jax.serve.settings import ServerSettings
from tests.executor.conftest import ADAPTER_NAMES
from tests.generate.conftest import is_empty
from tests.long import SECONDS, SEED
from tests.serve.models import json_letters
from tests.serve.test_load import until

CLIENTS, LONG_CLIENTS = 24, 64
GROWTH = 64 << 20  # bytes that the process may grow by once the storm has run for a tenth of its time
ALLOWED = {200, 400, 403, 404, 405, 408, 409, 413, 415, 429, 503}
WORDS = ("the quick brown fox", "a", "hello " * 8, "x" * 95, "y" * 300, "", "\u00e9\U0001f600")


def sane(draw: random.Random) -> dict[str, Any]:
    """A request that is answered."""
    body: dict[str, Any] = {
        "max_tokens": draw.randint(1, 30),
        "seed": draw.randrange(9),
        "n": draw.choice([1, 1, 1, 3]),
    }
    body["temperature"] = draw.choice([0, 0.7, 1.0] if body["n"] == 1 else [0.7, 1.0])
    more = {
        "top_k": draw.randint(1, 9), "top_p": draw.uniform(0.1, 1), "min_p": draw.random(), "ignore_eos": True,
        "stop": draw.choice("aeiou"), "logit_bias": {str(draw.randrange(37)): draw.uniform(-5, 5)},
        "repetition_penalty": draw.uniform(0.5, 2), "stream": True, "presence_penalty": draw.uniform(-2, 2),
        "allowed_token_ids": draw.sample(range(37), 5), "max_time": draw.choice([0.01, 0.1, 30]),
        "model": draw.choice(["tiny", *ADAPTER_NAMES]), "return_token_ids": True, "priority": draw.randint(-2, 2),
    }  # fmt: skip
    if draw.random() < 0.2:
        body["structured_outputs"] = draw.choice(FORMS)
    return body | dict(draw.sample(sorted(more.items()), draw.randint(0, 5)))


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 3}, "b": {"type": "array", "items": {"const": 1}}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA}, {"regex": "[a-c]{2,9}"}, {"choice": ["ab", "cd", "ca"]}, {"grammar": 'start: "a" /[bc]{3}/'},
    {"regex": "(a"}, {"json": {"type": "nope"}},
]  # fmt: skip


def absurd(draw: random.Random) -> Any:
    """A value that nobody would send."""
    return draw.choice([
        None, True, -1, 0, 2**40, 10**400, 1e308, -1e308, 0.5, "", "x", "x" * 5000, [], [[]], [None], {}, {"a": {}},
        [1] * 500, [-1], [10**9], ["a"] * 50, "\ud800",
    ])  # fmt: skip


def request_of(draw: random.Random, folders: dict[str, str]) -> tuple[str, Any]:
    """A path and a body."""
    kind = draw.random()
    if kind < 0.35:
        body = sane(draw) | {"prompt": draw.choice([*WORDS[:4], [draw.randrange(37) for _ in range(9)], ["ab", "cd"]])}
        if draw.random() < 0.4:
            body |= {"echo": True, "logprobs": draw.randrange(6)}
        path = "/v1/completions"
    elif kind < 0.6:
        turns = [{"role": draw.choice(["user", "assistant", "system"]), "content": draw.choice(WORDS[:3])}]
        body, path = sane(draw) | {"messages": turns * draw.randint(1, 2)}, "/v1/chat/completions"
        if draw.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": draw.randrange(9)}
    elif kind < 0.75:
        path = draw.choice(["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
        name = draw.choice(ADAPTER_NAMES)
        body = {"lora_name": name} | ({"lora_path": folders[name]} if "unload" not in path else {})
    elif kind < 0.85:
        path = draw.choice(["/tokenize", "/detokenize", "/metrics", "/v1/models", "/health", "/nowhere"])
        body = draw.choice([{"prompt": draw.choice(WORDS)}, {"tokens": [1, 2, 99]}, {"messages": []}])
    else:
        path, body = "/v1/completions", {"prompt": draw.choice([*WORDS, *([absurd(draw)] * 4)])}
    if draw.random() < 0.25:
        fields = ["temperature", "n", "max_tokens", "logprobs", "stop", "prompt", "messages", "seed", "model", "other",
                  "stream", "stream_options", "logit_bias", "tools", "top_k", "min_tokens", "echo"]  # fmt: skip
        body = {**body, draw.choice(fields): absurd(draw)}
    return path, body


def client(url: tuple[str, int], seed: int, end: float, folders: dict[str, str], statuses: dict[int, int]) -> None:
    """Sends requests until the time is over."""
    draw = random.Random(seed)
    limits = httpx.Timeout(60)
    with httpx.Client(base_url=f"http://{url[0]}:{url[1]}", timeout=limits, trust_env=False) as http:
        while time.monotonic() < end:
            path, body = request_of(draw, folders)
            content = json.dumps(body).encode()
            how = draw.random()
            headers = {"content-type": "application/json"}
            if how < 0.12:
                leave_early(url, path, content, draw)
                continue
            if how < 0.16:
                content = bytes(draw.randrange(256) for _ in range(draw.randrange(200)))
            elif how < 0.18:
                content = b" " * (1 << 20)
            elif how < 0.2:
                headers = {"content-type": "text/plain"}
            try:
                if how > 0.9:
                    with http.stream("POST", path, content=content, headers=headers) as found:
                        for _ in found.iter_raw():
                            if draw.random() < 0.3:
                                break
                else:
                    found = http.request(draw.choice(["POST"] * 9 + ["GET"]), path, content=content, headers=headers)
            except httpx.TimeoutException as problem:
                raise AssertionError(f"no answer: {seed}, {path}, {body}") from problem
            statuses[found.status_code] = statuses.get(found.status_code, 0) + 1
            assert found.status_code in ALLOWED, (seed, path, body, found.status_code)
            if found.status_code == 429:
                time.sleep(0.01)


def leave_early(url: tuple[str, int], path: str, content: bytes, draw: random.Random) -> None:
    """Sends a part of a request, or all of it, and hangs up."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    whole = head.encode() + content
    with socket.create_connection(url, timeout=60) as raw:
        raw.sendall(whole[: draw.randrange(len(whole))] if draw.random() < 0.3 else whole)
        time.sleep(draw.choice([0, 0.005, 0.05]))


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def storm(
    llm: LLM, folders: dict[str, str], seconds: float, seed: int, clients: int = CLIENTS
) -> tuple[dict[int, int], int]:
    """Runs clients against a server of its own, and checks what is left; returns the statuses, and grown bytes."""
    names = {thread.ident for thread in threading.enumerate()}
    root = str(next(iter(folders.values()))).rpartition("/")[0]
    settings = ServerSettings(
        model="tiny", max_waiting=20, max_body_bytes=1 << 19, adapter_root=root, drain_seconds=20, max_seconds=20
    )  # in which the least urgent may not get their turn
    statuses: dict[int, int] = {}
    with running(llm, settings) as server:
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(clients) as pool:
            address = (server.host, server.port)
            done = [pool.submit(client, address, seed + at, end, folders, statuses) for at in range(clients)]
            time.sleep(seconds / 10)
            before = resident()
            time.sleep(seconds * 0.45)
            middle = resident() - before
        for one in done:
            one.result()
        check_idle(server)
        grown = resident() - before
        print(f"{sum(statuses.values())} answers; beyond what it had after a tenth of the time: {middle / 2**20:.0f} "
              f"MiB after half, {grown / 2**20:.0f} MiB at the end")  # fmt: skip
    until(lambda: {thread.ident for thread in threading.enumerate()} <= names)
    return statuses, grown


def check_idle(server: Server) -> None:
    service = server.service
    until(lambda: service.admission.live == 0)
    assert not service.live
    assert not service.callers
    assert sum(service.admission.users.values()) == 0
    llm = service.llm
    llm.engine.settle()
    assert (llm.engine.scheduler.num_running, llm.engine.scheduler.num_waiting) == (0, 0)
    assert isinstance(llm.model, ModelRunner)
    assert is_empty(llm.model)
    assert llm.model._adapters.bound == {}
    assert samples_of(service.metrics) == samples_of(Metrics("tiny"))


def samples_of(metrics: Metrics) -> set[tuple[str, ...]]:
    """Names and labels of what is counted, but for the statuses of responses."""
    counted = [one for one in metrics.registry.collect() if one.name != "ferrum:http_responses"]
    return {(one.name, *one.labels.values()) for each in counted for one in each.samples}


def test_a_short_storm_leaves_nothing(runner: ModelRunner, adapter_folders: dict[str, str]):
    llm = LLM.from_model(runner, json_letters(37))
    statuses, _ = storm(llm, adapter_folders, 3.0, 17)  # too short to tell growth from what begins
    assert statuses.get(200, 0) > 10
    assert {400, 404} <= statuses.keys()


@pytest.mark.slow
def test_a_long_storm_leaves_nothing(
    runner: ModelRunner, adapter_folders: dict[str, str], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL, logger="ferrum_jax")  # pytest keeps every line until the test ends
    print(f"SEED={SEED} SECONDS={SECONDS:g}")
    llm = LLM.from_model(runner, json_letters(37))
    statuses, grown = storm(llm, adapter_folders, SECONDS, SEED, LONG_CLIENTS)
    print(statuses)
    assert grown < GROWTH
    assert statuses.get(200, 0) > 100

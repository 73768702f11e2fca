"""Servers of tiny models, and clients of them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import jax
import openai
import pytest

from ferrum_jax import LLM, EngineConfig, models
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.serve.server import Server, running
from ferrum_jax.serve.settings import ServerSettings
from tests.executor.conftest import CFG, make_runner
from tests.executor.conftest import adapter_folders as adapter_folders
from tests.generate.conftest import is_empty
from tests.serve.models import Scripted, characters, spelled

SEATS = EngineConfig(
    dtype="float32", max_seqs=4, kv_capacity=96, block_size=8, kv_blocks=60, max_step_tokens=32, prefix_cache=True,
    decode_rows=(4,), query_blocks=(4,), block_tokens=8, verify_blocks=(1,), verify_tokens=8, max_loras=2,
    max_lora_rank=4,
)  # fmt: skip
Serve = Callable[..., Server]


@pytest.fixture(scope="session")
def params() -> ParamTree:
    return models.specs.initialise(models.family(CFG).param_specs(CFG), jax.random.key(0), "float32", scale=0.4)


@pytest.fixture(scope="package")
def runner(params: ParamTree) -> Iterator[ModelRunner]:
    with make_runner(params, SEATS) as runner:
        yield runner


@pytest.fixture(scope="package")
def llm(runner: ModelRunner) -> LLM:
    return LLM.from_model(runner, spelled(CFG.vocab_size))


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that stop when the test ends."""
    with contextlib.ExitStack() as stack:

        def start(llm: LLM, **settings: Any) -> Server:
            return stack.enter_context(running(llm, ServerSettings(**{"model": "tiny", "drain_seconds": 5} | settings)))

        yield start


@pytest.fixture(scope="package")
def server(llm: LLM) -> Iterator[Server]:
    """A server of the tiny model, with every default."""
    with running(llm, ServerSettings(model="tiny")) as one:
        yield one


@pytest.fixture
def client(server: Server, runner: ModelRunner) -> Iterator[Any]:
    """OpenAI's client of it; when the test ends, nothing is left in the KV."""
    with openai_client(server) as one:
        yield one
    server.service.llm.engine.settle()
    assert is_empty(runner)
    assert server.service.admission.live == 0
    assert not server.service.live


def openai_client(server: Server, key: str = "none") -> Any:
    """OpenAI's client, whose types are not those of what is tried here."""
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60, http_client=http)


def async_client(server: Server) -> Any:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60, http_client=http)


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as one:
        yield one


@pytest.fixture
def scripted(serve: Serve) -> Iterator[Callable[..., tuple[Scripted, Any, Server]]]:
    """Starts a server of a model that says what it is told to say."""

    def start(template: str | None = None, **settings: Any) -> tuple[Scripted, Any, Server]:
        model = Scripted()
        tokenizer = characters() if template is None else replace(characters(), chat_templates={"default": template})
        server = serve(LLM.from_model(model, tokenizer, max_rows=4, chunk_tokens=64), **settings)
        client = openai_client(server)
        clients.append(client)
        return model, client, server

    clients: list[Any] = []
    yield start
    for one in clients:
        one.close()

"""Requests are spans of OpenTelemetry, where it is installed."""

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ferrum_jax import LLM
from ferrum_jax.serve import tracing
from tests.serve.conftest import Serve
from tests.serve.test_load import until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ASK: dict[str, Any] = {"model": "tiny", "prompt": "ab", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield exporter
    provider.shutdown()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_span_of_the_clients_trace(spans: InMemorySpanExporter, serve: Serve, llm: LLM, stream: bool):
    spans.clear()
    with httpx.Client(base_url=serve(llm).url, timeout=60, trust_env=False) as http:
        headers = {"traceparent": PARENT, "x-request-id": "mine", "host": "health.metrics.example"}
        assert http.post("/v1/completions", json=ASK | {"stream": stream}, headers=headers).status_code == 200
        assert {http.get(path).status_code for path in ("/health", "/metrics")} == {200}
    until(lambda: len(spans.get_finished_spans()) == 1)
    (span,) = spans.get_finished_spans()
    assert span.parent is not None
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    found = dict(span.attributes or {})
    assert (found["gen_ai.request.model"], found["ferrum_jax.request_id"]) == ("tiny", "mine")
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (2, 4)


def test_what_is_refused_says_why(spans: InMemorySpanExporter, serve: Serve, llm: LLM):
    spans.clear()
    with httpx.Client(base_url=serve(llm).url, timeout=60, trust_env=False) as http:
        assert http.post("/v1/completions", json=ASK | {"model": "other"}).status_code == 404
    until(lambda: len(spans.get_finished_spans()) == 1)
    assert "'other' does not exist" in str(dict(spans.get_finished_spans()[0].attributes or {})["ferrum_jax.error"])


def test_without_opentelemetry_nothing_changes(monkeypatch: pytest.MonkeyPatch):
    for name in [one for one in sys.modules if one.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    found = importlib.util.spec_from_file_location("tracing_alone", tracing.__file__)
    assert found is not None
    assert found.loader is not None
    alone = importlib.util.module_from_spec(found)
    found.loader.exec_module(alone)

    async def app(*_: Any) -> None:
        raise AssertionError

    assert alone.traced(app) is app
    alone.annotate({"model": "tiny"})

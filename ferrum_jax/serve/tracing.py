"""Requests as spans of OpenTelemetry, if its ASGI instrumentation is installed; OpenTelemetry configures the export."""

from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp

try:
    from opentelemetry import trace
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
except ImportError:
    trace = OpenTelemetryMiddleware = None

_UNTRACED = r"^https?://[^/]+/(health|metrics)$"  # probes and scrapes, every few seconds
_ATTRIBUTES = {  # attribute by name in the log, after OpenTelemetry's conventions for generative models
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "request_id": "ferrum_jax.request_id",
    "error": "ferrum_jax.error",
    "disconnected": "ferrum_jax.disconnected",
}


def traced(app: ASGIApp) -> ASGIApp:
    """Makes each request of an application a span, a child of the span in its `traceparent` header."""
    if OpenTelemetryMiddleware is None:
        return app
    return OpenTelemetryMiddleware(app, excluded_urls=_UNTRACED, exclude_spans=["receive", "send"])


def annotate(figures: Mapping[str, Any]) -> None:
    """Adds the figures of the log line to the current request's span, if there is one."""
    if trace is None:
        return
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes({_ATTRIBUTES[name]: value for name, value in figures.items() if name in _ATTRIBUTES})

"""Requests as spans of OpenTelemetry, where its ASGI instrumentation is installed; where spans go is its own affair."""

from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp

try:
    from opentelemetry import trace
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
except ImportError:
    trace = OpenTelemetryMiddleware = None

_UNTRACED = r"^https?://[^/]+/(health|metrics)$"  # what is asked every few seconds
_ATTRIBUTES = {  # by name in the log; OpenTelemetry's conventions for generative models
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "request_id": "ferrum_jax.request_id",
    "error": "ferrum_jax.error",
    "disconnected": "ferrum_jax.disconnected",
}


def traced(app: ASGIApp) -> ASGIApp:
    """Makes each request of an application a span, the child of the one that its `traceparent` names."""
    if OpenTelemetryMiddleware is None:
        return app
    return OpenTelemetryMiddleware(app, excluded_urls=_UNTRACED, exclude_spans=["receive", "send"])


def annotate(figures: Mapping[str, Any]) -> None:
    """Adds the figures of the log's line to the span of the request that is being answered, if there is one."""
    if trace is None:
        return
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes({_ATTRIBUTES[name]: value for name, value in figures.items() if name in _ATTRIBUTES})

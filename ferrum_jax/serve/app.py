"""`make_app`: the ASGI application of one model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

import ferrum_jax
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.generate.llm import LLM
from ferrum_jax.serve import administration
from ferrum_jax.serve.chat_completions import chat
from ferrum_jax.serve.chat_schema import ChatBody
from ferrum_jax.serve.completions import complete
from ferrum_jax.serve.errors import ApiError, JsonAnswer, unavailable
from ferrum_jax.serve.middleware import ApiKeys, DirectSend, RequestLog
from ferrum_jax.serve.openapi import Endpoint, describe_api
from ferrum_jax.serve.schema import (
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    PauseBody,
    TokenizeBody,
    UnloadAdapterBody,
    UpdateWeightsBody,
)
from ferrum_jax.serve.service import Service
from ferrum_jax.serve.settings import ServerSettings
from ferrum_jax.serve.texts import detokenize, tokenize
from ferrum_jax.serve.tracing import traced


def make_app(llm: LLM, settings: ServerSettings | None = None) -> Starlette:
    """Returns the application that serves a model, which stays the caller's to close.

    Its `state.service` is the `Service` below.

    Raises:
        FerrumError: a setting cannot be honoured, or an adapter not be loaded.
    """
    settings = ServerSettings() if settings is None else settings
    service = Service(llm, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.close()

    def route(endpoint: Endpoint) -> Route:
        async def answer(request: HttpRequest) -> Response:
            return await endpoint.answer(service, request)  # type: ignore[return-value]  # an ASGI application will do

        return Route(endpoint.path, answer, methods=[endpoint.method])

    routes = [route(one) for one in endpoints_of(settings)]
    middleware = [Middleware(DirectSend), Middleware(traced)]
    if settings.allow_origins:  # outside the log, so that a page can read errors, too
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.allow_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    middleware.append(Middleware(RequestLog, metrics=service.metrics))
    if settings.api_keys:
        middleware.append(Middleware(ApiKeys, keys=settings.api_keys))
    app = Starlette(
        routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers={HTTPException: _not_served}
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


async def _not_served(request: HttpRequest, problem: Exception) -> Response:
    """Answers paths and methods that are not served, in OpenAI's shape."""
    assert isinstance(problem, HTTPException)
    told = f"{request.method} {request.url.path} is not served"
    code = "method_not_allowed" if problem.status_code == 405 else "not_found"
    return ApiError(problem.status_code, told, code=code, headers=problem.headers).response()


async def health(service: Service, http: HttpRequest) -> Response:
    """Answers 200 while the server takes requests and the model can run."""
    if service.admission.is_draining:
        raise unavailable("the server is stopping", 5, "draining")
    if service.llm.model.state in (ExecutorState.Error, ExecutorState.Shutdown):
        raise unavailable(f"the model is in the state {service.llm.model.state.name}", 5, "model_failed")
    return JsonAnswer({"status": "ok"})


async def version(service: Service, http: HttpRequest) -> Response:
    """Tells this package's version."""
    return JsonAnswer({"version": ferrum_jax.__version__})


async def metrics(service: Service, http: HttpRequest) -> Response:
    """Tells what Prometheus scrapes."""
    text = await asyncio.to_thread(service.metrics.render, service.llm)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def openapi(service: Service, http: HttpRequest) -> Response:
    """Describes this server."""
    return JsonAnswer(describe_api(endpoints_of(service.settings)))


async def models(service: Service, http: HttpRequest) -> Response:
    """Lists the model and its adapters."""
    return JsonAnswer({"object": "list", "data": [_card(service, name) for name in (service.name, *service.adapters)]})


async def one_model(service: Service, http: HttpRequest) -> Response:
    """Tells of one model or adapter."""
    name = http.path_params["name"]
    service.adapter_of(name)
    return JsonAnswer(_card(service, name))


def _card(service: Service, name: str) -> dict[str, object]:
    path = service.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "ferrum_jax",
        "root": service.name if path is None else path,
        "parent": None if path is None else service.name,
        "max_model_len": service.capacity,
    }


_ENDPOINTS = (
    Endpoint("GET", "/health", health, "Whether requests are taken"),
    Endpoint("GET", "/version", version, "Version of the package"),
    Endpoint("GET", "/metrics", metrics, "Metrics for Prometheus"),
    Endpoint("GET", "/openapi.json", openapi, "This description"),
    Endpoint("GET", "/v1/models", models, "The model and its adapters"),
    Endpoint("GET", "/v1/models/{name:path}", one_model, "The model, or one of its adapters"),
    Endpoint("POST", "/v1/completions", complete, "Continue texts or token ids", CompletionBody),
    Endpoint("POST", "/v1/chat/completions", chat, "Answer a conversation", ChatBody),
    Endpoint("POST", "/tokenize", tokenize, "Token ids of a text or a conversation", TokenizeBody),
    Endpoint("POST", "/detokenize", detokenize, "Text of token ids", DetokenizeBody),
    Endpoint("POST", "/v1/load_lora_adapter", administration.load_adapter, "Load an adapter", LoadAdapterBody),
    Endpoint("POST", "/v1/unload_lora_adapter", administration.unload_adapter, "Drop an adapter", UnloadAdapterBody),
)
_FOR_TRAINERS = (
    Endpoint("POST", "/pause", administration.pause, "Let nothing new begin", PauseBody),
    Endpoint("POST", "/resume", administration.resume, "Let go on what waits"),
    Endpoint("GET", "/is_paused", administration.is_paused, "Whether nothing new begins"),
    Endpoint("POST", "/update_weights", administration.update_weights, "Set other weights", UpdateWeightsBody),
    Endpoint("POST", "/reset_prefix_cache", administration.reset_prefix_cache, "Forget known prefixes"),
)


def endpoints_of(settings: ServerSettings) -> tuple[Endpoint, ...]:
    """Returns what a server of these settings offers."""
    return _ENDPOINTS + (_FOR_TRAINERS if settings.trainer_endpoints else ())

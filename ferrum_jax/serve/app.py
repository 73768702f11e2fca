"""`make_app`: the ASGI application that serves one model, its endpoints, and their OpenAPI description."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import ferrum_jax
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.request import Request
from ferrum_jax.serve.body import read_json
from ferrum_jax.serve.chat_completions import chat
from ferrum_jax.serve.chat_schema import ChatBody
from ferrum_jax.serve.completions import complete
from ferrum_jax.serve.errors import ApiError, JsonAnswer, unavailable
from ferrum_jax.serve.middleware import RequestLog, with_direct_send, with_keys
from ferrum_jax.serve.prompting import chat_text, tokenizer_of
from ferrum_jax.serve.schema import (
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    PauseBody,
    TokenizeBody,
    UnloadAdapterBody,
    UpdateWeightsBody,
    describe,
)
from ferrum_jax.serve.service import Service
from ferrum_jax.serve.settings import ServerSettings
from ferrum_jax.serve.tracing import traced


class Endpoint(NamedTuple):
    """One method and path, and the function that answers it."""

    method: str
    path: str
    answer: Callable[[Service, HttpRequest], Awaitable[ASGIApp]]
    summary: str
    body: type[BaseModel] | None = None


def make_app(llm: LLM, settings: ServerSettings | None = None) -> Starlette:
    """Returns the application that serves a model, which the caller closes; its `state.service` is the `Service`.

    It serves once: after a shutdown, a host that starts it again gets a FerrumError, and `make_app` makes another.

    Raises:
        FerrumError: a setting is wrong, or an adapter cannot be loaded.
    """
    settings = ServerSettings() if settings is None else settings
    service = Service(llm, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.check_not_closed()
        try:
            yield
        finally:
            service.close()

    def route(endpoint: Endpoint) -> Route:
        async def answer(request: HttpRequest) -> Response:
            return await endpoint.answer(service, request)  # type: ignore[return-value]  # an ASGI application will do

        return Route(endpoint.path, answer, methods=[endpoint.method])

    routes = [route(one) for one in endpoints_of(settings)]
    middleware = [Middleware(with_direct_send), Middleware(traced)]
    if settings.allow_origins:  # outside `RequestLog`, so that pages can read error responses, too
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
        middleware.append(Middleware(with_keys, keys=settings.api_keys))
    app = Starlette(
        routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers={HTTPException: _not_served}
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


async def _not_served(request: HttpRequest, problem: Exception) -> Response:
    """Answers paths and methods that are not served, in OpenAI's format."""
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
    """Returns this package's version."""
    return JsonAnswer({"version": ferrum_jax.__version__})


async def metrics(service: Service, http: HttpRequest) -> Response:
    """Returns the metrics for Prometheus."""
    text = await asyncio.to_thread(service.metrics.render, service.llm, service.admission.held)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def openapi(service: Service, http: HttpRequest) -> Response:
    """Returns the OpenAPI description of this server."""
    return JsonAnswer(describe_api(endpoints_of(service.settings)))


async def models(service: Service, http: HttpRequest) -> Response:
    """Lists the model and its adapters."""
    return JsonAnswer({"object": "list", "data": [_card(service, name) for name in (service.name, *service.adapters)]})


async def one_model(service: Service, http: HttpRequest) -> Response:
    """Describes the model or one of its adapters."""
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


async def tokenize(service: Service, http: HttpRequest) -> Response:
    """Returns the ids of a text or of a conversation."""
    body = await read_json(service, http, TokenizeBody)
    service.adapter_of(body.model)

    def answer() -> Response:
        ids = _ids_of(service, body)
        told = {"count": len(ids), "max_model_len": service.capacity, "tokens": ids}
        spelled = [service.vocabulary.text_of(one) for one in ids] if body.return_token_strs else None
        return JsonAnswer(told | {"token_strs": spelled})

    return await service.run(answer, slow=True)


async def detokenize(service: Service, http: HttpRequest) -> Response:
    """Returns the text of ids."""
    body = await read_json(service, http, DetokenizeBody)
    service.adapter_of(body.model)

    def answer() -> Response:
        text = tokenizer_of(service.llm).decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return JsonAnswer({"prompt": text})

    return await service.run(answer, slow=True)


def _ids_of(service: Service, body: TokenizeBody) -> list[int]:
    tokenizer = tokenizer_of(service.llm)
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    try:
        names = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        conversation = ChatBody.model_validate({name: getattr(body, name) for name in names})
    except ValidationError as problem:
        raise describe(problem) from None
    return tokenizer.encode(chat_text(service.llm, conversation), add_special_tokens=bool(body.add_special_tokens))


async def load_adapter(service: Service, http: HttpRequest) -> Response:
    """Loads an adapter from a folder under the server's `--adapter-root`."""
    body = await read_json(service, http, LoadAdapterBody)
    await service.load_adapter(body.lora_name, service.path_of_adapter(body.lora_path))
    return JsonAnswer({"message": f"adapter {body.lora_name!r} is loaded"})


async def unload_adapter(service: Service, http: HttpRequest) -> Response:
    """Unloads an adapter once the requests with it have ended."""
    body = await read_json(service, http, UnloadAdapterBody)
    service.path_of_adapter("")
    await service.unload_adapter(body.lora_name)
    return JsonAnswer({"message": f"adapter {body.lora_name!r} is unloaded"})


async def pause(service: Service, http: HttpRequest) -> Response:
    """Lets no new request begin, and waits until running ones end; the mode `abort` ends them at once, as they are."""
    body = await read_json(service, http, PauseBody)
    if body.mode == "abort":
        service.admission.close()
        ended = asyncio.ensure_future(service.admission.pause())
        while not ended.done():  # a begun request joins `live` only when its prompt is tokenised
            if running := [choice.request for answers in service.live for choice in answers.choices]:
                await asyncio.to_thread(service.llm.engine.end, running, Request.interrupt)
            await asyncio.wait({ended}, timeout=0.05)
    else:
        await service.admission.pause()
    return JsonAnswer({"is_paused": service.admission.is_paused})


async def resume(service: Service, http: HttpRequest) -> Response:
    """Ends a pause: waiting requests begin."""
    service.admission.resume()
    return JsonAnswer({"is_paused": service.admission.is_paused})


async def is_paused(service: Service, http: HttpRequest) -> Response:
    """Returns whether the server is paused."""
    return JsonAnswer({"is_paused": service.admission.is_paused})


async def update_weights(service: Service, http: HttpRequest) -> Response:
    """Sets the weights of another checkpoint of the same model."""
    body = await read_json(service, http, UpdateWeightsBody)
    return JsonAnswer({"weight_version": await service.update_weights(body.path, body.live)})


async def reset_prefix_cache(service: Service, http: HttpRequest) -> Response:
    """Clears the prefix cache."""
    await service.run(service.llm.reset_prefix_cache, administers=True)
    return JsonAnswer({})


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
    Endpoint("POST", "/v1/load_lora_adapter", load_adapter, "Load an adapter", LoadAdapterBody),
    Endpoint("POST", "/v1/unload_lora_adapter", unload_adapter, "Drop an adapter", UnloadAdapterBody),
)
_FOR_TRAINERS = (
    Endpoint("POST", "/pause", pause, "Let nothing new begin", PauseBody),
    Endpoint("POST", "/resume", resume, "Let go on what waits"),
    Endpoint("GET", "/is_paused", is_paused, "Whether nothing new begins"),
    Endpoint("POST", "/update_weights", update_weights, "Set other weights", UpdateWeightsBody),
    Endpoint("POST", "/reset_prefix_cache", reset_prefix_cache, "Forget known prefixes"),
)


def endpoints_of(settings: ServerSettings) -> tuple[Endpoint, ...]:
    """Returns the endpoints of a server with these settings."""
    return _ENDPOINTS + (_FOR_TRAINERS if settings.trainer_endpoints else ())


_FIELDS = {"message": "string", "type": "string", "param": ["string", "null"], "code": ["string", "null"]}
_INNER = {
    "type": "object",
    "required": list(_FIELDS),
    "properties": {name: {"type": kind} for name, kind in _FIELDS.items()},
}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": _INNER}}


def describe_api(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Returns the endpoints' description in OpenAPI 3.1."""
    kinds = [one.body for one in endpoints if one.body is not None]
    places, schemas = models_json_schema([(kind, "validation") for kind in kinds],
                                         ref_template="#/components/schemas/{model}")  # fmt: skip
    answers = {
        "200": {"description": "The answer", "content": {"application/json": {"schema": {"type": "object"}}}},
        "default": {
            "description": "An error, in the shape of OpenAI's",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        },
    }
    paths: dict[str, Any] = {}
    for one in endpoints:
        operation: dict[str, Any] = {"summary": one.summary, "responses": answers}
        if one.body is not None:
            content = {"application/json": {"schema": places[one.body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        paths[one.path.replace(":path}", "}")] = {one.method.lower(): operation}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [name]
    text = {"200": {"description": "Text", "content": {"text/plain": {}}}, "default": answers["default"]}
    paths["/metrics"]["get"]["responses"] = text
    return {
        "openapi": "3.1.0",
        "info": {"title": "ferrum_jax", "version": ferrum_jax.__version__},
        "paths": paths,
        "components": {"schemas": {**schemas.get("$defs", {}), "Error": _ERROR}},
    }

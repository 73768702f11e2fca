"""`/openapi.json`: the endpoints and the bodies that they take."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import ferrum_jax
from ferrum_jax.serve.chat_schema import ChatBody
from ferrum_jax.serve.schema import (
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    PauseBody,
    TokenizeBody,
    UnloadAdapterBody,
    UpdateWeightsBody,
)

_BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Continue texts or token ids"),
    "/v1/chat/completions": (ChatBody, "Answer a conversation"),
    "/tokenize": (TokenizeBody, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeBody, "Text of token ids"),
    "/v1/load_lora_adapter": (LoadAdapterBody, "Load an adapter"),
    "/v1/unload_lora_adapter": (UnloadAdapterBody, "Drop an adapter"),
}
_TRAINER: dict[str, tuple[type[BaseModel] | None, str]] = {
    "/pause": (PauseBody, "Let nothing new begin"),
    "/resume": (None, "Let go on what waits"),
    "/update_weights": (UpdateWeightsBody, "Set other weights"),
    "/reset_prefix_cache": (None, "Forget known prefixes"),
}
_READ = {
    "/health": "Whether requests are taken",
    "/version": "Version of the package",
    "/metrics": "Metrics for Prometheus",
    "/openapi.json": "This description",
    "/v1/models": "The model and its adapters",
    "/v1/models/{name}": "The model, or one of its adapters",
}
_READ_BY_TRAINERS = {"/is_paused": "Whether nothing new begins"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe_api(*, with_trainer: bool) -> dict[str, Any]:
    """Returns the description in OpenAPI 3.1."""
    bodies: dict[str, tuple[type[BaseModel] | None, str]] = {**_BODIES, **(_TRAINER if with_trainer else {})}
    kinds = sorted({kind for kind, _ in bodies.values() if kind is not None}, key=lambda kind: kind.__name__)
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
    for path, (kind, summary) in bodies.items():
        operation: dict[str, Any] = {"summary": summary, "responses": answers}
        if kind is not None:
            content = {"application/json": {"schema": places[kind, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        paths[path] = {"post": operation}
    for path, summary in (_READ | (_READ_BY_TRAINERS if with_trainer else {})).items():
        paths[path] = {"get": {"summary": summary, "responses": answers}}
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

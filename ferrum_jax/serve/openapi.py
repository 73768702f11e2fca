"""`/openapi.json`: the endpoints and the bodies that they take."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

import ferrum_jax
from ferrum_jax.serve.service import Service


class Endpoint(NamedTuple):
    """What is done at one path."""

    method: str
    path: str
    answer: Callable[[Service, HttpRequest], Awaitable[ASGIApp]]
    summary: str
    body: type[BaseModel] | None = None


_FIELDS = {"message": "string", "type": "string", "param": ["string", "null"], "code": ["string", "null"]}
_INNER = {
    "type": "object",
    "required": list(_FIELDS),
    "properties": {name: {"type": kind} for name, kind in _FIELDS.items()},
}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": _INNER}}


def describe_api(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Returns the description in OpenAPI 3.1."""
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

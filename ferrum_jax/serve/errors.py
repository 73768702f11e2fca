"""`ApiError`: the errors that clients get, in OpenAI's format."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import Response

from ferrum_jax.contract.errors import (
    AlreadyExistsError,
    CancelledError,
    FerrumError,
    InvalidFormatError,
    InvalidParameterError,
    NotFoundError,
    ResourceExhaustedError,
    TokenizerError,
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
LONGEST = 1000  # characters of a message, which may repeat what the client sent


class ApiError(Exception):
    """A request that ends with an HTTP status other than 200.

    Attributes:
        status: the HTTP status.
        message: what was asked, what was found, the limit.
        param: the request's field at fault, if any.
        code: a machine-readable code, such as `model_not_found`.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= LONGEST else f"{message[:LONGEST]}…"
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the error object in OpenAI's format."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Returns the HTTP response."""
        return JsonAnswer(self.body(), self.status, self.headers)


class JsonAnswer(Response):
    """A JSON response; texts may hold any character of Python, even half a surrogate pair."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Returns the body in bytes."""
        return dump(content)


def dump(value: Any) -> bytes:
    """Returns JSON in UTF-8; half a surrogate pair, which UTF-8 cannot encode, becomes a question mark."""
    try:
        return to_json(value, inf_nan_mode="null")
    except PydanticSerializationError:  # of half a surrogate pair
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns a 400: the request cannot be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, seconds: float = 1.0, code: str | None = None) -> ApiError:
    """Returns a 503: the server may answer the same request after some seconds."""
    return ApiError(503, message, code=code, headers={"retry-after": str(max(1, round(seconds)))})


def from_engine(problem: FerrumError) -> ApiError:
    """Converts an error of the engine for clients; of an internal failure, it tells only the kind."""
    if isinstance(problem, NotFoundError):
        return ApiError(404, str(problem))
    if isinstance(problem, AlreadyExistsError):
        return ApiError(409, str(problem))
    if isinstance(problem, ResourceExhaustedError):
        return unavailable(str(problem), code="resource_exhausted")
    if isinstance(problem, CancelledError):
        why = "by a pause, an update of weights, a reset, or as the server stops"
        return unavailable(f"the request was ended: {why}", code="cancelled")
    if problem.is_client_error or isinstance(problem, (InvalidParameterError, TokenizerError, InvalidFormatError)):
        return bad_request(str(problem))
    return ApiError(500, f"the engine failed: {problem.kind} error", code="engine_error")

"""Bodies of requests, up to a limit."""

from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from ferrum_jax.serve.answers import DisconnectError
from ferrum_jax.serve.errors import ApiError
from ferrum_jax.serve.schema import read
from ferrum_jax.serve.service import Service

Read = TypeVar("Read", bound=BaseModel)


async def read_body(http: HttpRequest, limit: int) -> bytes:
    """Returns the body; raises a 413 for one that is longer, before more of it is read."""
    told = http.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async for part in http.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise DisconnectError from None
    return b"".join(parts)


async def read_json(service: Service, http: HttpRequest, kind: type[Read]) -> Read:
    """Returns a body of JSON as its kind; raises a 415 for another media type, a 400 for what it is not.

    Of other media types, a browser sends some without asking whether it may.
    """
    body = await read_body(http, service.settings.max_body_bytes)
    media = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json" and not (media == "" and not body):
        raise ApiError(415, f"the content type is {media[:80]!r}, expected application/json")
    return await service.run(read, kind, body) if len(body) > 1 << 16 else read(kind, body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than the {limit:,} bytes that are taken", code="body_too_large",
                    headers={"connection": "close"})  # fmt: skip

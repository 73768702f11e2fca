"""Reading of request bodies, up to a limit."""

import asyncio
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from ferrum_jax.serve.answers import DisconnectError
from ferrum_jax.serve.errors import ApiError, unavailable
from ferrum_jax.serve.schema import read
from ferrum_jax.serve.service import Service

Read = TypeVar("Read", bound=BaseModel)


async def read_body(service: Service, http: HttpRequest) -> bytes:
    """Returns the body; raises a 413 for a longer one, without reading all of it, and a 408 for one that is late.

    After `Service.end_all` it raises a 503 for a body that is not complete.
    """
    limit, seconds = service.settings.max_body_bytes, service.settings.max_seconds
    told = http.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds) as timeout:
            with service.reading(timeout):
                async for part in http.stream():
                    size += len(part)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(part)
    except ClientDisconnect:
        raise DisconnectError from None
    except TimeoutError:
        if service.is_ending:
            raise unavailable("the server is stopping, and the request body was not complete", 5, "draining") from None
        raise ApiError(408, f"the body did not come within {seconds:g} seconds", code="deadline_exceeded",
                       headers={"connection": "close"}) from None  # fmt: skip
    return b"".join(parts)


async def read_json(service: Service, http: HttpRequest, kind: type[Read]) -> Read:
    """Returns a JSON body as `kind`; raises a 415 for another media type or encoding, a 400 for other contents.

    Other media types are refused because a browser sends some of them to any site without a CORS preflight.
    """
    body = await read_body(service, http)
    http.scope["ferrum.body_bytes"] = len(body)
    media = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json" and not (media == "" and not body):
        raise ApiError(415, f"the content type is {media[:80]!r}, expected application/json")
    if (encoding := http.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise ApiError(415, f"the content encoding is {encoding[:80]!r}, expected none")
    return await service.run(read, kind, body) if len(body) > 1 << 16 else read(kind, body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than the {limit:,} bytes that are taken", code="body_too_large",
                    headers={"connection": "close"})  # fmt: skip

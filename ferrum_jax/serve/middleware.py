"""Middleware of every request: its id, a line in the log, the API key, and errors in OpenAI's format."""

import hashlib
import hmac
import json
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ferrum_jax.contract.errors import FerrumError
from ferrum_jax.serve.answers import DisconnectError
from ferrum_jax.serve.errors import ApiError, from_engine
from ferrum_jax.serve.metrics import Metrics
from ferrum_jax.serve.tracing import annotate

_log = logging.getLogger("ferrum_jax.serve")
_ID = re.compile(r"[!-~]{1,128}")
_OPEN = ("/health",)  # paths that need no key: probes have none
CLIENT_LEFT = 499  # status in the log, as in nginx


class DirectSend:
    """Keeps the server's own `send` in the scope, by which pieces of a stream bypass middleware that ignores them.

    An ASGI application.
    """

    def __init__(self, app: ASGIApp):
        """Wraps an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        scope["ferrum.send"] = send
        await self._app(scope, receive, send)


class RequestLog:
    """Assigns each request an id, catches every error, and logs one line of JSON about it; an ASGI application."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        """Wraps an application."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, given = time.perf_counter(), Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        figures = scope.setdefault("ferrum.figures", {})
        status: int | None = None

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif not message.get("more_body"):  # OpenTelemetry ends the span after this message
                annotate(figures | {"request_id": request_id})
            await send(message)

        try:
            problem = await self._answer(scope, receive, sending)
            if problem is not None:
                figures["error"] = problem.message
                if status is None:
                    await problem.response()(scope, receive, sending)
        finally:
            if status is None or figures.get("disconnected"):
                status = CLIENT_LEFT
            self._metrics.count_response(status)
            line = {"event": "request", "request_id": request_id, "method": scope["method"], "path": scope["path"]}
            line |= {"status": status, "seconds": round(time.perf_counter() - started, 6)} | figures
            annotate(line)  # again, for a response that was cut off
            _log.info("%s", json.dumps(line))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> ApiError | None:
        """Runs the application, and returns the error that it raised, if any."""
        try:
            await self._app(scope, receive, send)
        except DisconnectError:
            scope["ferrum.figures"]["disconnected"] = True
        except ApiError as problem:
            return problem
        except FerrumError as problem:
            _log.warning("%s", problem, exc_info=not problem.is_client_error)
            return from_engine(problem)
        except Exception:  # noqa: BLE001  of any kind: the client gets no details
            _log.exception("a request failed")
            return ApiError(500, "the server failed", code="internal_error")
        return None


class ApiKeys:
    """Passes on requests with one of the keys, compared in constant time; an ASGI application."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        """Wraps an application, given the keys."""
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or raises a 401."""
        if scope["type"] == "http" and not (self._is_open(scope) or self._knows(scope)):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["path"].removeprefix(scope.get("root_path", "")) in _OPEN

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        found = [hmac.compare_digest(given, one) for one in self._digests]  # compares with all keys, for constant time
        return scheme.lower() == "bearer" and any(found)

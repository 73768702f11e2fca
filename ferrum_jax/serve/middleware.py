"""Middleware of every request: its id, a line in the log, the API key, and errors in OpenAI's format."""

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ferrum_jax.contract.errors import FerrumError
from ferrum_jax.serve.answers import DisconnectError
from ferrum_jax.serve.errors import LONGEST, ApiError, from_engine
from ferrum_jax.serve.metrics import Metrics
from ferrum_jax.serve.tracing import annotate

_log = logging.getLogger("ferrum_jax.serve")
_ID = re.compile(r"[!-~]{1,128}")
_OPEN = ("/health",)  # paths that need no key: probes have none
CLIENT_LEFT = 499  # status in the log, as in nginx


def with_direct_send(app: ASGIApp) -> ASGIApp:
    """Keeps the server's own `send` in the scope, by which pieces of a stream bypass middleware that ignores them."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope["ferrum.send"] = send
        await app(scope, receive, send)

    return answer


class RequestLog:
    """Assigns each request an id, catches every error, and logs one line of JSON about it; an ASGI application."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        """Wraps an application."""
        self._app, self._metrics = app, metrics
        self._reason = ""  # of the last failure whose traceback was logged

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
                figures |= {"error": problem.message, "problem": problem}
                if status is None:
                    await problem.response()(scope, receive, sending)
        finally:
            if status is None or figures.get("disconnected"):
                status = CLIENT_LEFT
            self._metrics.count_response(status)
            self._log_reason(request_id, figures)
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
            failure = from_engine(problem)
            failure.__cause__ = problem
            return failure
        except Exception:  # noqa: BLE001  of any kind: the client gets no details
            _log.exception("a request failed")
            return ApiError(500, "the server failed", code="internal_error")
        return None

    def _log_reason(self, request_id: str, figures: dict[str, Any]) -> None:
        """Adds the text of an error of the engine that the client was not told, and logs a failure's traceback.

        Requests that fail one after the other for the same reason, as of a lost device, share a traceback.
        """
        problem: ApiError | None = figures.pop("problem", None)
        cause = None if problem is None else problem.__cause__
        if problem is None or not isinstance(cause, FerrumError) or str(cause)[:LONGEST] in problem.message:
            return
        reason = str(cause)
        figures["reason"] = reason[:LONGEST]
        if problem.status == 500 and reason != self._reason:
            self._reason = reason
            _log.error("request %s failed: %s", request_id, reason, exc_info=cause)


def with_keys(app: ASGIApp, keys: tuple[str, ...]) -> ASGIApp:
    """Passes on requests with one of the keys, compared in constant time, and raises a 401 for others."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def is_known(scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        found = [hmac.compare_digest(given, one) for one in digests]  # compares with all keys, for constant time
        return scheme.lower() == "bearer" and any(found)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in _OPEN
        if not (is_open or is_known(scope)):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        await app(scope, receive, send)

    return answer

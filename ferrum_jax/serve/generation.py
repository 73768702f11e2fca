"""Shared parts of completions and chats: starting the engine's requests of a body, and streams of events."""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.generate.request import Request
from ferrum_jax.serve.answers import Answers, Caller, DisconnectError, Piece
from ferrum_jax.serve.errors import ApiError, bad_request, dump
from ferrum_jax.serve.prompting import TOO_LONG
from ferrum_jax.serve.schema import SamplingBody
from ferrum_jax.serve.service import Service

_log = logging.getLogger(__name__)
UNREAD_SECONDS = 5  # after a request's deadline, for a client that reads slowly
LONG_BODY = 1 << 18  # bytes: the prompts of longer ones take some 200 ms to become tokens
LONG = 1000  # tokens: longer prompts and answers are written in another thread
DONE = b"data: [DONE]\n\n"
_LINE_END = re.compile(b"\xc2\x85|\xe2\x80[\xa8\xa9]")
MakeGroups = Callable[[ActiveLoraAdapter | None], Sequence[Sequence[Request]]]


def new_head(service: Service, prefix: str, kind: str, model: str | None) -> dict[str, Any]:
    """Returns the fields that a request's chunks and whole answer share; `kind` is OpenAI's name of the object."""
    own = f"{prefix}-{secrets.token_hex(16)}"
    return {"id": own, "object": kind, "created": int(time.time()), "model": model or service.name}


async def begin(
    service: Service,
    http: HttpRequest,
    body: SamplingBody,
    count: int,
    stack: contextlib.AsyncExitStack,
    make: MakeGroups,
) -> Answers:
    """Admits a request of `count` answers, makes the engine's requests, and runs them until the stack is closed."""
    adapter = service.adapter_of(body.model)
    seconds = (
        service.settings.max_seconds if body.max_time is None else min(body.max_time, service.settings.max_seconds)
    )
    caller = await stack.enter_async_context(Caller(http, seconds))
    service.callers.add(caller)
    stack.callback(service.callers.discard, caller)
    name = None if adapter is None else adapter.name
    await stack.enter_async_context(service.admission.admit(count, name, caller))
    is_slow = body.is_slow or http.scope["ferrum.body_bytes"] > LONG_BODY
    groups = await caller.wait_for(service.run(make, adapter, slow=is_slow))
    answers = await stack.enter_async_context(Answers(service.llm, groups, caller, service.wakeups()))
    service.live.add(answers)
    stack.callback(service.forget, answers)
    service.metrics.choices.observe(body.n or 1)
    note(http, prompt_tokens=sum(len(group[0].prompt) for group in groups), model=body.model or service.name)
    return answers


def note(http: HttpRequest, **figures: Any) -> None:
    """Adds figures to the log line of a request."""
    http.scope.setdefault("ferrum.figures", {}).update(figures)


def check_room(service: Service, ids: Sequence[int], max_tokens: int | None) -> None:
    """Raises a 400 if prompt and answer together are longer than a sequence can be."""
    if max_tokens is None:
        return
    capacity = service.capacity
    room = capacity - len(ids) + 1  # the last token takes no position
    if max_tokens > room:
        raise bad_request(
            f"the prompt has {len(ids)} tokens, which leaves {max(0, room)} of the {capacity} positions of a sequence; "
            f"max_tokens is {max_tokens}",
            "max_tokens",
            TOO_LONG,
        )


async def chunks_of(
    service: Service,
    http: HttpRequest,
    body: SamplingBody,
    head: dict[str, Any],
    answers: Answers,
    parts: Callable[[Piece], Awaitable[Sequence[dict[str, Any]]]],
    first: Sequence[dict[str, Any]] = (),
) -> AsyncIterator[bytes]:
    """Yields the chunks of a stream as events.

    Each has the fields of `head`. Those of `first` come first, then one for each choice that `parts` returns for a new
    piece, and at the end, if the request asks for it, one with the token counts.
    """
    options = body.stream_options
    has_usage = options is not None and options.include_usage
    is_continuous = options is not None and options.continuous_usage_stats

    def chunk(fields: dict[str, Any]) -> bytes:
        usage = {"usage": answers.usage() if is_continuous else None} if has_usage else {}
        return event(head | fields | usage)

    for fields in first:
        yield chunk(fields)
    while not answers.is_over:
        for piece in await answers.next():
            for choice in await parts(piece):
                yield chunk({"choices": [choice]})
        service.metrics.count_tokens(answers.choices)
    note(http, completion_tokens=answers.usage()["completion_tokens"])
    if has_usage:
        yield event(head | {"choices": [], "usage": answers.usage()})


def event(value: Any) -> bytes:
    """Returns one server-sent event, without characters at which some clients end a line (U+0085, U+2028, U+2029)."""
    data = dump(value)
    if _LINE_END.search(data):
        data = _LINE_END.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), data)
    return b"data: " + data + b"\n\n"


class EventStream:
    """A response of server-sent events, which ends with `[DONE]`; an error is an event before it.

    The request's rows and blocks are free before `[DONE]` is sent, so that a client that has read it may ask again. The
    connection of a client that does not read is aborted `UNREAD_SECONDS` after the deadline.
    """

    def __init__(
        self, http: HttpRequest, stack: contextlib.AsyncExitStack, chunks: AsyncIterator[bytes], deadline: float
    ):
        """Takes the chunks, the contexts to close after them, and the deadline by the event loop's clock."""
        self._http, self._stack, self._chunks, self._deadline = http, stack, chunks, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events, as an ASGI application."""
        try:
            async with asyncio.timeout_at(self._deadline + UNREAD_SECONDS):
                await self._send_all(send, scope.get("ferrum.send", send))
        except DisconnectError:
            note(self._http, disconnected=True)
        except TimeoutError:
            note(self._http, disconnected=True)
            if (abort := scope.get("state", {}).get("abort")) is not None:
                abort()  # to close would wait until the client has read all data sent

    async def _send_all(self, send: Send, send_piece: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        problem: ApiError | None = None
        async with self._stack:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                async for chunk in self._chunks:
                    await send_piece({"type": "http.response.body", "body": chunk, "more_body": True})
            except DisconnectError:
                raise
            except ApiError as found:
                problem = found
            except Exception:  # noqa: BLE001  of any kind: the client gets no details
                _log.exception("a stream failed")
                problem = ApiError(500, "the server failed")
        if problem is not None:
            note(self._http, error=problem.message, problem=problem)
            await send({"type": "http.response.body", "body": event(problem.body()), "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

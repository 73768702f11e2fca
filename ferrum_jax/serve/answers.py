"""`Answers`: the answers that the engine generates for one HTTP request, as an event loop reads them."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeVar

from starlette.requests import Request as HttpRequest

from ferrum_jax.contract.errors import FerrumError
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.batch import TokenChoice
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.request import Request
from ferrum_jax.serve.errors import ApiError, bad_request, from_engine

T = TypeVar("T")
LONGEST_FORM = 1 << 17  # characters of a schema (as JSON) or grammar; such forms compile within seconds


class DisconnectError(Exception):
    """The client has disconnected and will not read the response."""


@dataclass(eq=False)
class AnswerProgress:
    """How far one answer of the HTTP request was read from the engine."""

    index: int
    request: Request
    num_taken: int = 0  # tokens read
    is_first: bool = True  # no piece was read yet
    is_ended: bool = False  # it was read to its end, or cut
    started: float = 0.0  # when its HTTP request had been read
    first: float = 0.0  # when its first token was read
    last: float = 0.0  # when its last token or its end was read
    gaps: list[float] = field(default_factory=list)  # seconds between tokens that were not counted yet


class Piece(NamedTuple):
    """The new part of one answer."""

    choice: AnswerProgress
    is_first: bool
    text: str
    tokens: Sequence[TokenChoice]
    finish_reason: str | None


class Caller:
    """The client of one request: whether it is still connected, and its deadline.

    An asynchronous context, in which `changed` is set when the client leaves or its time is over.
    """

    def __init__(self, http: HttpRequest, seconds: float):
        """Takes a request whose body was read, and how many seconds it may take."""
        self._http, self._seconds = http, seconds
        self.started = time.perf_counter()
        self.changed = asyncio.Event()
        self.has_left = False
        self._is_late = False
        self._problem: ApiError | None = None

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._watch())
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)
        return self

    @property
    def deadline(self) -> float:
        """When the request's time is over, by the event loop's clock."""
        return self._timer.when()

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        self._watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watcher

    async def _watch(self) -> None:
        while (await self._http.receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        self.changed.set()

    def _expire(self) -> None:
        self._is_late = True
        self.changed.set()

    def end(self, problem: ApiError) -> None:
        """Ends the client's request with an error."""
        self._problem = problem
        self.changed.set()

    def check(self) -> None:
        """Raises DisconnectError if the client has left, a 408 if its time is over, or the error given to `end`."""
        if self.has_left:
            raise DisconnectError
        if self._problem is not None:
            raise self._problem
        if self._is_late:
            raise ApiError(
                408,
                f"the request was not answered within {self._seconds:g} seconds",
                code="deadline_exceeded",
                headers={"x-should-retry": "false"},
            )

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for a coroutine and returns its result; cancels it and raises as `check` when `changed` is set."""
        tasks = [asyncio.create_task(work), asyncio.create_task(self.changed.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # retrieves their errors, or asyncio would log them


class Wakeups:
    """Sets events of one event loop from another thread: all events of one step by one call into the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        """Takes the loop of the events."""
        self.loop = loop
        self._due: deque[asyncio.Event] = deque()
        self._is_called = False

    def wake(self, event: asyncio.Event) -> None:
        """Has the loop set an event; any thread may call this."""
        self._due.append(event)
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: no one waits
                self.loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self._is_called = False  # first: a later `wake` then calls into the loop again
        while self._due:
            self._due.popleft().set()


class Answers:
    """The engine's requests for one HTTP request.

    An asynchronous context: the requests run within it, and leaving it aborts those that are not done.
    """

    def __init__(self, llm: LLM, groups: Sequence[Sequence[Request]], caller: Caller, wakeups: Wakeups):
        """Takes requests in groups, one for each prompt; the others of a group are `copies` of its first."""
        self._llm = llm
        self._wakeups = wakeups
        self.groups = groups
        self.choices = [AnswerProgress(at, one) for at, one in enumerate(one for group in groups for one in group)]
        self.caller = caller
        self._is_signalled = False
        self._failure: ApiError | None = None  # of an answer

    async def __aenter__(self) -> Self:
        wakeups, changed = self._wakeups, self.caller.changed

        def notify(_: Request) -> None:
            if not self._is_signalled:
                self._is_signalled = True
                wakeups.wake(changed)

        for choice in self.choices:
            choice.request.notify = notify
            choice.started, choice.last = self.caller.started, time.perf_counter()
        try:
            self._llm.engine.submit(*(first for first, *_ in self.groups if not first.is_done))
        except FerrumError as problem:
            raise from_engine(problem) from problem
        if any(first.is_done for first, *_ in self.groups):
            changed.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        if running := [one.request for one in self.choices if not one.request.is_done]:
            self._llm.engine.abort(*running)

    @property
    def is_over(self) -> bool:
        """True once every answer was read to its end."""
        return all(choice.is_ended for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """Counts the tokens so far as OpenAI does: a prompt counts once for all of its answers."""
        prompts = sum(len(group[0].prompt) for group in self.groups)
        generated = sum(choice.num_taken for choice in self.choices)
        cached = sum(group[0].num_cached for group in self.groups)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": generated,
            "total_tokens": prompts + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def next(self) -> list[Piece]:
        """Waits for new pieces of answers, and returns them.

        Raises:
            DisconnectError: the client has left.
            ApiError: the request takes too long, or the engine failed.
        """
        self._check_not_failed()
        while True:
            await self.caller.changed.wait()
            self.caller.changed.clear()
            self._is_signalled = False  # first: a later `notify` then signals again
            self.caller.check()
            pieces = []
            for choice in self.choices:
                try:
                    if (piece := self._take(choice)) is not None:
                        pieces.append(piece)
                except ApiError as problem:
                    self._failure = problem  # raised once the others' pieces are returned
            if pieces:
                return pieces
            self._check_not_failed()

    def _check_not_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def cut(self, choice: AnswerProgress, count: int) -> None:
        """Ends an answer after this many of the tokens that were read; no more pieces of it come."""
        choice.num_taken = count
        choice.is_ended = True
        self._llm.engine.abort(choice.request)

    def _take(self, choice: AnswerProgress) -> Piece | None:
        request = choice.request
        is_done = request.is_done  # read first: all tokens before it are there then
        if choice.is_ended:
            return None
        if request.error is not None:
            raise from_engine(request.error) from request.error
        tokens = request.choices[choice.num_taken :]
        text = request.take_text()
        if not tokens and not text and not is_done:
            return None
        now = time.perf_counter()
        if tokens:
            choice.first = choice.first or now
            if choice.num_taken:
                choice.gaps += [(now - choice.last) / len(tokens)] * len(tokens)
            elif (more := len(tokens) - 1) > 0:  # several came before the first was read
                since = now - request.submitted - request.first_token_after
                choice.gaps += [max(0.0, since) / more] * more
        if tokens or is_done:
            choice.last = now
        choice.num_taken += len(tokens)
        choice.is_ended = is_done
        piece = Piece(choice, choice.is_first, text, tokens, request.finish_reason if is_done else None)
        choice.is_first = False
        return piece


def make_group(
    llm: LLM, ids: list[int], params: SamplingParams, n: int, adapter: ActiveLoraAdapter | None, priority: int
) -> list[Request]:
    """Returns the requests of one prompt; the others are `copies` of the first, answer i has the seed `seed + i`.

    Raises a 400 for a form that is too long, and the engine's errors for arguments that it refuses.
    """
    if params.structured is not None and (length := len(params.structured.definition[1])) > LONGEST_FORM:
        raise bad_request(f"the form of the answer has {length:,} characters, at most {LONGEST_FORM:,} are taken")
    return llm.group(ids, replace(params, n=n), adapter, priority=priority)

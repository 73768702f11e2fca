"""`Answers`: what the engine generates for one HTTP request, for one event loop."""

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
LONGEST_FORM = 1 << 17  # characters of a schema or grammar, as JSON where it is no text; such compile within seconds


class DisconnectError(Exception):
    """The client has gone: nobody reads what comes."""


@dataclass(eq=False)
class AnswerProgress:
    """One answer of the request, as far as it was taken."""

    index: int
    request: Request
    num_taken: int = 0  # tokens
    is_first: bool = True
    is_ended: bool = False  # it was told to its end, or cut there
    started: float = 0.0  # when its HTTP request had been read
    first: float = 0.0  # when its first token was seen
    last: float = 0.0  # when its last token was seen, or its end
    gaps: list[float] = field(default_factory=list)  # seconds between tokens, since they were last counted


class Piece(NamedTuple):
    """What is new of one answer."""

    choice: AnswerProgress
    is_first: bool
    text: str
    tokens: Sequence[TokenChoice]
    finish_reason: str | None


class Caller:
    """The client of one request: whether it is still there, and how long it may wait.

    It is an asynchronous context, in which `changed` is set when the client leaves or its time is over.
    """

    def __init__(self, http: HttpRequest, seconds: float):
        """Takes a request whose body was read, and the seconds that it may take."""
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
        """When its time is over, by the event loop's clock."""
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
        """Ends what the client waits for with an error."""
        self._problem = problem
        self.changed.set()

    def check(self) -> None:
        """Raises DisconnectError where the client has gone, a 408 where its time is over, or what ended it."""
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
        """Waits for some work and returns its result; cancels it and raises as `check` once nobody waits for it."""
        tasks = [asyncio.create_task(work), asyncio.create_task(self.changed.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # no error is left that nobody has seen


class Wakeups:
    """Events of one event loop that another thread sets: all those of one step with one call of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        """Takes the loop whose events they are."""
        self.loop = loop
        self._due: deque[asyncio.Event] = deque()
        self._is_called = False

    def wake(self, event: asyncio.Event) -> None:
        """Has an event set; any thread may ask."""
        self._due.append(event)
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
                self.loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self._is_called = False  # before any is taken: what comes later calls anew
        while self._due:
            self._due.popleft().set()


class Answers:
    """The engine's requests of one HTTP request.

    It is an asynchronous context: within it the requests run, and whatever ends it frees what they hold.
    """

    def __init__(self, llm: LLM, groups: Sequence[Sequence[Request]], caller: Caller, wakeups: Wakeups):
        """Takes requests in groups of one prompt each, of which the first has the others as its copies."""
        self._llm = llm
        self._wakeups = wakeups
        self.groups = groups
        self.choices = [AnswerProgress(at, one) for at, one in enumerate(one for group in groups for one in group)]
        self.caller = caller
        self._is_signalled = False

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

    def interrupt(self) -> None:
        """Ends every answer with what it has, and the reason `abort`."""

        def end() -> None:
            for choice in self.choices:
                if not choice.request.is_done:
                    choice.request.interrupt()
                    self._llm.engine.scheduler.abort(choice.request)
                    if choice.request.notify is not None:
                        choice.request.notify(choice.request)

        self._llm.engine.call(end)

    @property
    def is_over(self) -> bool:
        """True once every answer was taken to its end."""
        return all(choice.is_ended for choice in self.choices)

    async def next(self) -> list[Piece]:
        """Waits until there is more, and returns it.

        Raises:
            DisconnectError: the client has gone.
            ApiError: the request takes too long, or the engine failed.
        """
        while True:
            await self.caller.changed.wait()
            self.caller.changed.clear()
            self._is_signalled = False  # before anything is read: what comes later signals anew
            self.caller.check()
            pieces = [piece for choice in self.choices if (piece := self._take(choice)) is not None]
            if pieces:
                return pieces

    async def rest(self) -> None:
        """Waits until every answer is complete; raises as `next`."""
        while not self.is_over:
            await self.next()

    def cut(self, choice: AnswerProgress) -> None:
        """Ends an answer where it is; nothing more of it comes."""
        choice.is_ended = True
        self._llm.engine.abort(choice.request)

    def _take(self, choice: AnswerProgress) -> Piece | None:
        request = choice.request
        is_done = request.is_done  # first: what came before it is there then
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
            elif (more := len(tokens) - 1) > 0:  # several came before the first was taken
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
    """Returns the requests of one prompt: the first has the others as its copies, answer i has the seed `seed + i`.

    Raises a 400 for a form that is too long, and errors of the engine for what it refuses.
    """
    if params.structured is not None and (length := len(params.structured.definition[1])) > LONGEST_FORM:
        raise bad_request(f"the form of the answer has {length:,} characters, at most {LONGEST_FORM:,} are taken")
    return llm.group(ids, replace(params, n=n), adapter, priority=priority)


def scored_only(request: Request) -> Request:
    """Lets a request score its prompt and generate nothing; one that has nothing to score is done."""
    request.limit = 0
    if request.num_unscored == 0:
        request.finish_reason = "length"
    return request


def usage_of(groups: Sequence[Sequence[Request]], choices: Sequence[AnswerProgress]) -> dict[str, Any]:
    """Counts tokens as OpenAI does: a prompt once, however many answers it has."""
    prompts = sum(len(group[0].prompt) for group in groups)
    generated = sum(choice.num_taken for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}

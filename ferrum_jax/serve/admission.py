"""Which requests may begin: a bounded queue, pauses, adapters being unloaded, and a draining server."""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable

from ferrum_jax.serve.answers import Caller
from ferrum_jax.serve.errors import ApiError, bad_request, unavailable

LONGEST_RETRY = 60  # seconds


class Admission:
    """Counts the answers that run or wait in the engine; one event loop uses it."""

    def __init__(self, rows: int, max_waiting: int):
        """Sets how many answers run at a time, and how many more may wait."""
        self.rows = rows
        self.max_waiting = max_waiting
        self.is_draining = False
        self.live = 0  # answers
        self.held = 0  # of these, answers that are not given to the engine yet, because of a pause
        self.users: Counter[str | None] = Counter()  # number of begun requests, by adapter
        self._leaving: set[str] = set()  # adapters being unloaded
        self._seconds = 1.0  # smoothed duration of an answer
        self._open = asyncio.Event()
        self._open.set()
        self._waiters: set[asyncio.Event] = set()

    @property
    def is_paused(self) -> bool:
        """True while no request may begin."""
        return not self._open.is_set()

    @contextlib.asynccontextmanager
    async def admit(self, answers: int, adapter: str | None, caller: Caller) -> AsyncIterator[None]:
        """Counts a request of `answers` answers while it is served; waits while the server is paused.

        Raises:
            DisconnectError: the caller has left.
            ApiError: a 429 if too many answers wait, a 400 for more answers than may ever wait, a 503 if the server
                drains, a 404 if the adapter is being unloaded, a 408 if the request's time is over.
        """
        most = self.rows + self.max_waiting
        if answers > most:
            raise bad_request(f"the request has {answers} answers, at most {most} can run or wait at a time")
        if self.is_draining:
            raise unavailable("the server is stopping", 5, "draining")
        if self.live + answers > most:
            raise ApiError(
                429,
                f"{self.live} answers run or wait, at most {most} may: send the request for {answers} more later",
                code="queue_full",
                headers={"retry-after": str(self.retry_after())},
            )
        self._check_stays(adapter)
        self.live += answers
        try:
            self.held += answers
            try:
                while self.is_paused:  # again: a pause may begin before this goes on
                    await caller.wait_for(self._open.wait())
            finally:
                self.held -= answers
            caller.check()
            self._check_stays(adapter)
            self.users[adapter] += 1  # nothing is waited for since the pause was looked at
            try:
                yield
            finally:
                self.users[adapter] -= 1
                self.users += Counter()  # drops the names that nobody uses
        finally:
            self.live -= answers
            self._wake()

    def _check_stays(self, adapter: str | None) -> None:
        """Raises a 404 if an adapter is being unloaded."""
        if adapter in self._leaving:
            raise ApiError(404, f"adapter {adapter!r} is being unloaded", param="model", code="model_not_found")

    def retry_after(self) -> int:
        """Estimates after how many whole seconds there is room in the queue."""
        waves = max(1.0, (self.live - self.rows) / self.rows)
        return min(LONGEST_RETRY, max(1, math.ceil(self._seconds * waves)))

    def took(self, seconds: float) -> None:
        """Records how long an answer took."""
        self._seconds += 0.1 * (seconds - self._seconds)

    def close(self) -> None:
        """Lets no new request begin."""
        self._open.clear()

    async def pause(self) -> None:
        """Lets no new request begin, and waits until the begun ones have ended or `resume` is called."""
        self.close()
        await self._until(lambda: self.users.total() == 0 or self._open.is_set())

    def resume(self) -> None:
        """Ends a pause: waiting requests begin."""
        self._open.set()
        self._wake()

    @contextlib.asynccontextmanager
    async def leaving(self, adapter: str) -> AsyncIterator[None]:
        """Admits no request with an adapter; the context begins when all begun requests with it have ended.

        Raises a 409 if the adapter is being unloaded already.
        """
        if adapter in self._leaving:
            raise ApiError(409, f"adapter {adapter!r} is being unloaded already", param="lora_name")
        self._leaving.add(adapter)
        try:
            await self._until(lambda: self.users[adapter] == 0)
            yield
        finally:
            self._leaving.discard(adapter)

    async def _until(self, holds: Callable[[], bool]) -> None:
        changed = asyncio.Event()
        self._waiters.add(changed)
        try:
            while not holds():
                await changed.wait()
                changed.clear()
        finally:
            self._waiters.discard(changed)

    def _wake(self) -> None:
        for changed in self._waiters:
            changed.set()

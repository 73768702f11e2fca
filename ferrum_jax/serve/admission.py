"""Who may begin: a bounded queue, pauses, adapters that are leaving, and a server that drains."""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable

from ferrum_jax.serve.answers import Caller
from ferrum_jax.serve.errors import ApiError, bad_request, unavailable

LONGEST_RETRY = 60  # seconds


class Admission:
    """Counts the answers that are in the engine or wait for it; one event loop uses it."""

    def __init__(self, rows: int, max_waiting: int):
        """Takes how many answers run at a time, and how many more may wait."""
        self.rows = rows
        self.max_waiting = max_waiting
        self.is_draining = False
        self.live = 0  # answers
        self.users: Counter[str | None] = Counter()  # requests that have begun, by adapter
        self._begun = 0  # requests that no pause holds back
        self._leaving: set[str] = set()  # adapters
        self._seconds = 1.0  # that an answer takes, smoothed
        self._open = asyncio.Event()
        self._open.set()
        self._waiters: set[asyncio.Event] = set()

    @property
    def is_paused(self) -> bool:
        """True while nothing new begins."""
        return not self._open.is_set()

    @contextlib.asynccontextmanager
    async def admit(self, answers: int, adapter: str | None, caller: Caller) -> AsyncIterator[None]:
        """Counts a request of so many answers while it is served; waits where the server is paused.

        Raises:
            DisconnectError: the caller left while it waited.
            ApiError: a 429 where too many wait, a 400 for more answers than may ever wait, a 503 of a server that
                drains, a 404 of an adapter that is leaving.
        """
        most = self.rows + self.max_waiting
        if answers > most:
            raise bad_request(f"the request has {answers} answers, at most {most} are served and wait at a time")
        if self.is_draining:
            raise unavailable("the server is stopping", 5, "draining")
        if self.live + answers > most:
            raise ApiError(
                429,
                f"{self.live} answers are served or wait, at most {most} may: {answers} more have to come later",
                code="queue_full",
                headers={"retry-after": str(self.retry_after())},
            )
        self._check_stays(adapter)
        self.live += answers
        is_begun = False
        try:
            await caller.wait_for(self._open.wait())
            self._check_stays(adapter)
            is_begun = True
            self._begun += 1
            self.users[adapter] += 1
            yield
        finally:
            self.live -= answers
            self._begun -= is_begun
            if is_begun:
                self.users[adapter] -= 1
                if not self.users[adapter]:
                    del self.users[adapter]
            self._wake()

    def _check_stays(self, adapter: str | None) -> None:
        """Raises a 404 of an adapter that is leaving."""
        if adapter in self._leaving:
            raise ApiError(404, f"adapter {adapter!r} is being unloaded", param="model", code="model_not_found")

    def retry_after(self) -> int:
        """Whole seconds after which a place in the queue may be free."""
        waves = max(1.0, (self.live - self.rows) / self.rows)
        return min(LONGEST_RETRY, max(1, math.ceil(self._seconds * waves)))

    def took(self, seconds: float) -> None:
        """Takes note of how long an answer took."""
        self._seconds += 0.1 * (seconds - self._seconds)

    def close(self) -> None:
        """Lets nothing new begin."""
        self._open.clear()

    async def pause(self) -> None:
        """Lets nothing new begin, and waits until what was begun has ended."""
        self.close()
        await self._until(lambda: self._begun == 0 or self._open.is_set())

    def resume(self) -> None:
        """Lets go on what waits."""
        self._open.set()
        self._wake()

    @contextlib.asynccontextmanager
    async def leaving(self, adapter: str) -> AsyncIterator[None]:
        """Admits nobody under an adapter meanwhile, and begins when those that have begun under it have ended.

        Raises a 409 for one that is leaving already.
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

"""`WaitingLine`: the requests that wait for a row, in the order in which they get one."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import attrgetter

from ferrum_jax.generate.request import Request

_priority = attrgetter("priority")


class WaitingLine:
    """Requests by priority, the lowest number first; within a priority, in the order of arrival.

    One thread changes it; any thread may read its length.
    """

    def __init__(self):
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Puts a request behind all others of its priority."""
        self._requests.insert(bisect_right(self._requests, request.priority, key=_priority), request)

    def put_first(self, *requests: Request) -> None:
        """Puts requests of one priority, preempted ones or copies, in this order before all others of that priority."""
        if requests:
            at = bisect_left(self._requests, requests[0].priority, key=_priority)
            self._requests[at:at] = requests

    def remove(self, request: Request) -> None:
        """Removes a request; raises ValueError if it does not wait."""
        self._requests.remove(request)

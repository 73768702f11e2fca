"""`WaitingLine`: the requests that wait for a row, in the order in which they get one."""

from bisect import bisect_left, bisect_right
from operator import attrgetter

from ferrum_jax.generate.request import Request

_priority = attrgetter("priority")


class WaitingLine(list[Request]):
    """Requests by priority, the lowest number first; within a priority, in the order of arrival.

    One thread changes it; any thread may read its length.
    """

    def add(self, request: Request) -> None:
        """Puts a request behind all others of its priority."""
        self.insert(bisect_right(self, request.priority, key=_priority), request)

    def put_first(self, *requests: Request) -> None:
        """Puts requests of one priority, preempted ones or copies, in this order before all others of that priority."""
        if requests:
            at = bisect_left(self, requests[0].priority, key=_priority)
            self[at:at] = requests

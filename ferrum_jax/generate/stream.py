"""`Stream`: an answer while it is being generated."""

import queue
from collections.abc import Generator, Iterator

from ferrum_jax.contract.errors import RequestValidationError
from ferrum_jax.generate.engine import Engine
from ferrum_jax.generate.params import RequestOutput
from ferrum_jax.generate.request import Request


class Stream:
    """An answer that is being generated: an iterator of text, and its output once it is finished."""

    def __init__(self, engine: Engine, request: Request):
        self._request = request
        self._pieces = self._run(engine, request)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Aborts the answer and frees its slot and blocks after the current step."""
        self._pieces.close()

    def output(self) -> RequestOutput:
        """Returns the finished output; raises RequestValidationError if the answer is not finished."""
        if not self._request.is_done:
            raise RequestValidationError("this stream is not finished: take its pieces first")
        return self._request.output()

    @staticmethod
    def _run(engine: Engine, request: Request) -> Generator[str, None, None]:
        events: queue.SimpleQueue[None] = queue.SimpleQueue()
        request.notify = lambda _: events.put(None)
        try:
            engine.submit(request)
            while not request.is_settled:
                events.get()
                if piece := request.take_text():
                    yield piece
            if piece := request.take_text():
                yield piece
            request.output()
        finally:
            engine.abort(request)

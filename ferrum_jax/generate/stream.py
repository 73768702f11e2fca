"""An answer, piece by piece."""

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
        """Gives the answer up and frees what it holds, at the end of a step of another thread if one runs."""
        self._pieces.close()

    def output(self) -> RequestOutput:
        """Gives the finished output; an answer that is not finished is a RequestValidationError."""
        if not self._request.is_done:
            raise RequestValidationError("this stream is not finished: take its pieces first")
        return self._request.output()

    @staticmethod
    def _run(engine: Engine, request: Request) -> Generator[str, None, None]:
        try:
            engine.submit(request)
            while not request.is_done:
                engine.step()
                if piece := request.take_text():
                    yield piece
            if piece := request.take_text():
                yield piece
            request.output()
        finally:
            engine.abort(request)

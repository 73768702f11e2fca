"""`Server`: uvicorn with the application, which drains before it stops."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ferrum_jax.contract.errors import BackendError, ConfigError
from ferrum_jax.generate.llm import LLM
from ferrum_jax.serve.app import make_app
from ferrum_jax.serve.service import Service
from ferrum_jax.serve.settings import ServerSettings

_log = logging.getLogger("ferrum_jax.serve")
BACKLOG = 2048  # connections
MOST_PIPELINED = 8  # unanswered requests of a connection up to which reading goes on, to notice a client that leaves
HEAD_BYTES = 1 << 16  # of a request before its body, which the parser holds in memory
SEND_SECONDS = 5  # for sending the last responses after all requests were ended


class _Connection(HttpToolsProtocol):
    """A connection that its requests can abort, even with unsent data, by `abort` in their scope's state.

    It closes once headers or trailers exceed `HEAD_BYTES`, after a 431 if no response is being sent. Trailers, which
    may follow a body in chunks, are discarded. If the client disconnects, every unanswered request learns of it, as
    long as no more than `MOST_PIPELINED` wait.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.app_state = self.app_state | {"abort": transport.abort}
        self._is_head, self._head_bytes = True, 0  # headers or trailers may come, and how much of them has come
        self._has_headers = False
        self._cycles: deque[RequestResponseCycle] = deque()  # uvicorn's unanswered requests, which it answers in order

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data) if self._is_head else 0
        super().data_received(data)
        if self._is_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            if not any(one.response_started and not one.response_complete for one in self._cycles):
                self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def on_message_begin(self) -> None:
        self._has_headers = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_head, self._head_bytes, self._has_headers = False, 0, True
        super().on_headers_complete()
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        self._cycles.append(self.cycle)
        if 1 < len(self._cycles) <= MOST_PIPELINED:  # uvicorn has paused reading, and would not see the client leave
            self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        self._is_head, self._head_bytes = True, 0  # trailers follow the last one

    def on_body(self, body: bytes) -> None:
        self._is_head = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_head, self._head_bytes = True, 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # which tells the newest request
        for one in self._cycles:
            if not one.response_complete:
                one.disconnected = True
                one.message_event.set()


class Server(uvicorn.Server):
    """Serves one model until it is told to stop; then it refuses new requests and waits for the running ones."""

    host: str  # this and the port are set by `running`
    port: int

    def __init__(self, llm: LLM, settings: ServerSettings | None = None):
        """Makes a server for a model, which the caller closes."""
        settings = ServerSettings() if settings is None else settings
        app = make_app(llm, settings)
        self.service: Service = app.state.service
        self._loop: asyncio.AbstractEventLoop | None = None  # once it runs
        self._is_hurried = False  # a Ctrl-C came after the signal to stop
        super().__init__(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",  # even where uvicorn finds a library for them
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=math.ceil(settings.drain_seconds) + SEND_SECONDS,
            )
        )

    @property
    def url(self) -> str:
        """The server's URL under `running`."""
        return url_of(self.host, self.port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to stop, called with a signal; a Ctrl-C meanwhile ends running requests, another one the server."""
        if sig == signal.SIGINT and self.should_exit and self._loop is not None and not self._is_hurried:
            self._is_hurried = True
            with contextlib.suppress(RuntimeError):  # the loop has closed: there is nothing left to end
                self._loop.call_soon_threadsafe(self.service.end_all)
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens and begins to serve; raises ConfigError if another server has begun to listen there meanwhile."""
        self._loop = asyncio.get_running_loop()
        for one in sockets or ():
            try:
                one.listen(BACKLOG)
            except OSError as problem:
                host, port, *_ = one.getsockname()
                raise ConfigError(f"cannot listen on {host}:{port}: {problem}") from None
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for running requests, ends those that take longer than `drain_seconds`, and stops."""
        self.service.admission.is_draining = True
        self.service.admission.resume()
        _log.info('{"event": "draining", "answers": %d}', self.service.admission.live)
        drained = asyncio.get_running_loop().call_later(self.service.settings.drain_seconds, self.service.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            drained.cancel()
            if self.force_exit:  # else uvicorn cancels it, and logs that as an error
                await self.lifespan.shutdown()


def url_of(host: str, port: int) -> str:
    """Returns the URL of a server; an IPv6 address goes in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket, for port 0 on any free port; raises ConfigError if it cannot be bound."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"the port is {port}, expected a number from 0 to {(1 << 16) - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as problem:  # the latter of a name with an empty label
        raise ConfigError(f"cannot listen on {host}:{port}: {problem}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as problem:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {problem}") from None
    return bound


@contextlib.contextmanager
def running(
    llm: LLM, settings: ServerSettings | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> Iterator[Server]:
    """Serves a model in a thread during the context, for port 0 on any free port; drains the server at the end.

    Raises:
        ConfigError: a setting is wrong, or the address cannot be used.
        BackendError: the server did not start.
    """
    bound = bind(host, port)
    try:
        server = Server(llm, settings)
    except BaseException:
        bound.close()
        raise

    problems: list[ConfigError] = []

    def serve() -> None:
        try:
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(server.serve([bound]))
        except ConfigError as problem:
            problems.append(problem)

    thread = threading.Thread(target=serve, name="ferrum-serve", daemon=True)
    with bound:
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise problems[0] if problems else BackendError("the server did not start: its log says why")
                thread.join(0.005)
            server.host, server.port = host, bound.getsockname()[1]
            yield server
        finally:
            server.should_exit = True
            thread.join()

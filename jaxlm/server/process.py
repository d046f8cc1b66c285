"""A server in this process, which ends in order: it takes no more, and loses nothing of what it has taken."""

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from jaxlm.inference.service import EngineService

_AFTER_DRAIN_S = 5  # for the last chunks to be sent
_KEEP_ALIVE_S = 75  # that an idle connection stays open: longer than proxies keep theirs


class DrainingServer(uvicorn.Server):
    """A server that drains at the first SIGTERM or SIGINT, and is ended by the second as by any.

    Args:
      drain_seconds: that requests under way may take at the end; then they end with an error.
    """

    def __init__(self, app: Starlette, service: EngineService, drain_seconds: float):
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(drain_seconds) + _AFTER_DRAIN_S,
            )
        )
        self.signal: int | None = None
        self._service, self._drain_seconds = service, drain_seconds
        self._ready: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve_on(self, listening: socket.socket, ready: Callable[[], None]) -> None:
        """Serve on a bound socket to the end; `ready` is called when it listens."""
        self._ready = ready
        self.run(sockets=[listening])

    def end(self) -> None:
        """End in order, from any thread."""
        if self._loop:
            self._loop.call_soon_threadsafe(setattr, self, "should_exit", True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals for the length of a block."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take the first signal."""
        self.signal, self.should_exit = sig, True
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and wait for what is under way."""
        draining = asyncio.create_task(self._service.drain(self._drain_seconds))
        await super().shutdown(sockets)
        await draining


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet. Raises OSError where it cannot be."""
    ((family, _, _, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket) -> str:
    """Return the address of a server on a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

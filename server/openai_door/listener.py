"""The OpenAI door's port: uvicorn on the event loop of the doors, with limits on connections and on slow headers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvseek.server.errors import ServerError
from kvseek.server.http_door.listener import HEADER_SECONDS, IDLE_SECONDS, SPARE_CONNECTIONS

from .answer import ABORT
from .errors import FieldError, error_json

MAX_HEADER_BYTES = 64 << 10
BACKLOG = 1024
ABSENT = (
    errno.EADDRNOTAVAIL,
    errno.EAFNOSUPPORT,
)  # of IPv6 where a machine has none, though its names have such addresses
LAST_SECONDS = 1.0  # time for answers that are being written when the server ends


class Connection(H11Protocol):
    """One connection. uvicorn itself would wait for ever for the headers of a request.

    Parameters
    ----------
    most : int
        Connections that may be open, and SPARE_CONNECTIONS more if all of these have requests.
    **uvicorns
        What uvicorn gives its connections.
    """

    def __init__(self, most: int, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._most, self.idle_since = most, 0.0
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; a connection beyond the limit closes the one that has been without a request for longest, or itself."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT: transport.abort}
        self.idle_since = self.loop.time()
        known = [one for one in self.connections if isinstance(one, Connection)]
        connections = [one for one in known if not one.transport.is_closing()]
        if len(connections) > self._most:
            least = self.idle_since - IDLE_SECONDS
            idle = [one for one in connections if one.is_idle and one.idle_since <= least]
            if idle:
                min(idle, key=lambda one: one.idle_since).transport.abort()
            elif len(connections) > self._most + SPARE_CONNECTIONS:
                transport.abort()
                return
        self._look()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        _, body = error_json(FieldError("", "the request is not HTTP/1.1; send such"))
        data = msgspec.json.encode(body)
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + data)
        self.transport.close()

    def _look(self) -> None:
        """Close the connection if the headers of its next request take too long."""
        if self.transport.is_closing():
            return
        since = self.idle_since if self.is_idle else self.loop.time()
        left = since + self.timeout_keep_alive - self.loop.time()
        if left <= 0:
            self.transport.abort()
        else:
            self._watch = self.loop.call_later(left, self._look)


class Server(uvicorn.Server):
    """uvicorn's server, but the process's own handlers keep the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class Listener:
    """Serves an application on one port.

    Parameters
    ----------
    max_connections : int
        Connections whose requests are served; some more get an error, further ones are closed.
    header_seconds : float
        Seconds that a client may take to send the headers of its next request.
    """

    def __init__(self, max_connections: int, header_seconds: float = HEADER_SECONDS) -> None:
        self._max_connections, self._header_seconds = max_connections, header_seconds
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether there are more connections than may ask for completions."""
        return self._server is not None and len(self._server.server_state.connections) > self._max_connections

    async def start(self, app: ASGIApp, host: str, port: int, flag: str, held: bool = False) -> int:
        """Listen; returns the port. Raises ServerError that names the flag.

        `held`: the launcher holds the port (Ports.hold).
        """
        try:
            listening = _bind(host, port, held)
        except (OSError, OverflowError) as error:
            raise ServerError(f"{flag} = {port}: cannot listen on {host} ({error}); choose another port") from None
        settings: dict[str, Any] = {
            "http": functools.partial(Connection, self._max_connections),
            "ws": "none",
            "lifespan": "off",
            "loop": "none",  # the loop of the process
            "log_config": None,
            "log_level": "critical",  # any client can send bytes that are no HTTP; the door logs its own errors
            "access_log": False,
            "server_header": False,  # the software's name and version are of use only to attackers
            "proxy_headers": False,
            "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
            "timeout_keep_alive": self._header_seconds,
            "backlog": BACKLOG,
        }
        self._server = Server(uvicorn.Config(app, **settings))
        self._serving = asyncio.create_task(self._server.serve(listening))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0)
        return int(listening[0].getsockname()[1])

    def stop_accepting(self) -> None:
        """Take no connections any more, and close those without an open request, within a tenth of a second."""
        if self._server is not None:
            self._server.should_exit = True

    async def close(self) -> None:
        """End the requests that are still open."""
        self.stop_accepting()
        if self._server is None or self._serving is None:
            return
        await asyncio.wait((self._serving,), timeout=LAST_SECONDS)
        self._server.force_exit = True
        for task in list(self._server.server_state.tasks):
            task.cancel()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await self._serving


def _bind(host: str, port: int, held: bool) -> list[socket.socket]:
    """Bind a socket to every address of a host that this machine has, all of them at one port; 0 picks a free one."""
    bound: list[socket.socket] = []
    absent = OSError(f"{host} has no address")
    with contextlib.ExitStack() as failing:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            chosen = bound[0].getsockname()[1] if bound else port
            try:
                bound.append(_bind_one(socket.socket(family, kind, protocol), (address[0], chosen, *address[2:]), held))
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                absent = error
            else:
                failing.callback(bound[-1].close)
        if not bound:
            raise absent
        failing.pop_all()
    return bound


def _bind_one(listening: socket.socket, address: Any, held: bool) -> socket.socket:
    """Bind a socket and return it; closes it if that fails."""
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, held)
        if listening.family == socket.AF_INET6:  # 0.0.0.0 has a socket of its own
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening

"""One listening port: an aiohttp application with a limit on its connections, and an end that lets responses finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from kvseek.server.errors import ServerError
from kvseek.server.requests.keys import REFUSAL, Keys, Tenant
from kvseek.server.requests.unread import WRITE_SECONDS

from .errors import RETRY_AFTER_SECONDS, error_response, errors_as_json
from .generate_json import error_to_json

HEADER_SECONDS = 75.0  # from connecting, or from the last response, to the end of the next request's headers
LINGER_SECONDS = 3.0  # time for which a refused client's data is still read, so that the client reads the refusal
SPARE_CONNECTIONS = 64  # connections beyond the limit that get an orderly 503; further ones are closed at once
IDLE_SECONDS = 1.0  # time without a request after which a connection may have to make room for others
BUSY = math.inf
TENANT = web.RequestKey("tenant", Tenant)  # whose request it is
NO_KEYS = Keys(())
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
logger = logging.getLogger(__name__)
FULL = "the server has as many open connections as it may have; try again later"


def _not_a_client_fault(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError))


# Any client can send bytes that are no HTTP, or end a connection early, so these must not fill the log.
logger.addFilter(_not_a_client_fault)


class Full(asyncio.Protocol):
    """Closes a connection because there are too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send status 503 and close the connection."""
        body = error_to_json(FULL)
        head = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {RETRY_AFTER_SECONDS}\r\nConnection: close\r\n"
        transport.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        transport.close()


class HttpServer:
    """Serves routes on one port.

    Clients that hold connections and send no requests on them keep nobody else from connecting: beyond the limit a new connection
    closes the one that has been without a request for longest.

    Parameters
    ----------
    max_connections : int
        Most connections open at once. If all of them have requests, requests on further connections get status 503, except for
        health and metrics.
    header_seconds : float
        Seconds that a client may take to send the headers of its next request.
    write_seconds : float
        Seconds that a client may leave a response unread that its handler does not write itself.
    keys : Keys
        Of which requests have to send one, but for questions of health.
    """

    def __init__(
        self,
        routes: list[web.RouteDef],
        max_connections: int,
        header_seconds: float = HEADER_SECONDS,
        write_seconds: float = WRITE_SECONDS,
        keys: Keys = NO_KEYS,
    ) -> None:
        @web.middleware
        async def serve(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._serve(request, handler)

        app = web.Application(middlewares=[serve, errors_as_json])
        app.add_routes(routes)
        app.on_response_prepare.append(_hide_version)
        self._max_connections, self._write_seconds, self._keys = max_connections, write_seconds, keys
        self._rested: dict[
            Any, float
        ] = {}  # by connection: when the handler of its last request ended; BUSY until then
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # when a client leaves, its handler is cancelled, which cancels its request
            access_log=None,
            logger=logger,
            keepalive_timeout=header_seconds,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
            shutdown_timeout=1.0,
        )
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, flag: str, held: bool = False) -> int:
        """Listen; returns the port. Raises ServerError that names the flag.

        `held`: the launcher holds the port (Ports.hold).
        """
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connect, host or None, port, backlog=1024, reuse_port=held
            )
        except (OSError, OverflowError) as error:
            raise ServerError(f"{flag} = {port}: cannot listen on {host} ({error}); choose another port") from None
        return int(self._server.sockets[0].getsockname()[1])

    def stop_accepting(self) -> None:
        """Take no connections any more, and close those without an open request."""
        if self._server is not None:
            self._server.close()
        if self._runner.server is not None:
            self._runner.server.pre_shutdown()

    async def close(self) -> None:
        """End the requests that are still open."""
        self.stop_accepting()
        await self._runner.cleanup()

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._open())

    def _open(self) -> list[Any]:
        """Return the open connections."""
        known = () if self._runner.server is None else self._runner.server.connections
        return [each for each in known if each.transport is not None and not each.transport.is_closing()]

    def _connect(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        connections, now = self._open(), asyncio.get_running_loop().time()
        opening = {each: since for each, since in self._rested.items() if now - IDLE_SECONDS < since < BUSY}
        self._rested = opening | {each: self._rested.get(each, now) for each in connections}
        excess = len(connections) - self._max_connections + 1
        if excess > 0:
            idle = [each for each in connections if self._rested[each] <= now - IDLE_SECONDS]
            for each in sorted(idle, key=lambda each: self._rested[each])[:excess]:
                each.transport.abort()
                excess -= 1
            if excess > SPARE_CONNECTIONS:
                return Full()
        connection = self._runner.server()
        self._rested[connection] = now
        return connection

    async def _serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request, and write the answer unless its handler has done so."""
        self._rested[request.protocol] = BUSY
        try:
            refusal = self._refusal(request)
            response = await handler(request) if refusal is None else refusal
        finally:
            self._rested[request.protocol] = asyncio.get_running_loop().time()
        if isinstance(response, web.Response) and not response.prepared:
            try:
                async with asyncio.timeout(self._write_seconds):
                    await response.prepare(request)
                    await response.write_eof()
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
        return response

    def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        """Note whose request it is; returns the response to one without a key, or without a connection to spare."""
        tenant = self._keys.tenant(request.headers.get("Authorization", ""))
        if tenant is None and not _asks_for_health(request):
            return error_response(401, REFUSAL)
        if tenant is not None:
            request[TENANT] = tenant
        if request.method != "POST" or self.connections <= self._max_connections:
            return None
        response = error_response(503, FULL)
        response.force_close()
        return response


def tenant_of(request: web.Request) -> Tenant:
    """Return whose request it is; it is no question of health."""
    return request[TENANT]


def _asks_for_health(request: web.Request) -> bool:
    return request.method == "GET" and (request.path.startswith("/v2/health/") or request.path.endswith("/ready"))


async def _hide_version(_: web.Request, response: web.StreamResponse) -> None:
    """Replace the Server header, because the software's name and version are of use only to attackers."""
    with contextlib.suppress(RuntimeError):  # headers are frozen when they have been sent
        response.headers["Server"] = "kvseek"

"""One listening port: an aiohttp application with a limit on its connections, and an end that lets responses finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http import HttpProcessingError

from kvseek.server.errors import ServerError
from kvseek.server.requests.keys import REFUSAL, Keys, Tenant

from .errors import RETRY_AFTER_SECONDS, error_response, errors_as_json
from .generate_json import error_to_json

HEADER_SECONDS = 75.0  # from connecting, or from the last response, to the end of the next request's headers
LINGER_SECONDS = 3.0  # time for which a refused client's data is still read, so that the client reads the refusal
SPARE_CONNECTIONS = 64  # connections beyond the limit that get an orderly 503; further ones are closed at once
TENANT = "tenant"  # whose request it is
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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send status 503 and close the connection."""
        assert isinstance(transport, asyncio.Transport)
        body = error_to_json(FULL)
        head = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {RETRY_AFTER_SECONDS}\r\nConnection: close\r\n"
        transport.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        transport.close()


class HttpServer:
    """Serves routes on one port.

    Parameters
    ----------
    max_connections : int
        Most connections open at once. Requests on further connections get status 503, except for health and metrics.
    header_seconds : float
        Seconds that a client may take to send the headers of its next request.
    keys : Keys
        Of which requests have to send one, but for questions of health.
    """

    def __init__(
        self,
        routes: list[web.RouteDef],
        max_connections: int,
        header_seconds: float = HEADER_SECONDS,
        keys: Keys = NO_KEYS,
    ) -> None:
        @web.middleware
        async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._limit(request, handler)

        app = web.Application(middlewares=[errors_as_json, limit])
        app.add_routes(routes)
        app.on_response_prepare.append(_hide_version)
        self._max_connections, self._keys = max_connections, keys
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
        return 0 if self._runner.server is None else len(self._runner.server.connections)

    def _connect(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        if self.connections >= self._max_connections + SPARE_CONNECTIONS:
            return Full()
        return self._runner.server()

    async def _limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        tenant = self._keys.tenant(request.headers.get("Authorization", ""))
        if tenant is None and not _asks_for_health(request):
            return error_response(401, REFUSAL)
        request[TENANT] = tenant
        if request.method == "POST" and self.connections > self._max_connections:
            response = error_response(503, FULL)
            response.force_close()
            return response
        return await handler(request)


def tenant_of(request: web.Request) -> Tenant:
    """Return whose request it is; it is no question of health."""
    tenant: Tenant = request[TENANT]
    return tenant


def _asks_for_health(request: web.Request) -> bool:
    return request.method == "GET" and (request.path.startswith("/v2/health/") or request.path.endswith("/ready"))


async def _hide_version(_: web.Request, response: web.StreamResponse) -> None:
    """Replace the Server header, because the software's name and version are of use only to attackers."""
    with contextlib.suppress(RuntimeError):  # headers are frozen when they have been sent
        response.headers["Server"] = "kvseek"

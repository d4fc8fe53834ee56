"""One port of HTTP: connections and their limits, what holds for every request (keys, ids, errors, CORS), and an end that lets
responses finish.

uvicorn's connection on llhttp reads requests, the strict parser of Node.js, in C; Starlette's router finds the endpoint. All
ports are of this class, so the same bytes get the same answer at each, in the form of errors that the port's clients expect.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvseek.core.errors import shortened
from kvseek.server.errors import INTERNAL, ServerError
from kvseek.server.requests.keys import NO_KEYS, REFUSAL, Keys, Tenant
from kvseek.server.requests.models import MAX_ID_CHARACTERS
from kvseek.server.requests.unread import WRITE_SECONDS

from .errors import LINGER_SECONDS, ClientLeftError, ErrorForm, HttpError, error_response, headers_of, kserve_error

HEADER_SECONDS = 75.0  # from connecting, or from the last response, to the end of the next request's headers
MAX_HEADER_BYTES = 64 << 10  # of a request's line and headers, and of a body's trailers
MOST_PIPELINED = 4  # requests of a connection that may wait behind the one that is being answered
SPARE_CONNECTIONS = 64  # connections beyond the limit that get an orderly 503; further ones are closed at once
IDLE_SECONDS = 1.0  # time without a request after which a connection may have to make room for others
LAST_SECONDS = 1.0  # time for answers that are being written when the server ends
BACKLOG = 1024
CONNECTION, TENANT = "connection", "tenant"  # in the state of a request: its connection, and whose it is
REQUEST_ID = "x-request-id"
API_KEY = "x-api-key"  # Anthropic's header
METHODS = ("GET", "POST", "DELETE")  # that pages of other origins may use, if any
FULL = "the server has as many open connections as it may have; try again later"
NOT_HTTP = HttpError(400, "the request is not HTTP/1.1; send such")
TOO_LARGE = HttpError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes; send fewer or shorter ones")
NO_HOST = HttpError(400, "Host: must be there once; send it")
NO_CODING = HttpError(400, "Transfer-Encoding: must be chunked, or absent; send such")

logger = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):
    """One connection of a client. uvicorn itself would wait for ever for a request's headers, and take any number of them.

    Attributes
    ----------
    answering : asyncio.Task or None
        Answers the request that the client waits for; it is cancelled when the client leaves.
    current : RequestResponseCycle or None
        That request and its response; uvicorn's `cycle` is the latest, which may wait behind it.
    left : bool
        Whether the client has left.
    surplus : bool
        Whether there were as many other connections as there may be when this one last needed a place among them.
    """

    def __init__(self, server: HttpServer, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config, state, {CONNECTION: self})
        self._server = server
        self.answering: asyncio.Task[Any] | None = None
        self.current: RequestResponseCycle | None = None
        self.left = self.surplus = False
        self.idle_since = self.loop.time()
        self._deaf = False  # whether nothing that still comes is a request
        self._head = 0  # bytes of the headers, or trailers, so far
        self._in_body = False
        self._unread = 0  # bytes since the parser last made something of them
        self._fault = NOT_HTTP
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, unless there are too many connections."""
        super().connection_made(transport)
        if self._server.admit(self):
            self._look()
        else:
            self._end_with(HttpError(503, FULL), linger=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and cancel what the client waits for."""
        self.left = True
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset uvicorn would keep the connection, and its bodies, until then
        if self.answering is not None:
            self.answering.cancel()

    def eof_received(self) -> None:
        """Take a client that closes its side for one that has left, as nobody can tell whether it will read an answer."""
        if not self.is_idle:
            self.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Parse what has come; a client may not send for ever what makes no request."""
        if self._deaf:
            return
        self._unread += len(data)
        super().data_received(data)
        if self._unread > MAX_HEADER_BYTES and not self._deaf:
            self._fault = TOO_LARGE
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._head, self._in_body = 0, False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. A trailer is counted and dropped: who checks headers before this server has not seen it."""
        self._count(len(name) + len(value))
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer, unless the headers are those of no request that HTTP/1.1 allows."""
        version, hosts = self.parser.get_http_version(), 0
        for name, value in self.headers:
            hosts += name == b"host"
            if name == b"transfer-encoding" and (version != "1.1" or value.lower() != b"chunked"):
                self._refuse(NO_CODING)
        if version not in ("1.0", "1.1"):
            self._refuse(NOT_HTTP)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            self._refuse(NO_HOST)
        self._unread, self._in_body = 0, True
        super().on_headers_complete()
        if len(self.pipeline) > MOST_PIPELINED:
            self._refuse(NOT_HTTP)  # the requests before it are answered, and then the connection ends
        self.flow.resume_reading()  # uvicorn would not notice that a client leaves while requests wait

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._unread = 0
        super().on_message_complete()
        if self.cycle is self.current:  # a long body, all of which has come, must not hide that the client leaves
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.idle_since = self.loop.time()
        if self.current is not None:
            self.current.body = bytearray()  # of a request whose endpoint reads none
        super().on_response_complete()

    def write_now(self, data: bytes) -> bool:
        """Write a piece of a response that has begun, if nothing has to be waited for; returns whether it was written.

        This is what `send` of the request's cycle does with it, without what a call of that costs: of many streams each token
        is a piece.
        """
        cycle = self.current
        if self.flow.write_paused or self.transport.is_closing() or cycle is None or not cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.current = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request. The requests before it are still answered, and then the connection ends."""
        cycle = self.cycle
        if self.is_idle:
            self._end_with(self._fault)
        elif not cycle.more_body or cycle is not self.current:
            last: RequestResponseCycle | None = cycle
            if cycle.more_body:  # it waits behind others, and its body is at fault
                self.pipeline.popleft()
                last = self.pipeline[0][0] if self.pipeline else self.current
            assert last is not None
            self._deaf, last.keep_alive = True, False
        elif cycle.response_started:
            self.transport.abort()
        else:  # the fault is in the body that the request's endpoint waits for
            self._end_with(self._fault)
            cycle.disconnected = self.left = True
            cycle.waiting_for_100_continue = False  # the connection has been written to its end
            if self.answering is not None:
                self.answering.cancel()

    def _unsupported_upgrade_warning(self) -> None:
        """Stay with HTTP/1.1 where a client offers another protocol; what it sends behind the request may be of that one."""
        self._deaf, self.cycle.keep_alive = True, False
        if self.is_idle:
            self.transport.close()

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEADER_BYTES:
            self._refuse(TOO_LARGE)

    def _refuse(self, fault: HttpError) -> None:
        """End parsing."""
        self._fault = fault
        raise ValueError(str(fault))  # a new error each time: one that is kept would keep the frames that it has passed

    def _end_with(self, error: HttpError, linger: bool = True) -> None:
        """Answer with an error and close the connection; with `linger` when the client has closed it, or LINGER_SECONDS later.

        A client that is still sending when its connection is closed gets a reset, and may never read the answer.
        """
        self._deaf = True
        status, body = self._server.form(error)
        date = self._server.now().decode()
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Length: {len(body)}", f"Date: {date}"]
        lines += [f"{name}: {value}" for name, value in headers_of(status, close=True).items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        if not linger:
            self.transport.close()
            return
        self.transport.write_eof()
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _look(self) -> None:
        """Close the connection if the headers of its next request take too long, or if its last answer is not read."""
        since = self.idle_since if self.is_idle else self.loop.time()
        left = since + self.timeout_keep_alive - self.loop.time()
        if left <= 0:
            self.transport.abort()
        else:
            self._watch = self.loop.call_later(left, self._look)


class HttpServer:
    """Serves routes on one port.

    Clients that hold connections and send no requests on them keep nobody else from connecting: beyond the limit a new connection
    closes the one that has been without a request for longest.

    Parameters
    ----------
    endpoints : str
        What there is, for a client that asks for something else.
    max_connections : int
        Most connections open at once. If all of them have requests, a POST on a further connection gets status 503; connections
        that are among them are served however many others there are.
    form : callable
        Writes errors.
    forms : mapping
        What writes those of paths that begin so, in place of `form`.
    default : ASGI application, optional
        Answers what no route matches.
    header_seconds : float
        Seconds that a client may take to send the headers of its next request.
    write_seconds : float
        Seconds that a client may leave a piece of a response unread.
    keys : Keys
        Of which requests have to send one, but for those that are open.
    is_open : callable
        Whether GET and HEAD of this path need no key.
    cors_origins : collection of str
        Origins whose pages may ask from a browser; "*" stands for all.
    """

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        endpoints: str,
        max_connections: int,
        form: ErrorForm = kserve_error,
        default: ASGIApp | None = None,
        header_seconds: float = HEADER_SECONDS,
        write_seconds: float = WRITE_SECONDS,
        keys: Keys = NO_KEYS,
        is_open: Callable[[str], bool] = lambda _: False,
        cors_origins: Collection[str] = (),
        forms: Mapping[str, ErrorForm] | None = None,
    ) -> None:
        self._router = Router(routes, redirect_slashes=False, default=default)
        self._endpoints, self._max_connections, self.form, self._forms = endpoints, max_connections, form, forms or {}
        self._write_seconds, self._keys, self._is_open = write_seconds, keys, is_open
        self._app: ASGIApp = self._answer
        if cors_origins:
            allowed: dict[str, Any] = {"allow_methods": METHODS, "allow_headers": ("*",)}
            self._app = CORSMiddleware(
                self._answer, cors_origins, **allowed, expose_headers=(REQUEST_ID, "Retry-After")
            )
        self._config = uvicorn.Config(
            self,
            interface="asgi3",
            http=HttpToolsProtocol,
            ws="none",
            lifespan="off",
            loop="none",  # the loop of the process
            log_config=None,
            log_level="critical",  # any client can send bytes that are no HTTP; kvseek logs its own errors
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=header_seconds,  # type: ignore[arg-type]  # a number of seconds is all that uvicorn needs
        )
        self._config.load()
        self._state, self._listening = ServerState(), list[asyncio.Server]()
        self._date = (0, b"")  # second, and how HTTP writes it

    async def start(self, host: str, port: int, flag: str, held: bool = False) -> int:
        """Listen at every address of a host; returns the port. Raises ServerError that names the flag.

        `held`: the launcher holds the port (Ports.hold).
        """
        loop, chosen, absent = asyncio.get_running_loop(), port, OSError(f"{host} has no address")
        try:
            for *_, address in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
                scope = f"%{address[3]}" if len(address) == 4 and address[3] else ""  # of an IPv6 address of one link
                try:
                    server = await loop.create_server(
                        self._connect, f"{address[0]}{scope}", chosen, backlog=BACKLOG, reuse_port=held
                    )
                except OSError as error:
                    if error.errno != errno.EADDRNOTAVAIL:
                        raise
                    absent = error
                else:  # without a socket where this machine lacks IPv6
                    chosen = next((one.getsockname()[1] for one in server.sockets), chosen)
                    self._listening += [server] if server.sockets else []
            if not self._listening:
                raise absent
        except (OSError, OverflowError) as error:
            self.stop_accepting()
            raise ServerError(f"{flag} = {port}: cannot listen on {host} ({error}); choose another port") from None
        return chosen

    def stop_accepting(self) -> None:
        """Take no connections any more, and close those without an open request."""
        for server in self._listening:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()

    async def close(self) -> None:
        """End the requests that are still open."""
        self.stop_accepting()
        tasks = self._state.tasks
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_SECONDS)
        for task in list(tasks):
            task.cancel()
        for connection in self._open():
            connection.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._open())

    def _open(self) -> list[Connection]:
        return [
            one for one in self._state.connections if isinstance(one, Connection) and not one.transport.is_closing()
        ]

    def _connect(self) -> Connection:
        return Connection(self, self._config, self._state)

    def admit(self, newest: Connection) -> bool:
        """Find a place for a new connection, if need be that of an idle one; returns whether it may stay."""
        newest.surplus = True
        newest.surplus = not self._has_place()
        return len(self._open()) <= self._max_connections + SPARE_CONNECTIONS

    def _has_place(self) -> bool:
        """Close idle connections if there are too many; returns whether there is a place for one that has none."""
        connections = self._open()
        excess = len(connections) - self._max_connections
        if excess > 0:
            latest = asyncio.get_running_loop().time() - IDLE_SECONDS
            idle = [one for one in connections if one.is_idle and one.idle_since <= latest]
            for one in sorted(idle, key=lambda one: one.idle_since)[:excess]:
                one.transport.abort()
        return sum(not one.surplus for one in self._open()) < self._max_connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: every answer has the request's id, and a client that leaves or does not read ends its request."""
        connection: Connection = scope["state"][CONNECTION]
        task, cycle = asyncio.current_task(), connection.current
        assert cycle is not None
        connection.answering = task
        scope["app"] = self  # the router raises what it does not find
        headers = [(b"date", self.now()), (REQUEST_ID.encode(), _id_of(scope))]
        unframed = False  # whether the end of the connection is the end of the response, as HTTP/1.0 knows no chunks

        async def write(message: Message) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                unframed = scope["http_version"] == "1.0" and all(
                    name != b"content-length" for name, _ in message["headers"]
                )
                cycle.chunked_encoding = False if unframed else None
                message["headers"] = [*message["headers"], *headers]
            elif unframed:
                cycle.expected_content_length = len(message.get("body", b""))
            if connection.transport.is_closing():
                raise ClientLeftError
            if not connection.flow.write_paused:
                await send(message)
                return
            try:
                async with asyncio.timeout(self._write_seconds):
                    await send(message)
            except TimeoutError:
                connection.transport.abort()
                raise ClientLeftError from None

        try:
            await self._app(scope, receive, write)
        except ConnectionError as error:  # nobody waits for an answer
            traceback.clear_frames(error.__traceback__)  # the error and its task would keep the answer for long
            connection.transport.abort()
            cycle.disconnected = True
        except asyncio.CancelledError:  # the client has left, or `close` ends what is open
            connection.transport.abort()
            cycle.disconnected = True
        except Exception as error:
            if cycle.response_started:
                raise
            # Not left to uvicorn, whose answer is plain text.
            logger.error("%s %s could not be answered", scope["method"], scope["path"], exc_info=error)
            failure = HttpError(500, INTERNAL, "internal_error")
            await error_response(self._form_of(scope), failure, True)(scope, receive, write)
        finally:
            if connection.answering is task:  # else the next request is being answered
                connection.answering = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or have its endpoint answer; an error is answered unless the response has begun."""
        begun = complete = False

        async def note(message: Message) -> None:
            nonlocal begun, complete
            begun = True
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is None:
                await self._router(scope, receive, note)
                if not begun:
                    raise RuntimeError("the endpoint has not answered")
            else:
                await error_response(self._form_of(scope), refusal, close=True)(scope, receive, note)
        except ConnectionError:
            raise
        except Exception as error:
            if begun:
                logger.error("%s %s: an answer that had begun failed", scope["method"], scope["path"], exc_info=error)
            if begun and not complete:
                raise  # half an answer is there: the connection is closed
            if not begun:
                # Made elsewhere: a name here for the error would keep it, and with it the answer in frames that it has passed.
                await self._response_to(scope, error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> HttpError | None:
        """Note whose request it is; returns why one is refused that has no key, or no connection to spare."""
        headers = Headers(scope=scope)
        tenant = self._keys.tenant(headers.get("authorization", f"Bearer {headers.get(API_KEY, '')}"))
        scope["state"][TENANT] = tenant
        if tenant is None and not (scope["method"] in ("GET", "HEAD") and self._is_open(scope["path"])):
            return HttpError(401, REFUSAL, "invalid_api_key")
        connection: Connection = scope["state"][CONNECTION]
        if scope["method"] == "POST" and connection.surplus:
            connection.surplus = not self._has_place()
            if connection.surplus:
                return HttpError(503, FULL, "engine_unavailable")
        return None

    def _response_to(self, scope: Scope, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return error_response(self._form_of(scope), error)
        allow = {name: ", ".join(sorted(value.split(", "))) for name, value in (error.headers or {}).items()}
        return error_response(self._form_of(scope), self._routing_error(scope, error), more=allow)

    def _form_of(self, scope: Scope) -> ErrorForm:
        return next((form for path, form in self._forms.items() if scope["path"].startswith(path)), self.form)

    def _routing_error(self, scope: Scope, error: HTTPException) -> HttpError:
        path = shortened(scope["path"])
        if error.status_code == 405:
            allowed = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
            return HttpError(405, f"{scope['method']} {path}: use {allowed}", "method_not_allowed")
        return HttpError(error.status_code, f"{path} is not found; there are {self._endpoints}", "not_found")

    def now(self) -> bytes:
        """Return the time as HTTP writes it."""
        second = int(time.time())
        if self._date[0] != second:
            self._date = second, formatdate(second, usegmt=True).encode()
        return self._date[1]


class Endpoint:
    """An endpoint that writes its answer itself, of a function that gets the request and what sends.

    Starlette takes a function for one that returns its answer, and an object for an ASGI application.
    """

    def __init__(self, answer: Callable[[Request, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        await self._answer(Request(scope, receive), send)


def tenant_of(request: Request) -> Tenant:
    """Return whose request it is; it is none that needs no key."""
    tenant: Tenant = request.scope["state"][TENANT]
    return tenant


def _id_of(scope: Scope) -> bytes:
    """Return the client's id of its request if it is fit for a header, else a new one."""
    given: bytes = next((value for name, value in scope["headers"] if name == REQUEST_ID.encode()), b"")
    fits = 0 < len(given) <= MAX_ID_CHARACTERS and all(32 <= byte < 127 for byte in given)
    return given if fits else uuid.uuid4().hex.encode()

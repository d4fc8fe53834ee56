"""One port of HTTP with endpoints of a test: what it does about clients that do not read, leave, or are too many."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import requests
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tests.server.conftest import loop_in_a_thread
from tests.support.waiting import SECONDS, wait_for

from kvseek.server.errors import INTERNAL, ServerError
from kvseek.server.http.content import PIECE_BYTES, Writer
from kvseek.server.http.errors import HttpError, kserve_error
from kvseek.server.http.server import IDLE_SECONDS, MOST_PIPELINED, SPARE_CONNECTIONS, HttpServer
from kvseek.server.openai.fields import openai_error
from kvseek.server.requests.unread import UnreadAnswers

pytestmark = pytest.mark.anyio
ABSENT = "192.0.2.1"  # reserved for documentation, so no machine has it


async def small(_: Request) -> Response:
    return Response(status_code=204)


async def large(_: Request) -> Response:
    return Response(bytes(1 << 20))


async def broken(_: Request) -> Response:
    raise ZeroDivisionError("/private/path")


async def refusing(_: Request) -> Response:
    raise HttpError(413, "too large", "large")


@contextmanager
def listening(endpoint: Any, most: int = 10, **options: Any) -> Iterator[tuple[HttpServer, int]]:
    """An endpoint at / and /health of a port, whose loop runs in a thread of its own."""
    routes = [Route("/", endpoint, methods=["GET", "POST"]), Route("/health", small)]

    async def start() -> tuple[HttpServer, int]:
        server = HttpServer(routes, "/", most, **options)
        return server, await server.start("127.0.0.1", 0, "--http_port")

    with loop_in_a_thread() as loop:
        server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(SECONDS)
        try:
            yield server, port
        finally:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(SECONDS)


def slow_reader(port: int, sent: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    client.connect(("127.0.0.1", port))
    client.sendall(sent)
    return client


def give(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let every host have these addresses."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr("kvseek.server.http.server.socket.getaddrinfo", lambda *_, **__: found)


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.2"), (ABSENT, "127.0.0.2"), ("127.0.0.1", ABSENT)])
async def test_every_address_of_a_host_has_the_same_port(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    server = HttpServer([Route("/", small)], "/", 10)
    with monkeypatch.context() as patch:
        give(patch, *addresses)
        port = await server.start("a host", 0, "--openai_port")
    for address in addresses:
        if address != ABSENT:
            reader, writer = await asyncio.open_connection(address, port)
            writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 204 No Content\r\n"
            writer.close()
    await server.close()


def test_a_host_that_is_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, ABSENT)
    with pytest.raises(ServerError, match=r"--openai_port = 0: cannot listen on a host \(.*assign requested address"):
        asyncio.run(HttpServer([], "/", 10).start("a host", 0, "--openai_port"))


def test_who_does_not_read_any_response_is_cut_off() -> None:
    """Nor can who asks for health or metrics and does not read hold a connection for ever."""
    asked = b"GET / HTTP/1.1\r\nHost: door\r\n\r\n" * 20
    with listening(large, write_seconds=0.2) as (server, port), slow_reader(port, asked):
        wait_for(lambda: server.connections == 1)
        wait_for(lambda: server.connections == 0)


class Answering:
    """An endpoint that writes as the endpoints of generations do."""

    def __init__(self, unread: UnreadAnswers, write: Callable[[Writer], Awaitable[None]]) -> None:
        self.unread, self.write, self.ended = unread, write, list[str]()

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        try:
            with self.unread.answer() as answer:
                await self.write(Writer(scope, send, answer))
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise


async def endless(out: Writer) -> None:
    async def events() -> Any:
        while True:
            yield b"x" * 1000

    await out.stream(events(), kserve_error)


async def short(out: Writer) -> None:
    async def events() -> Any:
        yield b"one"
        yield b"two"

    await out.stream(events(), kserve_error)


@pytest.mark.parametrize(("version", "body"), [("1.0", "{}{}"), ("1.1", "b\r\n{}\r\nb\r\n{}\r\n0\r\n\r\n")])
def test_a_stream_has_chunks_for_clients_that_know_them(version: str, body: str) -> None:
    sent = f"GET / HTTP/{version}\r\nHost: door\r\nConnection: close\r\n\r\n".encode()
    with listening(Answering(UnreadAnswers(1 << 20), short)) as (_, port), slow_reader(port, sent) as client:
        head, _, found = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert found.decode() == body.format("data: one\n\n", "data: two\n\n")
    assert (b"transfer-encoding" in head.lower()) is (version == "1.1")


async def waiting(_: Writer) -> None:
    await asyncio.Event().wait()


def test_who_does_not_read_a_stream_is_cut_off_and_ends_it() -> None:
    endpoint = Answering(UnreadAnswers(1 << 20, seconds=0.2), endless)
    with listening(endpoint) as (server, port), slow_reader(port, b"GET / HTTP/1.1\r\nHost: door\r\n\r\n"):
        wait_for(lambda: endpoint.ended)
        wait_for(lambda: server.connections == 0)
    assert endpoint.unread.bytes == 0


@pytest.mark.parametrize("write", [endless, waiting])
@pytest.mark.parametrize("half", [True, False])
def test_a_client_that_leaves_cancels_the_work(write: Callable[[Writer], Awaitable[None]], half: bool) -> None:
    """So does one that closes its side alone, of which nobody can tell whether it has left."""
    endpoint = Answering(UnreadAnswers(1 << 20), write)
    with listening(endpoint) as (server, port):
        client = socket.create_connection(("127.0.0.1", port), SECONDS)
        client.sendall(b"GET / HTTP/1.1\r\nHost: door\r\n\r\n")
        wait_for(lambda: server.connections == 1)
        if half:
            client.shutdown(socket.SHUT_WR)
        else:
            client.close()
        wait_for(lambda: endpoint.ended in (["CancelledError"], ["ClientLeftError"]))
        wait_for(lambda: server.connections == 0)
        client.close()


LONG = b"POST / HTTP/1.1\r\nHost: door\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize("behind", [b"", b"GET /health HTTP/1.1\r\nHost: door\r\n\r\n"], ids=["", "pipelined"])
def test_a_client_that_leaves_is_noticed_behind_what_it_has_sent(behind: bytes) -> None:
    """A long body that has come whole, and a request that waits, are read no further: they must not hide the end."""
    endpoint = Answering(UnreadAnswers(1 << 20), waiting)
    with listening(endpoint) as (_, port), socket.create_connection(("127.0.0.1", port), SECONDS) as client:
        client.sendall(LONG)
        time.sleep(0.2)  # so that the body is one read
        client.sendall(bytes(100000) + behind)
        time.sleep(0.2)
        client.close()
        wait_for(lambda: endpoint.ended in (["CancelledError"], ["ClientLeftError"]))


def test_few_requests_may_wait_behind_another() -> None:
    """Each takes memory, so the connection of a client that sends more ends when those are answered."""
    asked = b"GET /health HTTP/1.1\r\nHost: door\r\n\r\n"
    with listening(small) as (_, port), socket.create_connection(("127.0.0.1", port), SECONDS) as client:
        client.sendall(asked * 1000)
        found = b""
        while piece := client.recv(1 << 16):
            found += piece
    assert 1 <= found.count(b"HTTP/1.1 204") <= 1 + MOST_PIPELINED + 1


def test_trailers_are_no_headers() -> None:
    async def tell(request: Request) -> Response:
        await request.body()
        return Response(json.dumps([name for name, _ in request.headers.items()]))

    chunked = b"POST / HTTP/1.1\r\nHost: door\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    with listening(tell) as (_, port), socket.create_connection(("127.0.0.1", port), SECONDS) as client:
        client.sendall(chunked + b"Authorization: Bearer stolen\r\nX-Request-Id: forged\r\n\r\n")
        found = b""
        while piece := client.recv(1 << 16):
            found += piece
    assert b'"host"' in found
    assert b"authorization" not in found
    assert b"forged" not in found


def test_a_large_answer_is_given_to_the_connection_in_pieces() -> None:
    """It would take all of it at once, however slowly the client reads."""
    unread, sizes = UnreadAnswers(1 << 21), list[int]()

    async def write(out: Writer) -> None:
        send = out._send

        async def counting(message: Any) -> None:
            sizes.append(len(message.get("body", b"")))
            assert unread.bytes == 1 << 20, "all of it counts until the last piece is taken"
            await send(message)

        out._send = counting
        await out.whole(bytes(1 << 20))
        assert unread.bytes == 0

    with listening(Answering(unread, write)) as (_, port):
        assert len(requests.get(f"http://127.0.0.1:{port}/", timeout=SECONDS).content) == 1 << 20
    assert sizes == [0, *([PIECE_BYTES] * 16)]


def test_a_client_that_is_still_sending_reads_its_refusal() -> None:
    with listening(refusing) as (_, port):
        for _ in range(5):
            response = requests.post(f"http://127.0.0.1:{port}/", data=b"x" * (20 << 20), timeout=SECONDS)
            assert (response.status_code, response.headers["Connection"]) == (413, "close")


class Silent:
    """An endpoint that returns and has not answered."""

    async def __call__(self, *_: Any) -> None:
        pass


def unwritable(form: Any) -> Any:
    """A form of errors that fails for the error that an endpoint raises."""

    def write(error: Exception) -> tuple[int, bytes]:
        if isinstance(error, ZeroDivisionError):
            raise TypeError("/private/path")
        status, body = form(error)
        return int(status), bytes(body)

    return write


@pytest.mark.parametrize("form", [kserve_error, openai_error])
@pytest.mark.parametrize(
    ("endpoint", "wrap", "logged"),
    [(broken, None, "/private/path"), (broken, unwritable, "/private/path"), (Silent(), None, "has not answered")],
    ids=["raises", "cannot be written", "silent"],
)
def test_an_error_that_nobody_has_foreseen_is_told_as_json_and_logged(
    endpoint: Any, wrap: Any, logged: str, form: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In the port's form whatever fails: uvicorn's own answer would be plain text."""
    with listening(endpoint, form=wrap(form) if wrap else form) as (_, port):
        response = requests.get(f"http://127.0.0.1:{port}/", timeout=SECONDS)
    assert (response.status_code, response.headers["content-type"]) == (500, "application/json")
    told = response.json()["error"]
    assert (told if form is kserve_error else told["message"]) == INTERNAL
    assert logged in caplog.text, "the log says more"


def test_beyond_the_limit_requests_are_refused_and_health_is_not() -> None:
    """Those beyond the spare ones are refused before they are read."""
    endpoint = Answering(UnreadAnswers(1 << 20), waiting)
    ask = b"POST / HTTP/1.1\r\nHost: door\r\nContent-Length: 2\r\n\r\n{}"
    with listening(endpoint, most=2) as (server, port):
        held = [socket.create_connection(("127.0.0.1", port), SECONDS) for _ in range(2 + SPARE_CONNECTIONS)]
        for each in held[:-1]:
            each.sendall(b"GET / HTTP/1.1\r\nHost: door\r\n\r\n")  # so that none is idle
        wait_for(lambda: server.connections == 2 + SPARE_CONNECTIONS)
        with socket.create_connection(("127.0.0.1", port), SECONDS) as further:
            assert further.recv(1000).startswith(b"HTTP/1.1 503"), "at once"
        held[-1].sendall(b"GET /health HTTP/1.1\r\nHost: door\r\n\r\n")
        assert held[-1].recv(1000).startswith(b"HTTP/1.1 204")
        held[-1].sendall(ask)
        answer = held[-1].recv(1000)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"open connections" in answer + held[-1].recv(1000)
        for each in held:
            each.close()


def test_newcomers_do_not_cost_a_connection_its_place() -> None:
    """Though none of them can be closed yet: they have a request, or have come just now."""
    ask = b"POST / HTTP/1.1\r\nHost: door\r\nContent-Length: 2\r\n\r\n{}"
    with listening(small, most=1) as (server, port), ExitStack() as held:
        first, *others = (held.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS)) for _ in range(9))
        wait_for(lambda: server.connections == 9)
        for connection, status in ((first, b"204"), (others[0], b"503"), (first, b"204")):
            connection.sendall(ask)
            assert connection.recv(1000).startswith(b"HTTP/1.1 " + status)


def test_pages_of_other_origins_may_ask_if_a_flag_says_so() -> None:
    page, asked = "https://chat.example.org", {"Access-Control-Request-Method": "POST"}
    for origins, allowed in (((), None), ((page,), page), (("*",), "*"), (("https://another.example",), None)):
        with listening(small, cors_origins=origins) as (_, port):
            url = f"http://127.0.0.1:{port}/"
            answer = requests.get(url, headers={"Origin": page}, timeout=SECONDS)
            assert (answer.status_code, answer.headers.get("Access-Control-Allow-Origin")) == (204, allowed)
            before = requests.options(url, headers={"Origin": page, **asked}, timeout=SECONDS)
            assert before.headers.get("Access-Control-Allow-Origin") == allowed
            assert (before.status_code == 200) is (allowed is not None)


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHost: x\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_connection_whose_next_headers_come_too_slowly_is_closed(sent: bytes) -> None:
    with listening(small, header_seconds=0.3) as (_, port):
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), SECONDS) as slow:
            slow.sendall(sent)
            while slow.recv(1000):
                pass
        assert time.monotonic() - began > 0.2


def test_idle_connections_keep_nobody_from_connecting(caplog: pytest.LogCaptureFixture) -> None:
    """Not those that ask for health, say, from finding it."""
    sent = (b"", b"GET / HTTP", b"GET /health HTTP/1.1\r\nHost: door\r\n\r\n")
    with listening(small, most=3) as (_, port), ExitStack() as idle:
        for number in range(3 + SPARE_CONNECTIONS + 10):
            connection = idle.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
            connection.sendall(sent[number % len(sent)])
        time.sleep(1.2 * IDLE_SECONDS)
        for _ in range(3):
            assert requests.get(f"http://127.0.0.1:{port}/health", timeout=SECONDS).status_code == 204
    assert not caplog.records, "no traceback for a connection"


def test_a_burst_of_idle_connections_keeps_nobody_from_asking() -> None:
    """All of the excess goes, as soon as it has been idle, and not one for each newcomer."""
    with listening(small, most=3) as (server, port), ExitStack() as idle:
        for _ in range(3 + SPARE_CONNECTIONS):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
        wait_for(lambda: server.connections == 3 + SPARE_CONNECTIONS)
        time.sleep(1.2 * IDLE_SECONDS)
        assert requests.post(f"http://127.0.0.1:{port}/", data=b"{}", timeout=SECONDS).status_code == 204


def test_an_answer_that_breaks_off_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def half(scope: Scope, _: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError("in the middle")

    endpoint = type("Half", (), {"__call__": staticmethod(half)})()
    with listening(endpoint) as (_, port), socket.create_connection(("127.0.0.1", port), SECONDS) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: door\r\n\r\n")
        while client.recv(1000):
            pass
    assert "in the middle" in caplog.text

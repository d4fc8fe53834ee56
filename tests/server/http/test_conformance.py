"""The same bytes get the same answer at every port of HTTP: Triton's clients', OpenAI's, metrics, replicas' metrics."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.server.conftest import loop_in_a_thread
from tests.support.door_processes import CLOSED_PORT
from tests.support.waiting import SECONDS

from kvseek.server.frontend import Frontend
from kvseek.server.http.metrics import ENDPOINTS
from kvseek.server.http.server import MAX_HEADER_BYTES, HttpServer
from kvseek.server.ports import Ports
from kvseek.server.replica_metrics import ReplicaMetrics
from kvseek.server.settings import ServeSettings

PORTS = ("http", "openai", "metrics", "replicas")
PAGE = {"http": "/v2/health/live", "openai": "/v1/models", "metrics": "/v2/health/live", "replicas": "/v2/health/live"}
ASK = {
    "http": "/v2/models/tensorrt_llm/generate",
    "openai": "/v1/completions",
    "metrics": "/metrics",
    "replicas": "/metrics",
}


@dataclass(frozen=True)
class Answer:
    """What a port sends, until it closes the connection or has sent as many answers as were asked for."""

    statuses: list[int]
    heads: list[dict[str, str]]
    bodies: list[bytes]
    closed: bool


@pytest.fixture(scope="module")
def ports(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    folder = tmp_path_factory.mktemp("conformance")
    (folder / "restarts.json").write_text("{}")

    async def start() -> tuple[Frontend, HttpServer, dict[str, int]]:
        frontend = Frontend(directory, folder / "none.sock", ServeSettings(), CLOSED_PORT, CLOSED_PORT)
        own = await frontend.start("127.0.0.1", Ports(0, 0, 0, 0))
        replicas = ReplicaMetrics([CLOSED_PORT], f"http://{CLOSED_PORT}", folder / "restarts.json")
        server = HttpServer(replicas.routes(), ENDPOINTS, 64)
        port = await server.start("127.0.0.1", 0, "--metrics_port")
        return frontend, server, {"http": own.http, "openai": own.openai, "metrics": own.metrics, "replicas": port}

    async def stop() -> None:
        await asyncio.gather(frontend.close(), server.close())

    with loop_in_a_thread() as loop:
        frontend, server, found = asyncio.run_coroutine_threadsafe(start(), loop).result(SECONDS)
        try:
            yield found
        finally:
            asyncio.run_coroutine_threadsafe(stop(), loop).result(SECONDS)


def ask(port: int, sent: bytes, answers: int = 1, closes: bool = False, without_body: bool = False) -> Answer:
    """Send bytes, and read so many answers, and whether the connection is closed behind them."""
    statuses, heads, bodies = list[int](), list[dict[str, str]](), list[bytes]()
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection, connection.makefile("rb") as file:
        connection.sendall(sent)
        for _ in range(answers):
            line = file.readline()
            if not line:
                return Answer(statuses, heads, bodies, True)
            statuses.append(int(line.split()[1]))
            head = {}
            while field := file.readline().strip():
                name, _, value = field.decode().partition(": ")
                head[name.lower()] = value
            heads.append(head)
            bodies.append(b"" if without_body else file.read(int(head.get("content-length", 0))))
        connection.settimeout(SECONDS if closes else 0.05)
        try:
            closed = connection.recv(1) == b""
        except ConnectionError:
            closed = True
        except TimeoutError:
            closed = False
    return Answer(statuses, heads, bodies, closed)


def request(line: str, *headers: str, body: str = "") -> str:
    return "\r\n".join([line, *headers, "", body])


GET, HOST = "GET {page} HTTP/1.1", "Host: x"
POST = "POST {ask} HTTP/1.1"
CHUNKED = "Transfer-Encoding: chunked"
OK, BAD, LARGE = ([200], False), ([400], True), ([431], True)
# Name: bytes, with {page} for what is there and {ask} for where a client posts; statuses, and whether the connection is closed.
TABLE: dict[str, tuple[str, tuple[list[int], bool]]] = {
    "a page": (request(GET, HOST), OK),
    "empty lines before it": ("\r\n\r\n" + request(GET, HOST), OK),
    "several pages at once": (request(GET, HOST) * 3, ([200, 200, 200], False)),
    "a client that closes": (request(GET, HOST, "Connection: close"), ([200], True)),
    "HTTP/1.0, without a host": (request("GET {page} HTTP/1.0"), ([200], True)),
    "a URL in absolute form": (request("GET http://elsewhere{page}?x=1 HTTP/1.1", HOST), OK),
    "percent signs": (request("GET {page}%2Fnone%00%ff HTTP/1.1", HOST), ([404], False)),
    "no path that is there": (request("GET /../etc HTTP/1.1", HOST), ([404], False)),
    "a method that is not served": (request("PUT {page} HTTP/1.1", HOST), ([405], False)),
    "any page": (request("OPTIONS * HTTP/1.1", HOST), ([404], False)),
    "an offer of another protocol": (request(GET, HOST, "Upgrade: h2c", "Connection: Upgrade"), ([200], True)),
    "a proxy's method": (request("CONNECT x:80 HTTP/1.1", HOST), BAD),
    "no method that there is": (request("BREW {page} HTTP/1.1", HOST), BAD),
    "a method in small letters": (request("get {page} HTTP/1.1", HOST), BAD),
    "HTTP/2.0": (request("GET {page} HTTP/2.0", HOST), BAD),
    "HTTP/2's preface": ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", BAD),
    "HTTP/0.9": ("GET {page}\r\n\r\n", BAD),
    "TLS": ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", BAD),
    "a path of other bytes": (request("GET {page}\xff HTTP/1.1", HOST), BAD),
    "no host": (request(GET), BAD),
    "two hosts": (request(GET, HOST, HOST), BAD),
    "a folded header": (request(GET, HOST, "X: a", " b"), BAD),
    "a space before a colon": (request(GET, "Host : x"), BAD),
    "a zero in a header": (request(GET, HOST, "X: a\0b"), BAD),
    "lines without a carriage return": ("GET {page} HTTP/1.1\nHost: x\n\n", BAD),
    "a length and chunks": (request(POST, HOST, "Content-Length: 3", CHUNKED, body="0\r\n\r\n"), BAD),
    "two lengths": (request(POST, HOST, "Content-Length: 2", "Content-Length: 3", body="{}"), BAD),
    "a negative length": (request(POST, HOST, "Content-Length: -1"), BAD),
    "a length beyond 64 bits": (request(POST, HOST, f"Content-Length: {'9' * 30}"), BAD),
    "an unknown coding": (request(POST, HOST, "Transfer-Encoding: gzip", body="{}"), BAD),
    "two codings": (request(POST, HOST, "Transfer-Encoding: gzip, chunked", body="0\r\n\r\n"), BAD),
    "chunks twice": (request(POST, HOST, "Transfer-Encoding: chunked, chunked", body="0\r\n\r\n"), BAD),
    "chunks of HTTP/1.0": (request("POST {ask} HTTP/1.0", CHUNKED, body="0\r\n\r\n"), BAD),
    "a page, then no HTTP": (request(GET, HOST) + "nothing\r\n\r\n", ([200], True)),
    "a page, then a faulty body": (request(GET, HOST) + request(POST, HOST, CHUNKED, body="zz\r\n"), ([200], True)),
    "two pages, then a faulty body": (
        request(GET, HOST) * 2 + request(POST, HOST, CHUNKED, body="zz\r\n"),
        ([200, 200], True),
    ),
    "a page, then a long header": (
        request(GET, HOST) + request(GET, HOST, f"X: {'y' * MAX_HEADER_BYTES}"),
        ([200], True),
    ),
    "one long header": (request(GET, HOST, f"X: {'y' * MAX_HEADER_BYTES}"), LARGE),
    "a header without an end": (f"GET {{page}} HTTP/1.1\r\nX: {'y' * (2 * MAX_HEADER_BYTES)}", LARGE),
    "many headers": (request(GET, HOST, *[f"X{number}: y" for number in range(20_000)]), LARGE),
    "a long path": (request(f"GET /{'x' * MAX_HEADER_BYTES} HTTP/1.1", HOST), LARGE),
    "headers of the largest size": (request(GET, HOST, f"X: {'y' * (MAX_HEADER_BYTES - 100)}"), OK),
}


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("name", TABLE)
def test_the_same_bytes_get_the_same_answer(ports: dict[str, int], name: str, port: str) -> None:
    text, (statuses, closed) = TABLE[name]
    sent = text.replace("{page}", PAGE[port]).replace("{ask}", ASK[port]).encode("latin-1")
    found = ask(ports[port], sent, len(statuses), closed)
    assert (found.statuses, found.closed) == (statuses, closed)
    for status, head, body in zip(found.statuses, found.heads, found.bodies, strict=True):
        assert "server" not in head, "name and version of the software are of use to attackers alone"
        assert head["date"].endswith(" GMT")
        if status >= 400:
            assert head["content-type"] == "application/json"
            error = json.loads(body)["error"]
            assert isinstance(error["message"] if port == "openai" else error, str)
    assert found.statuses[-1] != 405 or found.heads[-1]["allow"] == "GET, HEAD"


@pytest.mark.parametrize("port", PORTS)
def test_a_head_has_what_a_page_has_but_for_its_body(ports: dict[str, int], port: str) -> None:
    page = request(GET, HOST).replace("{page}", PAGE[port]).encode()
    own = {"x-request-id", "date"}
    full, head = (ask(ports[port], sent, without_body=True) for sent in (page, page.replace(b"GET", b"HEAD")))
    assert head.statuses == full.statuses == [200]
    assert {name: value for name, value in head.heads[0].items() if name not in own} == {
        name: value for name, value in full.heads[0].items() if name not in own
    }


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_who_waits_with_a_body_until_it_is_wanted_is_told(ports: dict[str, int], port: str, framing: str) -> None:
    length, body = ("Content-Length: 2", b"{}") if framing == "length" else (CHUNKED, b"2\r\n{}\r\n0\r\n\r\n")
    sent = request(POST, HOST, length, "Expect: 100-continue").replace("{ask}", ASK[port]).encode()
    with socket.create_connection(("127.0.0.1", ports[port]), SECONDS) as connection:
        connection.sendall(sent)
        answer = connection.recv(1000)
        if port in ("metrics", "replicas"):
            assert answer.startswith(b"HTTP/1.1 405"), "nobody reads it"
            return
        assert answer == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400"), "it has no fields"


@pytest.mark.parametrize("port", ["http", "openai"])
@pytest.mark.parametrize("bad", [b"zz\r\n", b"-1\r\n", b"f" * 17 + b"\r\n", b"5;x=" + b"a" * 200_000])
def test_a_body_that_is_none_is_refused_once(ports: dict[str, int], port: str, bad: bytes) -> None:
    sent = request(POST, HOST, CHUNKED).replace("{ask}", ASK[port]).encode()
    found = ask(ports[port], sent + b"1\r\n{\r\n" + bad, 2)
    assert (found.statuses, found.closed) == ([431 if len(bad) > MAX_HEADER_BYTES else 400], True)


@pytest.mark.parametrize("port", PORTS)
def test_a_client_that_closes_its_side_is_let_go(ports: dict[str, int], port: str) -> None:
    sent = request(POST, HOST, "Content-Length: 100", body="{").replace("{ask}", ASK[port]).encode()
    with socket.create_connection(("127.0.0.1", ports[port]), SECONDS) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        try:
            assert b"HTTP/1.1 200" not in connection.recv(1000)
            while connection.recv(1000):
                pass
        except ConnectionError:
            pass


def test_nothing_of_it_is_logged(ports: dict[str, int], caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    for text, (statuses, closed) in TABLE.values():
        sent = text.replace("{page}", PAGE["openai"]).replace("{ask}", ASK["openai"]).encode("latin-1")
        ask(ports["openai"], sent[: len(sent) // 2], 0)
        ask(ports["openai"], sent, len(statuses), closed)
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []

"""Fuzzes ports of HTTP: JSON, headers, framing, methods, paths, pipelining; and bytes that are no protocol or break off."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Sequence
from random import Random

from tests.server.fuzz.mutations import (
    ANSWER_SECONDS,
    EXCEPTION,
    SNIPPETS,
    FaultError,
    address,
    drain,
    mutated_bytes,
    mutated_json,
    read_responses,
)

MODELS = ("tensorrt_llm_bls", "tensorrt_llm")
GENERATE = ("generate", "generate_stream", "versions/1/generate", "versions/1/generate_stream")
OTHER_PATHS = (
    *("/v2", "/v2/", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/models/tensorrt_llm", "/metrics"),
    *("/v2/models/tensorrt_llm/config", "/v2/models/tensorrt_llm_bls/stats", "/v2/models/nope", "/v2/repository/index"),
    *("/v2/models/tensorrt_llm/infer", "/v2/models/tensorrt_llm_bls/ready", "/v2/systemsharedmemory/status", "/"),
    *("/v2/trace/setting", "/v2/logging", "//", "/v2/models//generate", "/v2/models/%00/generate", "*", "/../..", "/é"),
)
OPENAI_PATHS = (
    *("/v1", "/v1/", "/v1/models", "/v1/models/model", "/v1/models/nope", "/v1/models/%00", "/health", "/metrics"),
    "/docs",
    *(
        "/openapi.json",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/responses/resp_0",
        "/v1/responses/%00",
        "/v1/messages",
        "/",
        "//",
        "*",
        "/../..",
        "/é",
        "/v1/completions/",
    ),
    "/v1//models",
)
OPENAI_POSTS = {  # what their bodies are; see REQUESTS
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
}
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "post", "BREW", "")
HEADERS = (
    *("Expect: 100-continue", "Expect: nothing", "Transfer-Encoding: gzip", "Transfer-Encoding: chunked, chunked"),
    *("Content-Encoding: gzip", "Content-Length: -1", "Content-Length: 1\r\nContent-Length: 2"),
    "Content-Length: 9" + "9" * 30,
    *("Upgrade: websocket\r\nConnection: Upgrade", "Connection: keep-alive", "Accept: text/event-stream", "Host:"),
    ": x",
    *("X: " + "y" * 20000, "Cookie: " + "a=b; " * 500, "Range: bytes=0-1", "traceparent: 00-zz", "Content-Type: \xff"),
    *("traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "Inference-Header-Content-Length: 7"),
    *("Content-Type: application/octet-stream", "X\0Y: z", " folded: header", "Transfer-Encoding : chunked"),
)


class HttpFuzzer:
    """See fuzz_doors.Fuzzer."""

    others = OTHER_PATHS

    def __init__(self, url: str) -> None:
        self._address, self.last = address(url), b""

    def shoot(self, random: Random) -> str:
        """Send one to four requests on one connection and read the answers."""
        parts = [self._request(random) for _ in range(random.choice((1, 1, 1, 2, 4)))]
        self.last = b"".join(parts)
        if random.random() < 0.1:
            self.last = mutated_bytes(random, self.last)
        try:
            with socket.create_connection(self._address, ANSWER_SECONDS) as connection:
                return self._talk(random, connection, len(parts))
        except ConnectionError:  # closed while we still write: an answer too
            return "closed"

    def _talk(self, random: Random, connection: socket.socket, count: int) -> str:
        connection.sendall(self.last)
        ending = random.random()
        if ending < 0.1:
            return "left"
        connection.settimeout(1.0)
        with contextlib.suppress(FaultError):
            found = read_responses(connection, count)
            if found:
                return _judge(found)
        if ending < 0.8:  # it may be complete and still take its time, or wait for more
            connection.settimeout(ANSWER_SECONDS)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        else:
            return "left waiting"
        rest = drain(connection)
        return "half closed: " + (rest[9:12].decode("latin-1") if rest.startswith(b"HTTP/1.") else "closed")

    def _request(self, random: Random) -> bytes:
        if random.random() < 0.15:
            method, path, body = random.choice(METHODS), random.choice(self.others), b""
        else:
            method, (path, body) = "POST", self._post(random)
        if random.random() < 0.05:
            path = random.choice(
                (path + "?" + "a=b&" * 50, path + "/", path.upper(), path + "%2e%2e", "/" * 3000, path * 3)
            )
        version = "HTTP/1.1" if random.random() < 0.95 else random.choice(("HTTP/1.0", "HTTP/2.0", "HTTP/9", "ICY", ""))
        lines = [f"{method} {path} {version}", "Host: localhost"]
        if random.random() < 0.2:
            lines.append(random.choice(HEADERS))
        body, framing = _framed(random, body)
        head = "\r\n".join([*lines, *framing]).encode("utf-8", "surrogateescape") + b"\r\n\r\n"
        return head + body

    def _post(self, random: Random) -> tuple[str, bytes]:
        """The path and the body of a request to generate."""
        model = random.choice(MODELS)
        body = mutated_json(random, model if random.random() < 0.9 else MODELS[0])
        return f"/v2/models/{model}/{random.choice(GENERATE)}", body


class OpenAIFuzzer(HttpFuzzer):
    """The same for the OpenAI door."""

    others = OPENAI_PATHS

    def _post(self, random: Random) -> tuple[str, bytes]:
        path = random.choice(sorted(OPENAI_POSTS))
        kind = OPENAI_POSTS[path]
        return path, mutated_json(random, kind if random.random() < 0.9 else "chat")


def _framed(random: Random, body: bytes) -> tuple[bytes, list[str]]:
    """A body as it is sent, and the headers that say how; some say it wrongly."""
    match random.randrange(20):
        case 0 | 1 | 2:
            size = random.choice((1, 7, 64, 4096))
            parts = [body[at : at + size] for at in range(0, len(body), size)][:4000]
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
            return chunks + b"0\r\n\r\n", ["Transfer-Encoding: chunked"]
        case 3:
            wrong = random.choice(
                (b"-1\r\nx\r\n", b"ffffffffffffffff\r\n", b"zz\r\n", b"5;ext=" + b"a" * 9000 + b"\r\nhello\r\n")
            )
            return wrong + random.choice(SNIPPETS), ["Transfer-Encoding: chunked"]
        case 4:
            return body, [f"Content-Length: {max(0, len(body) + random.choice((-7, -1, 1, 1000, 2**40)))}"]
        case 5:
            return body, []
        case _:
            return body, [f"Content-Length: {len(body)}"]


def _judge(found: list[tuple[int, bytes]]) -> str:
    for status, body in found:
        text = body.decode("utf-8", "replace")
        if status in (500, 502) or status > 599:
            raise FaultError(f"HTTP status {status}: {text[:500]}")
        if status != 200 and EXCEPTION.search(text):
            raise FaultError(f"the words of an exception reach the client: {text[:500]}")
        if status == 200 and '"error"' in text and EXCEPTION.search(text):
            raise FaultError(f"an exception ended a stream: {text[-500:]}")
    return str(found[0][0])


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
SEEDS = (
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v2/models/tensorrt_llm/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 41\r\n\r\n"
    b'{"input_ids":[5], "request_output_len": 2}',
    b"GET / HTTP/0.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),  # the beginning of TLS
    PREFACE + SETTINGS,
    b"",
)


class RawFuzzer:
    """See fuzz_doors.Fuzzer. Takes all ports in turn."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._addresses, self.last = [address(url) for url in urls], b""

    def shoot(self, random: Random) -> str:
        """Open a connection, send bytes, fast or slowly, close half of it, and wait for the end of the other half."""
        self.last = self._bytes(random)
        target = random.choice(self._addresses)
        with contextlib.suppress(ConnectionError), socket.create_connection(target, ANSWER_SECONDS) as connection:
            return self._talk(random, connection)
        return "reset"

    def _talk(self, random: Random, connection: socket.socket) -> str:
        if random.random() < 0.05:  # slowly
            for at in range(min(len(self.last), 40)):
                connection.sendall(self.last[at : at + 1])
                time.sleep(0.03)
        else:
            connection.sendall(self.last)
        if random.random() < 0.3:
            if random.random() < 0.5:  # with a reset in place of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return "left"
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        got = drain(connection)
        if got.startswith((b"HTTP/1.1 500", b"HTTP/1.0 500")):
            raise FaultError(got[:500].decode("latin-1"))
        return "answered" if got else "closed"

    @staticmethod
    def _bytes(random: Random) -> bytes:
        match random.randrange(4):
            case 0:
                return random.randbytes(random.choice((1, 10, 300, 70000)))
            case 1:
                return PREFACE + SETTINGS + b"".join(_frame(random) for _ in range(random.randint(1, 30)))
            case 2:
                return random.choice(SNIPPETS) * random.choice((1, 3))
            case _:
                return mutated_bytes(random, random.choice(SEEDS))


def _frame(random: Random) -> bytes:
    """An HTTP/2 frame of any type with any payload, its length right or wrong."""
    payload = random.randbytes(random.choice((0, 4, 8, 100, 5000)))
    length = len(payload) if random.random() < 0.9 else random.randrange(2**24)
    kind, flags, stream = random.randrange(12), random.randrange(256), random.choice((0, 1, 2, 3, 2**31 - 1))
    return struct.pack(">I", length)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

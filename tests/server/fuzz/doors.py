"""What all fuzzers share: a fault, an answer's kind, and sockets that are read no longer than they may take."""

from __future__ import annotations

import http.client
import io
import re
import socket
import time
from random import Random
from typing import Protocol

ANSWER_SECONDS = 60.0  # to an answer or the end of the connection; the longest valid request takes a part of it
# What the words of an unexpected exception look like in a message to a client; those that kvseek raises on purpose are not.
OURS = "Request|Capacity|TimeoutExpired|QueueFull|Unavailable"
EXCEPTION = re.compile(rf"Traceback|\b(?!(?:{OURS})Error)[A-Z]\w*(Error|Exception)\b: ")


class FaultError(Exception):
    """A server did what no input may make it do."""


class Fuzzer(Protocol):
    """Sends inputs to one door; one object a thread. `last` has the bytes of the latest input."""

    last: bytes

    def shoot(self, random: Random) -> str:
        """Send one input; returns the kind of answer. Raises FaultError."""
        ...


class _Unclosed(io.BufferedReader):
    """A reader that several responses of one connection are read from."""

    def close(self) -> None:
        """The socket is closed by whoever opened it."""


class _Shared:
    """A socket as http.client wants it."""

    def __init__(self, reader: io.BufferedReader) -> None:
        self._reader = reader

    def makefile(self, _: str) -> io.BufferedReader:
        """The one reader."""
        return self._reader


def read_responses(connection: socket.socket, count: int, method: str = "POST") -> list[tuple[int, bytes]]:
    """Up to `count` HTTP responses, status and body each; fewer if the connection ends before. Raises FaultError."""
    reader, found = _Unclosed(socket.SocketIO(connection, "r")), list[tuple[int, bytes]]()
    try:
        for _ in range(count):
            response = http.client.HTTPResponse(_Shared(reader), method=method)  # type: ignore[arg-type]
            response.begin()
            found.append((response.status, response.read()))
    except TimeoutError:
        if not found:
            raise FaultError(f"no answer for {ANSWER_SECONDS:g} s") from None
    except (OSError, http.client.HTTPException, ValueError):
        pass  # the connection has ended
    return found


def drain(connection: socket.socket, seconds: float = ANSWER_SECONDS) -> bytes:
    """What comes until the connection ends; raises FaultError if it does not end in time."""
    deadline, found = time.monotonic() + seconds, bytearray()
    try:
        while True:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            data = connection.recv(65536)
            if not data:
                return bytes(found)
            found += data[: max(0, 100_000 - len(found))]
    except TimeoutError:
        raise FaultError(f"the connection is open {seconds:g} s after the client's end of it was closed") from None
    except OSError:
        return bytes(found)


def address(url: str) -> tuple[str, int]:
    """host:port in two parts."""
    host, _, port = url.rpartition(":")
    return host, int(port)

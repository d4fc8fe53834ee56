"""Fuzzes ports with bytes that are no protocol, or one that breaks off; with slow and half-closed connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Sequence
from random import Random

from tests.server.fuzz.doors import ANSWER_SECONDS, FaultError, address, drain
from tests.server.fuzz.mutations import SNIPPETS, mutated_bytes

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

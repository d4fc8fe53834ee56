"""Fuzzes the engine process's Unix socket as a door that has gone mad would: it may lose its own connection, nothing else."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from tests.server.fuzz.mutations import STRANGE, FaultError, mutated_bytes

ANSWER_SECONDS = 3.0  # to an answer, and again after half of the connection is closed
REQUEST: dict[str, Any] = {"prompt_ids": [5, 6, 7], "max_tokens": 3, "end_ids": [], "stop_words": [], "priority": 128}
REQUEST |= {"cache_salt": "salt", "session": {"id": "talk", "retention_priority": 50, "retention_seconds": 9.0}}
SAMPLING: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
NUMBERS = (0, 1, 1, 2, -1, 2**31, 2**63 - 1, 2**64 - 1)


class SocketFuzzer:
    """See fuzz_doors.Fuzzer."""

    def __init__(self, path: Path) -> None:
        self._path, self.last = path, b""

    def shoot(self, random: Random) -> str:
        """Send some frames, then a ping, and see whether the engine answers it or closes the connection."""
        self.last = b"".join(self._frame(random) for _ in range(random.choice((1, 1, 2, 5, 40))))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(self._path))
            with contextlib.suppress(ConnectionError):
                connection.sendall(self.last)
                if random.random() < 0.2:
                    return "left"
                connection.sendall(_framed(msgspec.msgpack.encode({"type": "ping", "number": 77})))
                if random.random() < 0.3:
                    connection.shutdown(socket.SHUT_WR)
                return self._read(connection)
        return "closed"

    def _read(self, connection: socket.socket) -> str:
        """Messages up to the pong; a frame that was longer than it said has swallowed the ping, then half is closed."""
        messages, half_closed = 0, False
        while True:
            try:
                (length,) = struct.unpack("<I", _exactly(connection, 4))
                message = msgspec.msgpack.decode(_exactly(connection, length))
            except EOFError:
                return "closed" if not messages else "answers, then closed"
            except TimeoutError:
                if half_closed:
                    raise FaultError("the engine process neither answers nor closes the connection") from None
                connection.shutdown(socket.SHUT_WR)
                half_closed = True
                continue
            messages += 1
            if message.get("type") == "pong" and message.get("number") == 77:
                return "pong"

    def _frame(self, random: Random) -> bytes:
        message = self._message(random)
        body = msgspec.msgpack.encode(message)
        match random.randrange(10):
            case 0 if message["type"] == "refused":  # another code would count as a fault of the server
                return _framed(body)
            case 0:
                return _framed(mutated_bytes(random, body))
            case 1:
                return struct.pack("<I", random.choice((0, len(body) - 1, len(body) + 1, 300 << 20, 2**32 - 1))) + body
            case 2:
                return _framed(random.randbytes(random.choice((0, 1, 50))))
            case 3:
                return random.randbytes(random.choice((1, 3, 4, 100)))
            case _:
                return _framed(body)

    @staticmethod
    def _message(random: Random) -> dict[str, Any]:
        asked = ("submit", "submit", "cancel", "refused", "ping", "read_metrics", "end_session")
        kind = random.choice((*asked, "outputs", "nonsense"))
        message: dict[str, Any] = {"type": kind, "number": random.choice(NUMBERS)}
        if kind == "refused":
            return {"type": kind, "code": random.choice(("invalid", "queue_full"))}  # others count as faults
        if kind == "end_session":
            message |= {"session_id": random.choice(("talk", "", 5)), "cache_salt": random.choice(("salt", None))}
        if kind == "submit":
            request, sampling = dict(REQUEST), dict(SAMPLING)
            for values in random.sample((request, sampling, message), random.choice((0, 1, 1, 2))):
                values[random.choice(sorted(values))] = _packable(random.choice(STRANGE))
            request["sampling"] = sampling
            message = {**message, "request": request, "trace": random.choice(("", "x" * 1000))}
        return message


def _packable(value: Any) -> Any:
    """A strange value as far as MessagePack has it."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, ValueError, UnicodeEncodeError):
        return json.dumps(value)[:50]
    return value


def _framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        data = connection.recv(size - len(found))
        if not data:
            raise EOFError
        found += data
    return bytes(found)

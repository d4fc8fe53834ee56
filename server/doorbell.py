"""Tells one model's process that a response of another's has arrived. No Triton here; Linux only, as Triton is.

Triton 2.51's Python backend can block a process for ever in which threads wait inside response iterators of decoupled
BLS requests: one that wakes up for a response takes the iterator's lock and then waits for Python's; the next
response waits for the iterator's while it has the lock of the table of iterators; and a thread that has Python's lock
and begins another request waits for the table's. So nobody may wait inside an iterator. The sending process rings
when a response has been delivered, and the other asks its iterator for a response only then.

A ring says how many responses have been sent, so a later one makes up for one that comes late; and which process rang,
so that one that has died is not waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

PARAMETER = "doorbell"  # of a request to tensorrt_llm: where to ring when a response to it has been sent
NAME = re.compile("[0-9a-f]{32}")
PREFIX = "\0kvseek-doorbell-"  # unix(7): a name that starts with a zero byte is no file, and ends with its socket
RING_BYTES = 256
RING_SECONDS = 0.1  # that a ring may take while others wait for theirs
CHECK_SECONDS = 5.0
FIRST_SECONDS = 30.0  # until the first ring, which tells who rings: longer than a process is ever held up


class Rings:
    """How many responses to one request have been sent, as far as was rung for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent = 0
        self._process: int | None = None

    def add(self, sent: int, process: int) -> None:
        """Take a ring of a process that has sent `sent` responses."""
        with self._changed:
            self._sent, self._process = max(self._sent, sent), process
            self._changed.notify_all()

    def wait_for(self, sent: int) -> bool:
        """Wait until `sent` responses have been sent; False if the process that sends them has died, or none ever rang."""
        silent = 0.0
        with self._changed:
            while not self._changed.wait_for(lambda: self._sent >= sent, CHECK_SECONDS):
                silent += CHECK_SECONDS
                if silent >= FIRST_SECONDS if self._process is None else not is_running(self._process):
                    return False
        return True


class Doorbell:
    """The receiving end: one for a process, for any number of requests and threads."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self._rings: dict[str, Rings] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(PREFIX + self.name)
        threading.Thread(target=self._listen, name="doorbell", daemon=True).start()

    @contextlib.contextmanager
    def expecting(self, request_id: str) -> Iterator[Rings]:
        """Count the rings for a request, from before it is sent until the block ends."""
        rings = self._rings[request_id] = Rings()
        try:
            yield rings
        finally:
            del self._rings[request_id]

    def _listen(self) -> None:
        while True:
            sent, process, request_id = self._socket.recv(RING_BYTES).decode().split(" ", 2)
            rings = self._rings.get(request_id)
            if rings is not None:  # else its request has just ended
                rings.add(int(sent), int(process))


def is_name(value: object) -> bool:
    """Whether a request's parameter may be the name of a doorbell: clients can send anything."""
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def is_running(process: int) -> bool:
    """Whether a process of this machine runs. One that has ended and that nobody has asked about yet does not."""
    try:
        state = (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        )
    except OSError:
        return False
    return state not in ("Z", "X")  # proc(5)


def paced(responses: Iterable[Any], rings: Rings, is_last: Callable[[Any], bool]) -> Iterator[Any]:
    """Responses of an iterator that has its first one, each of the others asked for when it was rung for.

    If the process that sends them has died, the iterator is asked all the same: it has the error, or the end.
    """
    for number, response in enumerate(responses, start=1):
        last = is_last(response)
        yield response
        if not last:
            rings.wait_for(number + 1)


class Ringer:
    """The sending end."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(RING_SECONDS)

    def ring(self, name: str, request_id: str, sent: int) -> None:
        """Ring the doorbell `name`: `sent` responses to the request have been sent.

        One that is gone needs no ring, as its process has ended. One that is not listened to must not keep others waiting:
        a thread of its own goes on to ring it.
        """
        message = f"{sent} {os.getpid()} {request_id}".encode()
        try:
            self._send(self._socket, message, name)
        except TimeoutError:
            logging.warning("the doorbell of request %s is not listened to; a thread goes on to ring", request_id)
            threading.Thread(target=self._insist, args=(message, name), name="ring", daemon=True).start()

    def _insist(self, message: bytes, name: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            self._send(own, message, name)

    @staticmethod
    def _send(own: socket.socket, message: bytes, name: str) -> None:
        with contextlib.suppress(ConnectionRefusedError):
            own.sendto(message, PREFIX + name)

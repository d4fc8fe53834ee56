"""Tells one model's process that a response of another's has arrived. No Triton here; Linux only, as Triton is.

Triton 2.51's Python backend can block a process for ever in which threads wait inside response iterators of decoupled
BLS requests: one that wakes up for a response takes the iterator's lock and then waits for Python's; the next
response waits for the iterator's while it has the lock of the table of iterators; and a thread that has Python's lock
and begins another request waits for the table's. So nobody may wait inside an iterator. The sending process rings
when a response has been delivered, and the other asks its iterator for a response only then.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PARAMETER = "doorbell"  # of a request to tensorrt_llm: where to ring when a response to it has been sent
NAME = re.compile("[0-9a-f]{32}")
PREFIX = "\0kvseek-doorbell-"  # unix(7): a name that starts with a zero byte is no file, and ends with its socket
ID_BYTES = 256
RING_SECONDS = 1.0
WAIT_SECONDS = 30.0


class Doorbell:
    """The receiving end: one for a process, for any number of requests and threads."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self._arrived: dict[bytes, threading.Semaphore] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(PREFIX + self.name)
        threading.Thread(target=self._listen, name="doorbell", daemon=True).start()

    @contextlib.contextmanager
    def expecting(self, request_id: str) -> Iterator[threading.Semaphore]:
        """Count the rings for a request, from before it is sent until the block ends."""
        key = request_id.encode()
        arrived = self._arrived[key] = threading.Semaphore(0)
        try:
            yield arrived
        finally:
            del self._arrived[key]

    def _listen(self) -> None:
        while True:
            arrived = self._arrived.get(self._socket.recv(ID_BYTES))
            if arrived is not None:  # else its request has just ended
                arrived.release()


def is_name(value: object) -> bool:
    """Whether a request's parameter may be the name of a doorbell: clients can send anything."""
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def paced(responses: Iterable[Any], arrived: threading.Semaphore, is_last: Callable[[Any], bool]) -> Iterator[Any]:
    """Responses of an iterator that has its first one, each of the others asked for when it was rung for.

    An end that nobody rings for, as when the other process dies, is found `WAIT_SECONDS` later: the iterator is asked
    all the same.
    """
    for number, response in enumerate(responses):
        last = is_last(response)
        yield response
        if not last:
            for _ in range(1 if number else 2):  # the first one is rung for too
                arrived.acquire(timeout=WAIT_SECONDS)


class Ringer:
    """The sending end."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(RING_SECONDS)

    def ring(self, name: str, request_id: str) -> None:
        """Ring the doorbell `name` for a request. One that is gone needs none: its process has ended."""
        with contextlib.suppress(ConnectionRefusedError):
            try:
                self._socket.sendto(request_id.encode(), PREFIX + name)
            except TimeoutError:
                logging.exception("the doorbell of request %s is not listened to", request_id)

"""Whether a process still works: it answers at a Unix socket, and whoever looks after it asks there.

An answer is a connection that is taken, told what the process itself misses, and closed. The kernel connects to a process that
is stopped, or whose event loop stands still, but nobody takes the connection then.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

MAX_ANSWER_BYTES = 4096


async def answer_at(path: Path, missing: Callable[[], str] = lambda: "") -> asyncio.Server:
    """Answer from the running event loop until it ends. `missing` names a process that does not answer this one, or nobody."""

    def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(missing().encode())
        writer.close()

    return await asyncio.start_unix_server(take, str(path))


def answer_from_thread(path: Path) -> None:
    """Answer from a thread, in a process without an event loop of its own, until the process ends."""
    path.unlink(missing_ok=True)  # of an earlier process
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def run() -> None:
        while True:
            with contextlib.suppress(OSError):
                listening.accept()[0].close()

    threading.Thread(target=run, name="kvseek-alive", daemon=True).start()


def ask(path: Path, seconds: float) -> str | None:
    """Return whom the process at this socket misses, or an empty text; None: it has not answered within so many seconds."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(seconds)
        try:
            asking.connect(str(path))
            return asking.recv(MAX_ANSWER_BYTES).decode()
        except OSError:  # nobody listens yet, or nobody answers
            return None


def silent_process(path: Path, seconds: float) -> int:
    """Return the id of the process that listens at this socket and does not answer within so many seconds; 0: there is none."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(seconds)
        try:
            asking.connect(str(path))
            pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))  # unix(7)
        except OSError:
            return 0
        try:
            asking.recv(MAX_ANSWER_BYTES)
        except TimeoutError:
            return int(pid)
        except OSError:  # it has just ended
            pass
        return 0

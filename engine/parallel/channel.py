"""The connection of rank 0 and another rank. Between hosts its messages carry a code that only the other end can make.

Whoever is on the way between hosts may read and change what is sent. So each message ends with an HMAC-SHA-256 of its number and
its bytes, under a key of this connection and this direction: what was changed, left out, repeated, sent back or sent on another
connection is refused, and then nothing more is read. Messages are MessagePack, of which nothing runs. They are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
from multiprocessing.connection import Connection

from kvseek.core.errors import KvseekError

CODE_BYTES = 32
MOST_BYTES = 1 << 30  # of a message: two million tokens are 10 MB
NUMBER_BYTES = 8
PROTOCOL = b"kvseek ranks 1"


class TamperedError(KvseekError):
    """A message is not what the other end has sent, or the other end has another key."""


class Seal:
    """The codes of the messages of one connection, as one of its ends makes and checks them.

    Parameters
    ----------
    key : bytes
        What both ends know and nobody else.
    nonces : bytes
        What both ends have drawn for this connection, in the same order on both.
    leads : bool
        Whether this is the end of rank 0.
    """

    def __init__(self, key: bytes, nonces: bytes, leads: bool) -> None:
        own, other = (
            hmac.digest(key, PROTOCOL + (b" from " if from_rank_0 else b" to ") + nonces, hashlib.sha256)
            for from_rank_0 in (leads, not leads)
        )
        self._own, self._other = own, other
        self._sent = self._received = 0
        self._refused = False

    def close(self, message: bytes) -> bytes:
        """Return the next message to be sent, with its code."""
        code = _code(self._own, self._sent, message)
        self._sent += 1
        return message + code

    def open(self, data: bytes) -> bytes:
        """Return the next message that was received, without its code; raises TamperedError, now and for all later ones."""
        message, code = data[:-CODE_BYTES], data[-CODE_BYTES:]
        fits = hmac.compare_digest(code, _code(self._other, self._received, message))
        if self._refused or not fits:
            self._refused = True
            raise TamperedError(
                "a message is not what the other rank has sent, or not its next one: something on the way has changed it, or the "
                "ranks have different keys; give all hosts the same, and a network of their own"
            )
        self._received += 1
        return message


def _code(key: bytes, number: int, message: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(NUMBER_BYTES) + message, hashlib.sha256)


class Channel:
    """One end of a connection of two ranks.

    Parameters
    ----------
    connection : Connection
        Whose messages nothing else reads or sends; others may wait for them.
    seal : Seal or None
        None on one host, where the connection is a pair of sockets that no other process has.
    """

    def __init__(self, connection: Connection, seal: Seal | None = None) -> None:
        self.connection, self._seal = connection, seal
        self.code_bytes = 0 if seal is None else CODE_BYTES
        """Bytes of a message beside its own."""

    def send(self, message: bytes) -> None:
        """Send a message; raises OSError."""
        self.connection.send_bytes(message if self._seal is None else self._seal.close(message))

    def receive(self, most: int = MOST_BYTES) -> bytes:
        """Wait for a message of at most so many bytes; raises EOFError, OSError, TamperedError."""
        data = self.connection.recv_bytes(most + self.code_bytes)
        return data if self._seal is None else self._seal.open(data)

    def poll(self) -> bool:
        """Whether there is a message, or the end of the connection."""
        return self.connection.poll()

    def fileno(self) -> int:
        """Return the file descriptor of the connection."""
        return self.connection.fileno()

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

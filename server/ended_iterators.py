"""Keeps the response iterators of BLS requests until Triton's Python backend has let go of them. No Triton here."""

from __future__ import annotations

import itertools
import threading
from typing import Any


class EndedIterators:
    """Response iterators that have ended, each kept until this process's backend has dropped its own reference.

    The backend (Triton 2.51) has every iterator in a table. A thread of the backend that never takes Python's lock
    removes one that has ended. If the table's reference is the last, that thread frees the arrays of all the
    iterator's responses while other threads run Python; the free lists of Python's allocator break, and the process
    crashes some time later. So the last reference has to be ours.

    When the table's is gone follows from an order: that thread serves one message after the other, first come, first
    served. Both the removal of an iterator, asked for before its last response is handed out, and the question whether
    a response sender is cancelled, which waits for its answer, are such messages. Safe to call from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._kept: dict[int, Any] = {}

    def keep(self, iterator: Any) -> None:
        """Keep an iterator that has given its last response."""
        with self._lock:
            self._kept[next(self._numbers)] = iterator

    def is_cancelled(self, sender: Any) -> bool:
        """Whether the client of `sender`, a response sender of this thread alone, has cancelled its request.

        If not, iterators that were kept before the call are let go. A sender that has answered yes once remembers that
        and sends no message, so yes proves nothing.
        """
        with self._lock:
            earlier = list(self._kept)
        if sender.is_cancelled():
            return True
        with self._lock:
            unused = [self._kept.pop(number, None) for number in earlier]
        del unused  # after the lock: freeing many responses takes a while
        return False

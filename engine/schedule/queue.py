"""Requests that wait for a slot: a bounded queue that any thread may use.

Order. Each request has a fixed key: the second in which it arrived, less LEVEL_SECONDS for each level of its priority.
The smallest key starts first. Requests of one priority are therefore served in the order of their arrival, and a request
is overtaken only by requests that arrive within LEVEL_SECONDS for each level that their priority is above its own: at
most 255 seconds after it. So nobody starves, whatever arrives later, and no key changes while a request waits.

The head of the queue is never passed by: if it does not fit yet, those behind it wait too, so that a large request is
not kept out for ever by small ones.

A request whose guide has not been compiled waits like the others, but has no place in the order until `release` gives it
its place, so that nobody waits for the guide of another.
"""

from __future__ import annotations

import bisect
import heapq
import threading
from collections.abc import Callable

from kvseek.core.errors import ConfigError, QueueFullError

from .sequence import RequestSequence

LEVEL_SECONDS = 1.0  # seconds by which one level of priority puts a request ahead

Key = tuple[float, int]


class RequestQueue:
    """Waiting sequences in the order in which they start. Every method may be called from any thread.

    Parameters
    ----------
    max_size : int, optional
        Most sequences that may wait; None: no bound.

    Raises
    ------
    ConfigError
        If `max_size` is below 1.
    """

    def __init__(self, max_size: int | None = None) -> None:
        if max_size is not None and max_size < 1:
            raise ConfigError(f"max_queue_size = {max_size}: must be >= 1; leave it out for no bound")
        self.max_size = max_size
        self._lock = threading.Lock()
        self._sequences: dict[int, RequestSequence] = {}
        self._order: list[Key] = []  # of the sequences that are ready, ascending
        self._deadlines: list[tuple[float, int]] = []  # a heap; may name sequences that have left
        self._returned: set[int] = set()  # ids of those that have run before

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: RequestSequence) -> bool:
        return sequence.request_id in self._sequences

    def sequences(self) -> list[RequestSequence]:
        """List the sequences that wait, in no order."""
        with self._lock:
            return list(self._sequences.values())

    @property
    def has_ready(self) -> bool:
        """Whether a sequence waits that may start."""
        return bool(self._order)

    def push(self, sequence: RequestSequence, free_slots: int = 0) -> None:
        """Add a sequence; raises QueueFullError if `max_size` sequences wait.

        Every request is in the queue until the next step; as many requests as there are free slots do not count as waiting.
        Slots that no request can get for want of extents are not free (Scheduler.free_slots).
        """
        with self._lock:
            waiting = len(self._sequences) - len(self._returned) - free_slots
            if self.max_size is not None and waiting >= self.max_size:
                raise QueueFullError(
                    f"{waiting} requests wait for a slot: at most max_queue_size = {self.max_size} may; "
                    "send the request again later, or serve with a larger --max_queue_size"
                )
            self._add(sequence)

    def put_back(self, sequence: RequestSequence) -> None:
        """Add a sequence that has been preempted, at its old place: before all that have come later with its priority.

        It does not count against `max_size`.
        """
        with self._lock:
            self._add(sequence)
            self._returned.add(sequence.request_id)

    def release(self, sequence: RequestSequence) -> None:
        """Let a sequence start that was not ready when it was pushed; does nothing if it has left the queue."""
        with self._lock:
            if sequence.request_id in self._sequences:
                bisect.insort(self._order, order(sequence))

    def remove(self, request_id: int) -> RequestSequence | None:
        """Take a sequence out, wherever it stands in the queue; None if it does not wait."""
        with self._lock:
            return self._remove(request_id)

    def pop(self, fits: Callable[[RequestSequence], bool]) -> RequestSequence | None:
        """Take the head out if it fits; None if it does not fit or none is ready. `fits` must not call the queue."""
        with self._lock:
            if not self._order:
                return None
            head = self._sequences[self._order[0][1]]
            return self._remove(head.request_id) if fits(head) else None

    def expired(self, now: float) -> list[RequestSequence]:
        """Take out the sequences whose deadline has passed; `now` in seconds of time.perf_counter."""
        found = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                _, request_id = heapq.heappop(self._deadlines)
                sequence = self._remove(request_id)
                if sequence is not None:
                    found.append(sequence)
        return found

    def next_deadline(self) -> float | None:
        """Return when the next waiting sequence expires, in seconds of time.perf_counter; None if none has a time limit."""
        with self._lock:
            while self._deadlines and self._deadlines[0][1] not in self._sequences:
                heapq.heappop(self._deadlines)
            return self._deadlines[0][0] if self._deadlines else None

    def _add(self, sequence: RequestSequence) -> None:
        self._sequences[sequence.request_id] = sequence
        if sequence.ready:
            bisect.insort(self._order, order(sequence))
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.request_id))

    def _remove(self, request_id: int) -> RequestSequence | None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._returned.discard(request_id)
            place = bisect.bisect_left(self._order, order(sequence))
            if self._order[place : place + 1] == [order(sequence)]:  # else it was not ready
                del self._order[place]
        return sequence


def order(sequence: RequestSequence) -> Key:
    """Return the key of a sequence: what has the smaller one starts first, and is preempted last."""
    ahead = sequence.request.priority * LEVEL_SECONDS
    return sequence.statistics.submitted_at - ahead, sequence.request_id

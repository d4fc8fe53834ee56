"""Who runs: slots, admission by free extents, and whose prefill is next. First come, first served."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

from torch import Tensor

from .cache import Cache
from .metrics import RequestStatistics
from .request import Request
from .sampling import Sampler


@dataclass
class Sequence:
    """A request on its way through the engine."""

    request_id: int
    request: Request
    sampler: Sampler
    statistics: RequestStatistics
    slot: int = -1
    prefill: Generator[float, None, Tensor] | None = None  # None: prefill is over, or not begun
    generated: list[int] = field(default_factory=list)

    @property
    def total_tokens(self) -> int:
        """Tokens that the request can grow to, prompt included."""
        return len(self.request.prompt_ids) + self.request.max_tokens


class Scheduler:
    """Waiting and running sequences. A sequence is admitted when a slot is free and the extents it may ever need are.

    Reserving the worst case at admission means that a running request never has to stop for want of memory.
    """

    def __init__(self, cache: Cache, slots: int) -> None:
        self._cache = cache
        self._free_slots = list(range(slots - 1, -1, -1))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def admit(self) -> Sequence | None:
        """Give the first waiting sequence a slot and its extents, or None if it has to wait.

        If the cache cannot open the slot, what it raises passes through and the sequence is still the first to wait.
        """
        if not self.waiting or not self._free_slots:
            return None
        sequence, slot = self.waiting[0], self._free_slots[-1]
        if self._cache.extents_needed(sequence.total_tokens) > self._cache.extents.free:
            return None
        self._cache.open(slot, sequence.total_tokens)  # first: it may fail
        self.waiting.popleft()
        sequence.slot = self._free_slots.pop()
        sequence.statistics.started_at = time.perf_counter()
        self.running.append(sequence)
        return sequence

    def prefilling(self) -> Sequence | None:
        """The sequence whose prefill goes on next: the one admitted first."""
        return next((s for s in self.running if s.prefill is not None), None)

    def decoding(self) -> list[Sequence]:
        """Sequences that take part in the next decode step."""
        return [s for s in self.running if s.prefill is None]

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._cache.close(sequence.slot)
            self._free_slots.append(sequence.slot)
        else:
            self.waiting.remove(sequence)

    def find(self, request_id: int) -> Sequence | None:
        """The sequence of a request, or None if it has ended."""
        return next((s for s in (*self.running, *self.waiting) if s.request_id == request_id), None)

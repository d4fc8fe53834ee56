"""Decides which requests run: gives out slots, and admits requests by free extents."""

from __future__ import annotations

import time

from kvseek.engine.cache.prefixes.cache import PrefixCache

from .queue import RequestQueue
from .sequence import RequestSequence


class Scheduler:
    """The running sequences. The queue's head is admitted when a slot and all extents that it may ever need can be had.

    These are extents that it shares with others, free ones, and those that are only kept for later requests.

    Reserving the worst case at admission means that a running request never has to stop for want of memory. Everything
    but the queue belongs to the engine's thread; other threads may look at `free_slots` and at the length of `running`.
    """

    def __init__(self, prefixes: PrefixCache, slots: int, queue: RequestQueue) -> None:
        self._prefixes = prefixes
        self._free_slots = list(range(slots - 1, -1, -1))
        self.queue = queue
        self._head_waits = False  # whether the queue's head waits for extents
        self.running: list[RequestSequence] = []

    @property
    def free_slots(self) -> int:
        """Slots that the next step can probably give away: none while the queue's head waits for extents."""
        return 0 if self._head_waits else len(self._free_slots)

    def admit(self) -> RequestSequence | None:
        """Take the head of the queue and give it a slot; None if it has to wait. Call `open` next."""
        if not self._free_slots:
            return None
        head_waits = False

        def fits(head: RequestSequence) -> bool:
            nonlocal head_waits
            head_waits = not self._choose_prefix(head)
            return not head_waits

        sequence = self.queue.pop(fits)
        self._head_waits = head_waits
        if sequence is not None:
            sequence.slot = self._free_slots.pop()
            sequence.statistics.started_at = time.perf_counter()
            self.running.append(sequence)
        return sequence

    def open(self, sequence: RequestSequence) -> None:
        """Give a sequence that was admitted its extents; the cache's errors pass through."""
        self._prefixes.open(sequence.slot, sequence.total_tokens, sequence.prefix)
        sequence.prefix = None  # its extents are the slot's now
        sequence.statistics.extents = self._prefixes.cache.extents_needed(sequence.total_tokens)
        sequence.statistics.prompt_extents = self._prefixes.cache.extents_needed(len(sequence.request.prompt_ids))

    def unread(self) -> list[RequestSequence]:
        """List the sequences whose prompt has not been read to its end, in the order of their admission."""
        return [s for s in self.running if not s.generated]

    def decoding(self) -> list[RequestSequence]:
        """List the sequences that take part in the next decode step."""
        return [s for s in self.running if s.generated]

    def _choose_prefix(self, head: RequestSequence) -> bool:
        """Choose how much of its prompt the head need not read, and return whether it can be admitted with that.

        Where room is short, it gives up extents that it would only copy from. The shared ones cost no room.
        """
        found = None if head.scores is not None else self._prefixes.find(head.packed_prompt, head.request.cache_salt)
        head.prefix = self._prefixes.shorten(found, head.total_tokens)
        return self._prefixes.fits(head.total_tokens, head.prefix)

    def remove(self, sequence: RequestSequence) -> None:
        """Take a running sequence out; `close` follows."""
        self.running.remove(sequence)
        sequence.over = True

    def close(self, sequence: RequestSequence, keep: bool) -> None:
        """Free the slot and extents of a sequence that was taken out; `keep`: as far as its rows are not kept for others."""
        tokens = sequence.cached_tokens() if keep else None
        request = sequence.request
        self._prefixes.close(sequence.slot, tokens, request.cache_salt, request.session)
        if sequence.ends_session and request.session is not None:
            self._prefixes.end_session(request.cache_salt, request.session.id)
        self._free_slots.append(sequence.slot)
        self._head_waits = False  # the next `admit` finds out

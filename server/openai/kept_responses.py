"""Responses that later requests may continue, in memory: bounded in bytes, the least recently used of an owner go first."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from kvseek.core.errors import QueueFullError, shortened
from kvseek.server.http.errors import HttpError
from kvseek.server.requests.keys import Tenant

MOST_BYTES = 256 << 20
LOST = "It was not stored, is deleted, or has made room for others; send"
OWN_BYTES = 4096  # of a response besides its texts, so that there are 65,536 at most


class KeptResponse(NamedTuple):
    """A response: its JSON, and the messages (JSON) that it and its request added to those of the response before."""

    response: bytes
    messages: Sequence[bytes]
    previous: str | None

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return OWN_BYTES + sum(map(sys.getsizeof, (self.response, *self.messages)))


class KeptResponses:
    """See above. Thread-safe. Responses of an API key are there for its requests alone, and make room for each other first.

    A response counts as used when one after it is, and later than that one: so none is lost before those that continue it.
    What streams hold until their end counts, too. Where that alone is too much, the one ends that holds most.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._bytes = most_bytes, Counter[str]()  # of each owner
        self._kept = defaultdict[str, dict[str, KeptResponse]](dict)  # by owner; the least recently used first
        self._unfinished = defaultdict[str, set[Unfinished]](set)  # by owner
        self._lock = threading.Lock()

    def messages(self, response_id: str, tenant: Tenant) -> list[bytes]:
        """Return the messages of the conversation up to a response; raises HttpError if one of its responses is not kept."""
        with self._lock:
            chain = self._use(response_id, tenant.owner)
        if not chain or chain[-1].previous is not None:
            message = (
                f"Previous response with id '{shortened(response_id, 80)}' not found. {LOST} the conversation as input."
            )
            raise HttpError(400, message, "previous_response_not_found", "previous_response_id")
        return [message for kept in reversed(chain) for message in kept.messages]

    def add(
        self, response_id: str, response: bytes, messages: Sequence[bytes], previous: str | None, tenant: Tenant
    ) -> None:
        """Keep a response."""
        kept = KeptResponse(response, messages, previous)
        with self._lock:
            self._kept[tenant.owner][response_id] = kept
            self._bytes[tenant.owner] += kept.bytes
            self._use(response_id, tenant.owner)
            self._make_room()

    def unfinished(self, tenant: Tenant) -> Unfinished:
        """Make what counts the bytes of a stream of an owner."""
        return Unfinished(self, tenant.owner)

    def hold(self, stream: Unfinished, count: int) -> None:
        """Count bytes of a stream; raises QueueFullError if it has to end."""
        with self._lock:
            if not stream.ended:
                self._unfinished[stream.owner].add(stream)
                stream.bytes += count
                self._bytes[stream.owner] += count
                self._make_room()
            if stream.ended:
                raise QueueFullError(
                    f"{stream.bytes:,} bytes of the response are held until it ends, and others need the room: all together must "
                    f"be <= {self._most_bytes:,}; send the request again later, or ask for fewer log probabilities"
                )

    def let_go(self, stream: Unfinished) -> None:
        """Count the bytes of a stream off, which ends."""
        with self._lock:
            self._end(stream)

    def find(self, response_id: str, tenant: Tenant) -> bytes | None:
        """Return the JSON of a response; None if it is not kept."""
        with self._lock:
            chain = self._use(response_id, tenant.owner)
        return chain[0].response if chain else None

    def get(self, response_id: str, tenant: Tenant) -> bytes:
        """Return the JSON of a response; raises HttpError if it is not kept."""
        found = self.find(response_id, tenant)
        if found is None:
            raise _not_found(response_id)
        return found

    def delete(self, response_id: str, tenant: Tenant) -> None:
        """Forget a response, so that none after it can be continued; raises HttpError if it is not kept."""
        with self._lock:
            if response_id not in self._kept.get(tenant.owner, ()):
                raise _not_found(response_id)
            self._drop(response_id, tenant.owner)

    def _use(self, response_id: str, owner: str) -> list[KeptResponse]:
        """Note that a response is used; returns it and those before it, as far as they are kept."""
        own, chain = self._kept.get(owner, {}), list[KeptResponse]()
        each: str | None = response_id
        while each in own:
            own[each] = kept = own.pop(each)
            chain.append(kept)
            each = kept.previous
        return chain

    def _make_room(self) -> None:
        while self._bytes.total() > self._most_bytes:
            owner = max(self._bytes, key=self._bytes.__getitem__)
            if owner in self._kept:
                self._drop(next(iter(self._kept[owner])), owner)
            else:
                self._end(max(self._unfinished[owner], key=lambda stream: stream.bytes))

    def _drop(self, response_id: str, owner: str) -> None:
        self._count_off(owner, self._kept[owner].pop(response_id).bytes)
        if not self._kept[owner]:
            del self._kept[owner]

    def _end(self, stream: Unfinished) -> None:
        if not stream.ended and stream in self._unfinished.get(stream.owner, ()):
            self._unfinished[stream.owner].discard(stream)
            self._count_off(stream.owner, stream.bytes)
            if not self._unfinished[stream.owner]:
                del self._unfinished[stream.owner]
        stream.ended = True

    def _count_off(self, owner: str, count: int) -> None:
        self._bytes[owner] -= count
        if not self._bytes[owner]:
            del self._bytes[owner]


class Unfinished:
    """What the stream of a response holds until it ends."""

    def __init__(self, kept: KeptResponses, owner: str) -> None:
        self._kept, self.owner = kept, owner
        self.bytes, self.ended = 0, False  # which the lock of `kept` guards

    def add(self, count: int) -> None:
        """Count more bytes; raises QueueFullError if there is no room for them."""
        self._kept.hold(self, count)

    def close(self) -> None:
        """Count nothing any more."""
        self._kept.let_go(self)


def _not_found(response_id: str) -> HttpError:
    """The same words for responses of others, so that nobody learns of them."""
    message = f"Response with id '{shortened(response_id, 80)}' not found."
    return HttpError(404, message, "response_not_found", "response_id")

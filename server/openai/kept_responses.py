"""Responses that later requests may continue, in memory: bounded in bytes, the least recently used of an owner go first."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from kvseek.core.errors import shortened
from kvseek.server.http.errors import HttpError
from kvseek.server.requests.keys import Tenant

MOST_BYTES = 256 << 20
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
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._bytes = most_bytes, Counter[str]()  # of each owner
        self._kept = defaultdict[str, dict[str, KeptResponse]](dict)  # by owner; the least recently used first
        self._lock = threading.Lock()

    def messages(self, response_id: str, tenant: Tenant) -> list[bytes]:
        """Return the messages of the conversation up to a response; raises HttpError if one of its responses is not kept."""
        with self._lock:
            chain = self._use(response_id, tenant.owner)
        if not chain or chain[-1].previous is not None:
            message = f"Previous response with id '{shortened(response_id, 80)}' not found."
            remedy = " It was not stored, is deleted, or has made room for others; send the conversation as input."
            raise HttpError(400, message + remedy, "previous_response_not_found", "previous_response_id")
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
            while self._bytes.total() > self._most_bytes:
                owner = max(self._bytes, key=self._bytes.__getitem__)
                self._drop(next(iter(self._kept[owner])), owner)

    def get(self, response_id: str, tenant: Tenant) -> bytes:
        """Return the JSON of a response; raises HttpError if it is not kept."""
        with self._lock:
            chain = self._use(response_id, tenant.owner)
        if not chain:
            raise _not_found(response_id)
        return chain[0].response

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

    def _drop(self, response_id: str, owner: str) -> None:
        self._bytes[owner] -= self._kept[owner].pop(response_id).bytes
        if not self._kept[owner]:
            del self._kept[owner], self._bytes[owner]


def _not_found(response_id: str) -> HttpError:
    """The same words for responses of others, so that nobody learns of them."""
    message = f"Response with id '{shortened(response_id, 80)}' not found."
    return HttpError(404, message, "response_not_found", "response_id")

"""Responses that later requests may continue, in memory: bounded in number and in bytes, the least recently used go first."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvseek.core.errors import shortened
from kvseek.server.http.errors import HttpError
from kvseek.server.requests.keys import Tenant

MOST_RESPONSES = 1 << 16
MOST_BYTES = 256 << 20
OWN_BYTES = 1024  # of a response besides its texts


class KeptResponse(NamedTuple):
    """A response: its JSON, and the messages (JSON) that it and its request added to those of the response before."""

    owner: str
    response: bytes
    messages: Sequence[bytes]
    previous: str | None

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return OWN_BYTES + sum(map(sys.getsizeof, (self.response, *self.messages)))


class KeptResponses:
    """See above. Thread-safe. Responses of an API key are there for its requests alone.

    A response counts as used when one after it is, and later than that one: so none is lost before those that continue it.
    """

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._kept: dict[str, KeptResponse] = {}  # the least recently used first
        self._lock = threading.Lock()

    def messages(self, response_id: str, tenant: Tenant) -> list[bytes]:
        """Return the messages of the conversation up to a response; raises HttpError if one of its responses is not kept."""
        with self._lock:
            chain = self._use(response_id, tenant)
            if chain is None:
                message = f"Previous response with id '{shortened(response_id, 80)}' not found."
                remedy = " It was not stored, is deleted, or has made room for others; send the conversation as input."
                raise HttpError(400, message + remedy, "previous_response_not_found", "previous_response_id")
            return [message for kept in reversed(chain) for message in kept.messages]

    def add(
        self, response_id: str, response: bytes, messages: Sequence[bytes], previous: str | None, tenant: Tenant
    ) -> None:
        """Keep a response."""
        kept = KeptResponse(tenant.owner, response, messages, previous)
        with self._lock:
            self._kept[response_id] = kept
            self._bytes += kept.bytes
            self._use(response_id, tenant)
            while len(self._kept) > self._most or self._bytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def get(self, response_id: str, tenant: Tenant) -> bytes:
        """Return the JSON of a response; raises HttpError if it is not kept."""
        with self._lock:
            self._use(response_id, tenant)
            return self._own(response_id, tenant).response

    def delete(self, response_id: str, tenant: Tenant) -> None:
        """Forget a response, so that none after it can be continued; raises HttpError if it is not kept."""
        with self._lock:
            self._own(response_id, tenant)
            self._drop(response_id)

    def _own(self, response_id: str, tenant: Tenant) -> KeptResponse:
        kept = self._kept.get(response_id)
        if kept is None or kept.owner != tenant.owner:  # the same words, so that nobody learns of those of others
            message = f"Response with id '{shortened(response_id, 80)}' not found."
            raise HttpError(404, message, "response_not_found", "response_id")
        return kept

    def _use(self, response_id: str, tenant: Tenant) -> list[KeptResponse] | None:
        """Note that a response is used; returns it and those before it, or None if one of them is not kept."""
        chain, each = list[KeptResponse](), response_id
        while (kept := self._kept.get(each)) is not None and kept.owner == tenant.owner:
            self._kept[each] = self._kept.pop(each)
            chain.append(kept)
            if kept.previous is None:
                return chain
            each = kept.previous
        return None

    def _drop(self, response_id: str) -> None:
        self._bytes -= self._kept.pop(response_id).bytes

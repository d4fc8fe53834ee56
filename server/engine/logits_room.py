"""Limits the logits that one door's requests may ask for: they are the largest answers by far."""

from __future__ import annotations

from kvseek.core.errors import QueueFullError, RequestError
from kvseek.core.request import Request

LOGIT_BYTES = 4
LARGEST_AT_ONCE = 4  # requests of the largest number of logits for which there is room at a time


class LogitsRoom:
    """Counts the bytes of logits that are on their way to one door.

    Parameters
    ----------
    vocabulary : int
        Logits of one token.
    limit : int
        Most logits that one request may ask for.

    Attributes
    ----------
    bytes : int
        Most bytes of logits that may be on their way at a time.
    """

    def __init__(self, vocabulary: int, limit: int) -> None:
        self._vocabulary, self._limit = vocabulary, limit
        self._held: dict[int, int] = {}  # bytes that a request may still get, by its number
        self.bytes = LARGEST_AT_ONCE * LOGIT_BYTES * limit

    def reserve(self, number: int, request: Request, unread: int) -> None:
        """Reserve room for a request; `unread` are the bytes that the door has not read yet.

        Raises RequestError if the request asks for too many logits, and QueueFullError if there is no room for them now.
        """
        logits = request.logits(self._vocabulary)
        if not logits:
            return
        if logits > self._limit:
            tokens = logits // self._vocabulary
            raise RequestError(
                f"{request.logit_fields}: {tokens:,} tokens × {self._vocabulary:,} logits are asked for: must be <= "
                f"--max_logits = {self._limit:,}; ask for those of fewer tokens, or start the server with a larger --max_logits"
            )
        held = sum(self._held.values()) + unread
        if held + LOGIT_BYTES * logits > self.bytes:
            raise QueueFullError(
                f"{request.logit_fields}: {held:,} bytes are on their way to clients: must be <= {self.bytes:,}, which is "
                f"{LARGEST_AT_ONCE} × {LOGIT_BYTES} × --max_logits, with those of this request; send it again later"
            )
        self._held[number] = LOGIT_BYTES * logits

    def free(self, number: int) -> None:
        """Give back the room of a request that has ended, if it has any."""
        self._held.pop(number, None)

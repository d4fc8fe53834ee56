"""Sessions: conversations whose rows the engine keeps rather than others' while they live (docs/conversations.md)."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RequestError
from .fields import check_types, check_unicode, typed

# The scale and the default are those of TensorRT-LLM's KvCacheRetentionConfig.
MAX_RETENTION_PRIORITY = 100
DEFAULT_RETENTION_PRIORITY = 35  # of what requests without a session leave
SESSION_PRIORITY = 70
SESSION_SECONDS = 3600.0
MAX_RETENTION_SECONDS = 7 * 24 * 3600.0
MAX_SESSION_ID = 256


def check_text(name: str, text: str, most: int) -> None:
    """Raise RequestError unless a client's name for something has 1 to `most` characters that UTF-8 can encode."""
    typed(name, text, str)
    if not 1 <= len(text) <= most:
        raise RequestError(f"{name} has {len(text)} characters: must be 1 to {most}; leave it out for none")
    check_unicode(name, text)


@dataclass(frozen=True)
class Session:
    """The conversation that a request continues, and how its extents are kept once the request has ended.

    Parameters
    ----------
    id : str
        1 to 256 characters. Requests with the same id and the same `cache_salt` are of one session.
    retention_priority : int
        0 to 100: extents of lower priority make room first. What requests without a session leave has 35.
    retention_seconds : float or None
        How long the priority lasts after the session's latest request, at most a week; 35 afterwards. None: as long as the
        session is not forgotten.

    Raises
    ------
    RequestError
        On a value that is out of range.
    """

    id: str
    retention_priority: int = SESSION_PRIORITY
    retention_seconds: float | None = SESSION_SECONDS

    def __post_init__(self) -> None:
        check_text("session_id", self.id, MAX_SESSION_ID)
        check_types(self)
        if not 0 <= self.retention_priority <= MAX_RETENTION_PRIORITY:
            raise RequestError(
                f"retention_priority = {self.retention_priority!r}: must be in [0, {MAX_RETENTION_PRIORITY}]; "
                f"{SESSION_PRIORITY} is a session's default, {DEFAULT_RETENTION_PRIORITY} that of requests without one"
            )
        if self.retention_seconds is not None and not 0 < self.retention_seconds <= MAX_RETENTION_SECONDS:
            raise RequestError(
                f"retention_seconds = {self.retention_seconds!r}: must be > 0 and <= {MAX_RETENTION_SECONDS:.0f} s, a week; "
                f"{SESSION_SECONDS:.0f} is the default"
            )


@dataclass(frozen=True)
class EndedSession:
    """What the end of a session has freed: extents that no other session and no request without a session had used."""

    freed_extents: int
    freed_tokens: int


def read_session(session_id: str | None, priority: int | None, seconds: float | None) -> Session | None:
    """Make the session of a client's fields session_id, retention_priority and retention_seconds; raises RequestError."""
    if session_id is None:
        for name, value in (("retention_priority", priority), ("retention_seconds", seconds)):
            if value is not None:
                raise RequestError(
                    f"{name} = {value!r}: is for requests of a session; send session_id too, or leave it out"
                )
        return None
    own_priority = SESSION_PRIORITY if priority is None else priority
    return Session(session_id, own_priority, SESSION_SECONDS if seconds is None else seconds)

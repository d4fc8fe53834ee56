"""Prefix: the common beginning of many prompts, which an engine reads once and keeps while the object lives."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvseek.core.errors import RequestError
from kvseek.core.request import MAX_RETENTION_PRIORITY, Session
from kvseek.engine.service import EngineService

from .arguments import Message


class Prefix:
    """The beginning of prompts: a text, token ids, or the first messages of conversations. `LLM.prefix` makes one.

    Give it to `generate` or `chat` as `prefix`. What the engine has read of it stays until `close`, the end of the `with`
    statement or the end of the object, before everything of lower priority; it is read again if all memory was needed
    nevertheless.

    Attributes
    ----------
    text : str or None
        The text; None of token ids and of messages.
    token_ids : tuple of int
        Its tokens. Of messages: those with which the model's chat template begins, whatever message follows.
    messages : tuple of messages, or None
        The messages; None of a text and of token ids.
    cache_salt : str or None
        The salt that its requests have.
    session : Session
        The session that its requests are of, unless they have one of their own.
    """

    def __init__(
        self,
        service: EngineService,
        token_ids: Sequence[int],
        text: str | None,
        messages: Sequence[Message] | None,
        cache_salt: str | None,
    ) -> None:
        self.token_ids, self.text = tuple(token_ids), text
        self.messages = None if messages is None else tuple(messages)
        self.cache_salt, self._service = cache_salt, service
        self.session = Session(f"prefix-{uuid.uuid4().hex}", MAX_RETENTION_PRIORITY, retention_seconds=None)
        self._finalizer = weakref.finalize(self, _end, service, self.session.id, cache_salt)
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """Whether nothing more may begin with it."""
        return not self._finalizer.alive

    def check(self, service: EngineService, cache_salt: str | None) -> None:
        """Raise RequestError if it is closed, or if a request that is to begin with it is for another LLM or has another salt."""
        if service is not self._service:
            raise RequestError("prefix: was read by another LLM; make one with this LLM's prefix")
        if self.closed:
            raise RequestError(
                "prefix: is closed; make another one with LLM.prefix, or use it inside its with statement"
            )
        if cache_salt not in (None, self.cache_salt):
            own = f"must be {self.cache_salt!r}, that of prefix"
            raise RequestError(f"cache_salt = {cache_salt!r}: {own}; leave it out, or give it to LLM.prefix")

    def conversation(self, messages: Sequence[Message]) -> list[Message]:
        """Return a conversation that begins with these messages; raises RequestError if it is none of messages."""
        if self.messages is None:
            raise RequestError(
                "prefix: has no messages, as it was made of a text; give it to generate, or make one of messages"
            )
        return [*self.messages, *messages]

    def prompt(self, text: str | None, token_ids: Sequence[int]) -> tuple[str | None, list[int]]:
        """Return a prompt that begins with this text; raises RequestError if it is one of messages."""
        if self.messages is not None:
            raise RequestError("prefix: was made of messages; give it to chat, or make one of a text")
        whole = None if text is None or self.text is None else self.text + text
        return whole, [*self.token_ids, *token_ids]

    def close(self) -> None:
        """Let go of what the engine keeps of it. May be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _end(service: EngineService, session_id: str, cache_salt: str | None) -> None:
    service.call(lambda: service.engine.end_session(session_id, cache_salt))

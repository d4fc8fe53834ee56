"""Runs a door process's requests: reads and tokenises them in threads, submits them, passes answers on, and cancels requests.

Every endpoint uses this module, which knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvseek.core.errors import ErrorCode, KvseekError, code_of, renamed
from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.core.session import EndedSession
from kvseek.server.workers import Workers

from .engine_client import Callback, EngineClient
from .served_request import Chunk, ServedRequest, after
from .unread import UnreadAnswer, UnreadAnswers, logit_bytes, size_of

MAKERS = 2  # threads that tokenise: more would take the engine's cores
GONE_SECONDS = 2.0  # time without an engine process after which open requests cannot end any more
T = TypeVar("T")


class CodedError(KvseekError):
    """An error that ended a request, with its code, at the engine or at a door."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
class Ticket:
    """One request at this door, from when its body is read to its end.

    Attributes
    ----------
    request_id : str
        The client's own id of the request; may be empty.
    owner : str
        Whose requests may stop this one (Tenant.owner); empty: nobody's.
    arrived : float
        Time at which the request's headers had arrived, in seconds of time.monotonic.
    number : int or None
        Number of the request at the engine; None before it is submitted.
    stopped : bool
        Whether another request has asked for the end of this one.
    """

    request_id: str
    arrived: float
    owner: str = ""
    number: int | None = None
    stopped: bool = False


class Generations:
    """Runs the requests of one door process. All methods must be called on the event loop.

    Parameters
    ----------
    client : EngineClient
        A client on the same loop.
    max_making : int
        Most requests that are being tokenised or wait for it; further ones are refused.
    unread : UnreadAnswers
        Counts the answers of these requests, among others.
    """

    def __init__(self, client: EngineClient, max_making: int, unread: UnreadAnswers) -> None:
        self._client, self.unread = client, unread
        self._makers = Workers(MAKERS, "tokenise", max_making)
        # Threads of their own, so that reading and submitting do not wait for texts that are being tokenised.
        self._readers = Workers(1, "read-json", max_making)
        self._senders = ThreadPoolExecutor(1, thread_name_prefix="submit")
        self._tickets: set[Ticket] = set()
        self.open = 0
        """Requests whose callers wait."""

    async def read(self, function: Callable[[], T]) -> T:
        """Call a function of some milliseconds in a worker thread; raises QueueFullError if too many calls wait already."""
        return await self._readers.run(function)

    async def make(self, function: Callable[[], T]) -> T:
        """Call a function that tokenises in a worker thread; raises QueueFullError if too many calls wait already."""
        return await self._makers.run(function)

    @asynccontextmanager
    async def made(self, ticket: Ticket, make: Callable[[], ServedRequest], slow: bool) -> AsyncIterator[ServedRequest]:
        """Make a request by calling `make` in a worker thread; `stop` can end the request until the context ends.

        Parameters
        ----------
        slow : bool
            Whether `make` tokenises.

        Raises
        ------
        QueueFullError
            If too many requests wait to be made already.
        """
        self._tickets.add(ticket)
        try:
            yield await (self._makers if slow else self._readers).run(make)
        finally:
            self._tickets.discard(ticket)

    @asynccontextmanager
    async def generate(
        self, served: ServedRequest, ticket: Ticket, answer: UnreadAnswer, trace: str = ""
    ) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Let the engine serve a request, and give its chunks; if the context ends before the last, the request is cancelled.

        What the engine puts out counts as unread: in a stream until the client has read it and the next output comes, else until
        `answer` ends.

        Entering the context raises UnavailableError if there is no engine, TimeoutExpiredError if the request's time is over, and
        QueueFullError or RequestError if there is no room for the logits that it asks for. Iterating raises CodedError when the
        engine ends the request with an error, and QueueFullError if there is no room for the answer.
        """
        outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        reserved = 0

        def take(output: StepOutput) -> None:
            nonlocal reserved
            arrived = min(reserved, logit_bytes(output))
            reserved -= arrived
            self.unread.release(arrived)
            outputs.put_nowait(output)
            answer.add(size_of(output))

        self.open += 1
        try:
            with self.counting_refusals():
                reserved = self.unread.reserve(served.request)
                request = after(served.request, time.monotonic() - ticket.arrived)
                ticket.number = await self._submit(request, take, trace)
            try:
                if ticket.stopped:  # before the request had a number
                    self._client.cancel(ticket.number)
                async with aclosing(_chunks(served, outputs, answer)) as chunks:
                    yield chunks
            finally:
                self._client.cancel(ticket.number)  # does nothing if the request has ended
        finally:
            self.open -= 1
            self.unread.release(reserved)
            reserved = 0

    def stop(self, request_id: str, owner: str) -> None:
        """End the requests of an owner to which their clients gave this id; an empty id, or owner, matches none."""
        for ticket in self._tickets:
            if request_id and owner and (ticket.request_id, ticket.owner) == (request_id, owner):
                ticket.stopped = True
                if ticket.number is not None:
                    self._client.cancel(ticket.number)

    async def end_session(self, session_id: str, cache_salt: str | None) -> EndedSession | None:
        """See EngineClient."""
        return await self._client.end_session(session_id, cache_salt)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count errors in the context, by which a request ends before it is submitted, in the engine's metrics."""
        try:
            yield
        except KvseekError as error:
            self._client.refused(error.code if isinstance(error, CodedError) else code_of(error))
            raise

    def close(self) -> None:
        """Stop the threads; nothing may be under way."""
        self._makers.close()
        self._readers.close()
        self._senders.shutdown(wait=False, cancel_futures=True)

    async def _submit(self, request: Request, take: Callback, trace: str) -> int:
        """Submit in a thread, because all streams would stand still for the milliseconds that encoding a long prompt takes."""
        future = self._senders.submit(self._client.submit, request, take, trace)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._cancel_submitted)
            raise

    def _cancel_submitted(self, future: Future[int]) -> None:
        """Cancel a request whose client left while it was being submitted."""
        if not future.cancelled() and future.exception() is None:
            self._client.cancel(future.result())


async def wait_for_ends(open_requests: Callable[[], int], client: EngineClient, seconds: float) -> None:
    """Wait until no request is open, at most so many seconds, or until there has been no engine process for GONE_SECONDS."""
    deadline = time.monotonic() + seconds
    gone_since = None
    while open_requests() and time.monotonic() < deadline:
        gone_since = None if client.connected else gone_since or time.monotonic()
        if gone_since is not None and time.monotonic() - gone_since > GONE_SECONDS:
            return
        await asyncio.sleep(0.02)


async def _chunks(
    served: ServedRequest, outputs: asyncio.Queue[StepOutput], answer: UnreadAnswer
) -> AsyncGenerator[Chunk, None]:
    kept, given = (
        0,
        False,
    )  # bytes of outputs that are still in memory, and whether the client has read all that was made of them
    while True:
        output = await outputs.get()
        if given:
            answer.remove(kept)
            kept = 0
        answer.check()
        if output.finish_reason is FinishReason.ERROR:
            raise CodedError(output.code, renamed(output.error, served.names))
        for chunk in served.push(output):
            yield chunk
        kept += size_of(output)
        given = (
            served.streaming and output.token_id is not None
        )  # before the first token, what the prompt has is gathered
        if output.finish_reason is not None or served.ended:
            return

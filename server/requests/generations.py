"""Runs the requests of a process: makes them in threads, submits them, passes answers on, and cancels requests.

Every endpoint uses this module, which knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvseek.core.errors import CodedError, QueueFullError, code_of, renamed
from kvseek.core.request import EndedSession, FinishReason, StepOutput

from .engine_client import EngineClient
from .models import Chunk, ServedRequest
from .unread import UnreadAnswer, UnreadAnswers, logit_bytes, size_of

MAKERS = 2  # threads that tokenise: more would take the engine's cores
GONE_SECONDS = 2.0  # time without an engine process after which open requests cannot end any more
T = TypeVar("T")


@dataclass(eq=False)
class Call:
    """What a client has asked for at once, from when its headers have arrived to its end: one request of the engine, or several.

    Attributes
    ----------
    arrived : float
        Time at which the headers had arrived, in seconds of time.monotonic.
    trace : str
        The client's W3C traceparent, or empty.
    owner : str
        Whose requests may stop this one (Tenant.owner); empty: nobody's.
    request_id : str
        The client's own id; empty if it has none, or until the body is parsed.
    submitted : list of int
        Numbers at the engine of those that have been submitted.
    stopped : bool
        Whether another request has asked for the end of this one.
    """

    arrived: float
    trace: str = ""
    owner: str = ""
    request_id: str = ""
    submitted: list[int] = field(default_factory=list)
    stopped: bool = False


@dataclass(frozen=True)
class Submission:
    """A request that is ready for the engine: its number there, and the message that submits it."""

    served: ServedRequest
    number: int
    data: bytes


class Workers:
    """Threads for work that would hold up the event loop.

    Calls that wait for a thread wait on the loop. So when a client leaves, its call and its data are dropped at once.
    """

    def __init__(self, threads: int, name: str, max_open: int) -> None:
        self._max_open = max_open
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(threads)
        self.open = 0
        """Calls that run or wait."""

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in one of the threads; raises QueueFullError if too many calls run or wait already."""
        if self.open >= self._max_open:
            raise QueueFullError(
                f"{self.open} requests are being tokenised: at most max_queue_size + max_batch_size = {self._max_open} may; "
                "send the request again later"
            )
        self.open += 1
        try:
            await self._free.acquire()
        except BaseException:
            self.open -= 1
            raise
        running = asyncio.get_running_loop().run_in_executor(self._pool, function)
        running.add_done_callback(self._release)
        return await asyncio.shield(running)  # a call whose client leaves has its thread until it ends

    def close(self) -> None:
        """Stop the threads; nothing may be under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _release(self, call: asyncio.Future[T]) -> None:
        if not call.cancelled():
            call.exception()  # asyncio would log it where the client has left and nobody else asks for it
        self.open -= 1
        self._free.release()


class Arrivals:
    """Outputs of the requests of one call that wait for whoever writes its answer; those of one request are taken together.

    They count in `answer` from when they arrive; who takes them counts them off.
    """

    def __init__(self, answer: UnreadAnswer) -> None:
        self.answer, self._loop = answer, asyncio.get_running_loop()
        self._waiting: dict[int, tuple[list[StepOutput], int]] = {}  # by the request's place: outputs, and their bytes
        self._arrived: asyncio.Future[None] | None = None  # what `next` waits for

    def put(self, place: int, outputs: list[StepOutput]) -> None:
        """Add outputs of a request, behind those that wait; the list is taken over."""
        size = size_of(outputs[0]) if len(outputs) == 1 else sum(map(size_of, outputs))
        if (before := self._waiting.get(place)) is None:
            self._waiting[place] = outputs, size
        else:
            before[0].extend(outputs)
            self._waiting[place] = before[0], before[1] + size
        self.answer.add(size)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def next(self) -> tuple[int, list[StepOutput], int]:
        """Wait for outputs; returns a request's place, all of its outputs that wait, and their bytes."""
        if not self._waiting:
            self._arrived = self._loop.create_future()
            await self._arrived
        place = next(iter(self._waiting))
        outputs, size = self._waiting.pop(place)
        return place, outputs, size


class Generations:
    """Runs the requests of one frontend process. All methods must be called on the event loop.

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
        # A thread of its own, so that prompts of token ids do not wait for texts that are being tokenised.
        self._readers = Workers(1, "read-ids", max_making)
        self._calls: set[Call] = set()
        self.open = 0
        """Requests whose callers wait."""

    @property
    def busy(self) -> int:
        """Calls whose requests are being made, and requests whose callers wait."""
        return self._makers.open + self._readers.open + self.open

    async def make(self, make: Callable[[], T], tokenises: bool = True) -> T:
        """Call a function that makes requests from a body in a worker thread; raises QueueFullError if too many wait already."""
        return await (self._makers if tokenises else self._readers).run(make)

    def submission(self, served: ServedRequest, call: Call) -> Submission:
        """Encode a request, in the thread that makes it; raises as EngineClient.encoded."""
        return Submission(served, *self._client.encoded(served.request, call.trace, call.arrived))

    @contextmanager
    def stoppable(self, call: Call) -> Iterator[None]:
        """Let `stop` end a call until the context ends."""
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    @asynccontextmanager
    async def generate(
        self, submissions: Sequence[Submission], call: Call, answer: UnreadAnswer, one_by_one: bool = False
    ) -> AsyncIterator[AsyncIterator[tuple[int, Chunk]]]:
        """Let the engine serve requests of one call, and give their chunks as they come, each with its request's place.

        A chunk is made of all outputs of a request that have come, or `one_by_one`. Requests that have not ended when the context
        ends are cancelled. What the engine puts out, and what the answers hold before, counts as unread: in a stream until the
        client has read what was made of it, else until `answer` ends.

        Entering the context raises UnavailableError if there is no engine, and QueueFullError or RequestError if there is no
        room for prompts that the answers repeat, or for the logits that are asked for. Iterating raises CodedError when the
        engine ends a request with an error, and QueueFullError if there is no room for the answer.
        """
        arrivals, reserved = Arrivals(answer), [0] * len(submissions)

        def take(place: int, outputs: list[StepOutput]) -> None:
            if reserved[place]:
                arrived = min(reserved[place], sum(map(logit_bytes, outputs)))
                reserved[place] -= arrived
                self.unread.release(arrived)
            arrivals.put(place, outputs)

        self.open += len(submissions)
        try:
            with self.counting_refusals():
                answer.add(sum(each.served.held_bytes for each in submissions))
                answer.check()
            for place, submission in enumerate(submissions):
                with self.counting_refusals():
                    reserved[place] = self.unread.reserve(submission.served.request)
                    self._client.start(submission.number, submission.data, partial(take, place))
                call.submitted.append(submission.number)
            if call.stopped:  # before the requests were submitted
                self._cancel(submissions)
            served = [each.served for each in submissions]
            found = _chunks(served, arrivals, lambda place: self._cancel([submissions[place]]), one_by_one)
            async with aclosing(found) as chunks:
                yield chunks
        finally:
            self._cancel(submissions)
            self.open -= len(submissions)
            for place, size in enumerate(reserved):
                self.unread.release(size)
                reserved[place] = 0

    def _cancel(self, submissions: Sequence[Submission]) -> None:
        """End requests, also those that have not been submitted or have ended: then this does nothing."""
        for submission in submissions:
            self._client.cancel(submission.number)

    def stop(self, request_id: str, owner: str) -> None:
        """End the requests of an owner to which their clients gave this id; an empty id, or owner, matches none."""
        for call in self._calls:
            if request_id and owner and (call.request_id, call.owner) == (request_id, owner):
                self.cancel(call)

    def cancel(self, call: Call) -> None:
        """End the requests of a call, also those that will be submitted later."""
        call.stopped = True
        for number in call.submitted:
            self._client.cancel(number)

    async def end_session(self, session_id: str, cache_salt: str | None) -> EndedSession | None:
        """See EngineClient."""
        return await self._client.end_session(session_id, cache_salt)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count errors in the context, by which a request ends before it is submitted, in the engine's metrics."""
        try:
            yield
        except ConnectionError:  # the client has left
            raise
        except Exception as error:
            self._client.refused(code_of(error))
            raise

    def close(self) -> None:
        """Stop the threads; nothing may be under way."""
        self._makers.close()
        self._readers.close()


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
    served: Sequence[ServedRequest], arrivals: Arrivals, cancel: Callable[[int], None], one_by_one: bool
) -> AsyncGenerator[tuple[int, Chunk], None]:
    answer, kept = arrivals.answer, [each.held_bytes for each in served]  # what is still in memory, of each request
    left = set(range(len(served)))
    while left:
        place, outputs, size = await arrivals.next()
        answer.check()
        if place not in left:  # drawn before the cancellation arrived
            answer.remove(size)
            continue
        own, end, given = served[place], outputs[-1], False
        if failed := end.finish_reason is FinishReason.ERROR:
            del outputs[-1]
        if outputs:
            for part in ([output] for output in outputs) if one_by_one else (outputs,):
                for chunk in own.push(part):
                    yield place, chunk
                    chunk = {}  # the next one may be long in coming
            # Before the first token, what the prompt has is gathered.
            given = own.streaming and (
                outputs[-1].token_id is not None or any(output.token_id is not None for output in outputs)
            )
        if failed:
            raise CodedError(end.code, renamed(end.error, own.names))
        kept[place] += size
        if given:  # the client has read what was made of them
            answer.remove(kept[place])
            kept[place] = 0
        if end.finish_reason is not None:
            left.discard(place)
        elif own.ended:  # by a stop text, of which the engine does not know
            left.discard(place)
            cancel(place)
        del outputs, end

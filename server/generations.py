"""Requests of one door process at the engine: made in worker threads, submitted, passed on, and cancelled when nobody waits.

Every endpoint uses this; none of it knows HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TypeVar

from kvseek.engine.errors import ErrorCode, KvseekError, QueueFullError, code_of
from kvseek.engine.request import FinishReason, StepOutput

from .engine_client import EngineClient
from .served_request import Chunk, ServedRequest

WORKERS = 2  # threads that tokenise: more would take the engine's cores
T = TypeVar("T")


class CodedError(KvseekError):
    """What ended a request, with its code: at the engine, or at a door for a reason that is the door's own."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Generations:
    """See above. All methods are called on the event loop.

    Parameters
    ----------
    client : EngineClient
        On the same loop.
    max_making : int
        Requests that may be or wait to be tokenised; further ones are refused.
    """

    def __init__(self, client: EngineClient, max_making: int) -> None:
        self._client, self._loop = client, asyncio.get_running_loop()
        self._makers = ThreadPoolExecutor(WORKERS, thread_name_prefix="make-request")
        self._senders = ThreadPoolExecutor(1, thread_name_prefix="submit")  # not behind those that tokenise
        self._max_making = max_making
        self._making = 0
        self._numbers: dict[int, str] = {}  # number at the engine → the client's id of the request
        self.open = 0
        """Requests whose callers wait."""

    async def make(self, make: Callable[[], T]) -> T:
        """Call `make`, which may tokenise, in a worker thread.

        Raises
        ------
        QueueFullError
            If too many wait already.
        """
        if self._making >= self._max_making:
            raise QueueFullError(
                f"{self._making} requests are being tokenised: at most max_queue_size + max_batch_size = {self._max_making} "
                "may; send the request again later"
            )
        self._making += 1
        future = self._makers.submit(make)
        future.add_done_callback(self._made)
        return await asyncio.wrap_future(future)  # cancelled with its caller, unless it has begun

    @asynccontextmanager
    async def generate(
        self, served: ServedRequest, request_id: str = "", trace: str = ""
    ) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Have the engine serve a request; gives the chunks. The request is cancelled if the context ends before them.

        Entering raises UnavailableError if there is no engine, iterating CodedError when the engine ends the request with
        an error.
        """
        outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self.open += 1
        try:
            number = await self._submit(served, outputs, trace)
            self._numbers[number] = request_id
            try:
                async with aclosing(_chunks(served, outputs)) as chunks:
                    yield chunks
            finally:
                del self._numbers[number]
                self._client.cancel(number)  # nothing happens if it has ended
        finally:
            self.open -= 1

    def stop(self, request_id: str) -> None:
        """End the running requests to which their clients gave this id; an empty one is none."""
        for number, own in self._numbers.items():
            if request_id and own == request_id:
                self._client.cancel(number)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Have errors counted by which a request ends before it is submitted."""
        try:
            yield
        except KvseekError as error:
            self._client.refused(error.code if isinstance(error, CodedError) else code_of(error))
            raise

    def close(self) -> None:
        """Stop the threads; nothing may be under way."""
        self._makers.shutdown(wait=False, cancel_futures=True)
        self._senders.shutdown(wait=False, cancel_futures=True)

    async def _submit(self, served: ServedRequest, outputs: asyncio.Queue[StepOutput], trace: str) -> int:
        """Submit in a thread: a long prompt takes milliseconds to encode, in which all other streams would stand still."""
        future = self._senders.submit(self._client.submit, served.request, outputs.put_nowait, trace)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._cancel_submitted)
            raise

    def _cancel_submitted(self, future: Future[int]) -> None:
        """Cancel a request whose client left while it was being submitted."""
        if not future.cancelled() and future.exception() is None:
            self._client.cancel(future.result())

    def _made(self, _: Future[T]) -> None:
        """From any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._count_made)

    def _count_made(self) -> None:
        self._making -= 1


async def _chunks(served: ServedRequest, outputs: asyncio.Queue[StepOutput]) -> AsyncGenerator[Chunk, None]:
    while True:
        output = await outputs.get()
        if output.finish_reason is FinishReason.ERROR:
            raise CodedError(output.code, output.error)
        for chunk in served.push(output):
            yield chunk
        if output.finish_reason is not None or served.ended:
            return

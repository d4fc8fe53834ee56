"""What clients have not read yet of their answers: how many bytes all requests of a process may hold, and for how long.

A client that asks and does not read costs the memory of its answer, whatever else is limited. So every answer is counted from
the moment a part of it arrives at the frontend until that part has been handed to the system or, over gRPC, to the client. When
there is no room for more, the answer ends that costs most: by its bytes, times the seconds for which its client has left a write
waiting. So clients that read, and those whose answers are small, are not harmed by those that do not read.

Logits are the largest answers by far. Room for them is reserved before their request is submitted, so that none are computed for
which there is no room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from kvseek.core.errors import QueueFullError, RequestError
from kvseek.core.request import Request, StepOutput

WRITE_SECONDS = 60.0  # time for which a client may leave an answer unread before it counts as gone,
WRITE_BYTES_PER_SECOND = 1 << 20  # and the rate at which it has to read a large one besides
PIECE_BYTES = 512  # what an output or a message takes in memory besides its contents
LEAST_WAIT = 0.01  # seconds for which an answer counts whose client has left nothing waiting
ROWS_IN_MEMORY = 3  # an output's selected rows are there twice, as numbers and as JSON, which is as long again
LOGPROB_BYTES = 120  # what a token's log probability takes
LOGIT_BYTES = 4
LARGEST_AT_ONCE = 4  # requests of the largest number of logits for which there is room at a time
OTHER_UNREAD_BYTES = 64 << 20  # of answers, logits apart


class UnreadError(ConnectionError):
    """A client has left its answer unread for too long, or for as long as there was room for it."""


class UnreadAnswers:
    """All answers of a process that clients have not read. To be used on the event loop alone.

    Parameters
    ----------
    limit : int
        Most bytes that they may have.
    seconds : float
        Time in which a client must read what is written to it; a second more for each WRITE_BYTES_PER_SECOND.
    max_logits : int
        Most logits that one request may ask for.
    vocabulary : int
        Logits of one token.

    Attributes
    ----------
    bytes : int
        Bytes that they have now.
    reserved : int
        Bytes of logits that have not arrived yet.
    """

    def __init__(self, limit: int, seconds: float = WRITE_SECONDS, max_logits: int = 0, vocabulary: int = 1) -> None:
        self.limit, self.seconds, self.bytes, self.reserved = limit, seconds, 0, 0
        self._max_logits, self._vocabulary = max_logits, vocabulary
        self._answers: set[UnreadAnswer] = set()

    @contextmanager
    def answer(self) -> Iterator[UnreadAnswer]:
        """Count one answer until the context ends."""
        answer = UnreadAnswer(self)
        self._answers.add(answer)
        try:
            yield answer
        finally:
            answer.close()
            self._answers.discard(answer)

    def reserve(self, request: Request) -> int:
        """Reserve room for the logits of a request; returns their bytes, which `release` gives back.

        Raises RequestError if the request asks for too many logits, and QueueFullError if there is no room for them now.
        """
        logits = request.logits(self._vocabulary)
        if logits > self._max_logits:
            raise RequestError(
                f"{request.logit_fields}: {logits // self._vocabulary:,} tokens × {self._vocabulary:,} logits are asked for: "
                f"must be <= --max_logits = {self._max_logits:,}; ask for those of fewer tokens, or start the server with a "
                "larger --max_logits"
            )
        held, size = self.bytes + self.reserved, LOGIT_BYTES * logits
        if size and held + size > self.limit:
            raise QueueFullError(
                f"{request.logit_fields}: {held:,} bytes are on their way to clients: must be <= {self.limit:,} with the "
                f"{size:,} of this request; send it again later"
            )
        self.reserved += size
        return size

    def release(self, size: int) -> None:
        """Give back reserved bytes that have arrived, or will not."""
        self.reserved -= size

    def make_room(self) -> None:
        """End answers until the rest is within the limit."""
        while self.bytes > self.limit:
            max(self._answers, key=lambda answer: answer.cost).drop()


class UnreadAnswer:
    """One answer.

    Attributes
    ----------
    bytes : int
        Bytes of it that are counted.
    """

    def __init__(self, answers: UnreadAnswers) -> None:
        self._answers, self.bytes = answers, 0
        self._failure = ""  # why it has ended; then nothing counts any more
        self._deadline: asyncio.Timeout | None = None  # of the write that waits, which began at `_since`
        self._since = 0.0

    def check(self) -> None:
        """Raise QueueFullError if the answer has ended for want of room; to be called before more of it is awaited."""
        if self._failure:  # a new error each time: one that is kept would keep the frames that it has passed
            raise QueueFullError(self._failure)

    @property
    def cost(self) -> float:
        """Bytes times seconds for which the present write has waited."""
        waited = 0.0 if self._deadline is None else asyncio.get_running_loop().time() - self._since
        return self.bytes * (LEAST_WAIT + waited)

    def progress(self) -> None:
        """Note that the client has taken a part of what is being written."""
        self._since = asyncio.get_running_loop().time()

    def add(self, size: int) -> None:
        """Count bytes that have arrived; may end this answer, or others."""
        if not self._failure:
            self.bytes += size
            self._answers.bytes += size
            if self._answers.bytes > self._answers.limit:
                self._answers.make_room()

    def remove(self, size: int) -> None:
        """Count bytes off that are gone."""
        if not self._failure:
            self.bytes -= size
            self._answers.bytes -= size

    async def deliver(self, size: int, write: Callable[[], Awaitable[object]]) -> None:
        """Await `write()`, which hands `size` bytes to the client; with 0 bytes, such as an error's, there is always room.

        Raises
        ------
        UnreadError
            If the client does not take them in time, or others need the room meanwhile; its connection has to be closed.
        QueueFullError
            If there is no room. Nothing has been written.
        """
        self.add(size)
        if size:
            self.check()
        limit = self._answers.seconds + size / WRITE_BYTES_PER_SECOND
        self.progress()
        late = False
        try:
            async with asyncio.timeout(limit) as self._deadline:
                await write()
        except TimeoutError:
            late = True
        finally:
            self._deadline = None
            self.remove(size)
        if late:  # not above, where the error would keep the frames of the write, and what they hold
            raise UnreadError(f"a client has left {size:,} bytes unread")

    def drop(self) -> None:
        """End the answer for want of room."""
        held, self.bytes = self.bytes, 0
        self._failure = (
            f"answers that clients have not read have {self._answers.bytes:,} bytes: must be <= {self._answers.limit:,}; read "
            f"answers as they come, or ask for fewer logits, log probabilities or choices (this answer has {held:,} bytes)"
        )
        self._answers.bytes -= held
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(0.0)

    def close(self) -> None:
        """End the answer; what still arrives for it, until the engine knows, does not count."""
        self.remove(self.bytes)
        self._failure = self._failure or "the answer has ended"


def size_of(output: StepOutput) -> int:
    """Estimate the bytes of memory that an output takes until it is written."""
    plain = output.logprobs is None and output.selected_rows is None and not output.prompt_logprobs
    if plain and not (output.context_logits or output.generation_logits):  # as of most tokens
        return PIECE_BYTES
    rows = 0 if output.selected_rows is None else ROWS_IN_MEMORY * output.selected_rows.size
    tokens = output.prompt_logprobs if output.logprobs is None else (*output.prompt_logprobs, output.logprobs)
    logprobs = sum(1 + len(each.top) for each in tokens)
    return PIECE_BYTES + LOGPROB_BYTES * logprobs + logit_bytes(output) + rows


def logit_bytes(output: StepOutput) -> int:
    """Count the bytes of an output's logits."""
    return len(output.context_logits) + len(output.generation_logits)

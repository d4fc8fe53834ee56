"""Threads for work that would hold up a door's event loop: tokenising."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvseek.core.errors import QueueFullError

T = TypeVar("T")


class Workers:
    """Threads for work that would hold up the event loop.

    Calls that wait for a thread wait on the loop. So when a client leaves, its call and its data are dropped at once.
    """

    def __init__(self, threads: int, name: str, max_open: int) -> None:
        self._loop, self._max_open = asyncio.get_running_loop(), max_open
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
        future = self._pool.submit(function)
        future.add_done_callback(self._done)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Stop the threads; nothing may be under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, _: Future[T]) -> None:
        """Take note that a call has ended; runs in any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        self.open -= 1
        self._free.release()

"""Threads that notice when another rank of an engine has ended or hangs.

While an engine is loaded, a Watch on rank 0 looks at the connections of the other ranks and at what they report (reports.py);
what rank 0 does meanwhile asks it for `failure`. In the process of another rank `end_with_rank_0` ends the process.

Later it is needed on GPUs. A kernel that sums waits for the other ranks' GPUs, for as long as it takes, and the host waits for
that kernel. So a rank that dies would leave the others waiting for ever, and no thread that computes could notice. The Watch
lets rank 0's kernels end with wrong sums, and the call that waited for them fails with the name of the rank; those of another
rank end with its process.

Kernels of symmetric memory are released by copies to the GPU. The driver keeps such a copy waiting while another thread waits
inside it, for a copy to pageable memory, for room for one more launch, or for a kernel to be loaded; and that thread may wait for
the kernel that is to be released. Rank 0 avoids the first two (`wait_for_stream` and `BoundedLaunches` of core/streams.py). Where
it still happens, nothing in this process can end the wait, so the Watch ends the process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping

from .channel import Channel
from .reports import Reports, named

PERIOD_SECONDS = 0.2  # between two looks at the other ranks
RELEASE_SECONDS = 0.001  # between two attempts to free kernels: each lets them pass one of their waits
RELEASED_SECONDS = 10.0  # after which what waits on rank 0 should have been released, or the process ends
GRACE_SECONDS = 3.0  # that the process of a rank has to end by itself once rank 0 has closed its connection
HEADER = struct.Struct("!i")  # of a message of multiprocessing.connection: its length
logger = logging.getLogger(__name__)


class Watch:
    """Watches the other ranks for rank 0, in a thread, from now until `close`.

    Parameters
    ----------
    channels : mapping of int to Channel
        By rank. They are looked at, and nothing is read.
    release : callable
        Lets kernels that wait for other ranks pass one wait; called repeatedly once a rank has failed.
    timeout_seconds : float
        After so long a call of `begin` without `end` means that a rank hangs; the reports tell which one.
    reports : Reports
        What the ranks report. While they load, one that does not get on has failed as well.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        release: Callable[[], None],
        timeout_seconds: float,
        reports: Reports,
    ) -> None:
        self._channels, self._release, self._timeout = channels, release, timeout_seconds
        self._reports, self._loading = reports, True
        self._since: float | None = None  # when `begin` was called, until `end`
        self._failure = ""
        self._freeing, self._closed = threading.Event(), threading.Event()
        self._limit = threading.Thread(target=self._end_unless_released, name="kvseek-release", daemon=True)
        self._thread = threading.Thread(target=self._run, name="kvseek-watch", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why kernels have been released, so that what they computed is wrong; empty as long as all is well."""
        return self._failure

    def begin(self) -> None:
        """Note that this rank begins something that waits for the others."""
        self._since = time.monotonic()

    def end(self) -> None:
        """Note that it has ended."""
        self._since = None

    def loaded(self) -> None:
        """Note that all ranks have been loaded."""
        self._loading = False

    def free(self) -> None:
        """Release kernels from now on, as the other ranks are about to end."""
        self._freeing.set()

    def close(self) -> None:
        """End the thread. Kernels that wait for other ranks must have ended. May be called twice."""
        self._closed.set()
        self._thread.join()
        if self._limit.ident is not None:
            self._limit.join()

    def _run(self) -> None:
        while not self._freeing.wait(PERIOD_SECONDS) and not self._closed.is_set():
            try:
                failure = self._find_failure()
            except Exception as error:  # rank 0 must not wait for ranks that nobody watches
                logger.exception("the other ranks cannot be watched")
                failure = f"rank 0: cannot watch the others: {type(error).__name__}: {error}"
            if failure and not self._freeing.is_set():  # else the connections were closed on purpose meanwhile
                self._failure = failure
                logger.error("%s: what waits for it on rank 0 is released", failure)
                break
        self._limit.start()
        while not self._closed.wait(RELEASE_SECONDS):
            try:
                self._release()
            except RuntimeError:  # of CUDA: after a fault of a kernel nothing runs on this GPU any more, nor waits
                logger.exception("kernels cannot be released")
                return

    def _end_unless_released(self) -> None:
        """End this process if what waits for other ranks does not end; in a thread of its own, as `_release` may wait as well."""
        begun = time.monotonic()
        while not self._closed.wait(PERIOD_SECONDS):
            if self._since is None:
                begun = time.monotonic()  # nothing waits; after a failure until the engine is closed, whenever that is
            elif time.monotonic() - begun > RELEASED_SECONDS:
                reason = self._failure or "the engine is being closed"
                logger.critical(
                    "%s, and what waits for it on rank 0 could not be released within %g s: this process ends",
                    reason,
                    RELEASED_SECONDS,
                )
                faulthandler.dump_traceback(sys.__stderr__ or 2)
                os._exit(1)

    def _find_failure(self) -> str:
        for rank, channel in self._channels.items():
            if has_failed(channel):
                return f"rank {rank}: it has ended or failed"
        if self._loading:
            self._reports.look()
            return self._reports.loading_fault()
        since = self._since
        if since is not None and time.monotonic() - since > self._timeout:
            found = unanswered(self._reports, self._channels, self._timeout)
            return found if self._since == since else ""  # that took seconds, in which the call may have ended
        return ""


def unanswered(reports: Reports, ranks: Collection[int], seconds: float) -> str:
    """Say which of the ranks did not answer for so long, and what they were doing; all of them, if none is behind the others."""
    missing = [rank for rank in reports.missing() if rank in ranks]
    if not missing:
        return f"{named(ranks)}: no answer within {seconds:.0f} s, and none is behind the others"
    doing = "; ".join(reports.doing(rank) for rank in missing)
    return f"{named(missing)}: no answer within {seconds:.0f} s ({doing})"


def has_failed(channel: Channel) -> bool:
    """Whether the other end of a connection is closed, or has told of an error; nothing is read."""
    try:
        with socket.socket(fileno=os.dup(channel.fileno())) as peer:
            seen = peer.recv(HEADER.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return seen != HEADER.pack(channel.code_bytes)  # of READY of follower.py, which is empty; no header: closed


def end_with_rank_0(channel: Channel) -> None:
    """End this process soon after rank 0 has closed its end of the connection, even if a kernel keeps the main thread waiting."""
    threading.Thread(target=_end_after, args=(channel.fileno(),), name="kvseek-watch", daemon=True).start()


def _end_after(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    time.sleep(GRACE_SECONDS)
    logger.error(
        "rank 0 has closed its connection, and this process did not end within %g s: it is ended", GRACE_SECONDS
    )
    os._exit(1)

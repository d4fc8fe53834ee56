"""What each rank says of itself: what it is doing, how far it has come, and that it is there.

That a rank has died is told by its connection, which closes with its process. A rank that hangs keeps its connection. So a
thread of each rank writes a Report into the store by which the ranks have found each other, and rank 0 reads them:

- a rank whose `beat` no longer changes does not answer: its process is stopped, or its host is;
- a rank whose `beat` changes, but neither `doing` nor `steps`, gets on with nothing, for as long as `within` allows.

Loading takes minutes where there is much to read, so the first says nothing of the second.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

BEAT_SECONDS = 0.5  # between two reports of a rank
SILENT_SECONDS = 4.0  # without a new report, after which a rank does not answer; a busy machine may delay a few
STALL_SECONDS = 600.0  # that a rank may take for one piece of work: most are a tensor or a graph
SETTLE_SECONDS = 10.0  # that other ranks may take for what one could not do: they fail as well, or wait for it
LOOK_SECONDS = 0.02  # between two looks at a call that is made apart
Result = TypeVar("Result")


@dataclass(frozen=True)
class Report:
    """The state of a rank.

    Attributes
    ----------
    doing : str
        Its present work, as "reads weights: layers.3.qkv.weight".
    waits : bool
        It waits for other ranks, and need not get on unless all do so.
    failure : str
        What it could not do, if others may be waiting for it there.
    within : float
        Seconds that the present work may take.
    steps : int
        Commands and sums that it has begun. All ranks begin the same, so one that hangs has begun fewer.
    beat : int
        Number of this report.
    """

    doing: str = "starts"
    waits: bool = False
    failure: str = ""
    within: float = STALL_SECONDS
    steps: int = 0
    beat: int = 0


def _nothing() -> None:
    """Check nothing."""


class Reporter:
    """Takes what a rank's own thread says of itself, and publishes it from another one once `publish` is called.

    Parameters
    ----------
    stall_seconds : float
        That a piece of work may take.
    check : callable
        Called whenever the rank begins a piece of work, and while it waits in `apart`; on rank 0 it raises RankError if
        another rank has failed.
    """

    def __init__(self, stall_seconds: float = STALL_SECONDS, check: Callable[[], None] = _nothing) -> None:
        self._stall_seconds = stall_seconds
        self._check, self._report, self._steps, self._begun = check, Report(), 0, time.monotonic()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._apart: threading.Thread | None = None

    @property
    def report(self) -> Report:
        """The present state."""
        return dataclasses.replace(self._report, steps=self._steps)

    def doing(self, what: str, more: float = 0.0) -> None:
        """Begin a piece of work, which may take `more` seconds than others."""
        self._check()
        self._report = Report(what, within=self._stall_seconds + more)

    def waiting(self, what: str) -> None:
        """Begin to wait for other ranks."""
        self._check()
        self._report = Report(what, waits=True, within=self._stall_seconds)

    def failed(self, failure: str) -> None:
        """Tell what could not be done, until the next work or wait: rank 0 ends the engine if others wait for it there."""
        self._report = Report("waits", waits=True, failure=failure, within=self._stall_seconds)

    def step(self) -> None:
        """Count a command or a sum, which is about to begin."""
        self._steps += 1
        self._begun = time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the last command or sum has begun."""
        return time.monotonic() - self._begun

    def apart(self, call: Callable[[], Result]) -> Result:
        """Make a call that may wait for other ranks where nothing can interrupt it, in a thread that is left there if need be.

        Raises what the call raises, or RankError of `check`: the thread then ends by itself, or with the process.
        """
        done, results, errors = threading.Event(), list[Result](), list[BaseException]()

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)
            done.set()

        self._apart = threading.Thread(target=run, name="kvseek-wait", daemon=True)
        self._apart.start()
        while not done.wait(LOOK_SECONDS):
            self._check()
        if errors:
            raise errors[0]
        return results[0]

    def has_ended_apart(self, seconds: float) -> bool:
        """Wait up to `seconds` for the thread that `apart` may have left; returns whether none is there any more."""
        if self._apart is not None:
            self._apart.join(seconds)
        return self._apart is None or not self._apart.is_alive()

    def publish(self, store: TCPStore, rank: int) -> None:
        """Write reports into a store, whose connection nothing else uses, until `close`; the first is there on return."""
        beat = 0

        def write() -> None:
            nonlocal beat
            beat += 1
            store.set(_key(rank), msgspec.json.encode(dataclasses.replace(self.report, beat=beat)).decode())

        def run() -> None:
            while not self._closed.wait(BEAT_SECONDS):
                try:
                    write()
                except RuntimeError:  # rank 0 has ended, which the connection tells as well
                    return

        write()
        self._thread = threading.Thread(target=run, name="kvseek-report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish no more. May be called twice."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()


class Reports:
    """What rank 0 knows of the other ranks, and how long it has known it. Several threads may use it.

    Parameters
    ----------
    store : TCPStore
        Whose connection nothing else uses.
    own : Reporter
        Rank 0's.
    ranks : collection of int
        The others.
    """

    def __init__(self, store: TCPStore, own: Reporter, ranks: Collection[int]) -> None:
        now = time.monotonic()
        self._store, self._own, self._lock = store, own, threading.Lock()
        self._known: dict[int, Report] = {}
        self._heard, self._moved, self._failed = (dict.fromkeys((0, *ranks), now) for _ in range(3))

    def look(self) -> None:
        """Read all reports."""
        with self._lock:
            now = time.monotonic()
            for rank in self._heard:
                if rank == 0:
                    report = self._own.report
                elif self._store.check([_key(rank)]):
                    report = msgspec.json.decode(self._store.get(_key(rank)), type=Report)
                else:
                    continue
                known = self._known.get(rank, Report(beat=-1))
                if known.beat != report.beat:
                    self._heard[rank] = now
                if dataclasses.replace(known, beat=report.beat) != report:
                    self._moved[rank] = now
                if not report.failure or known.failure != report.failure:
                    self._failed[rank] = now
                self._known[rank] = report

    @property
    def absent(self) -> list[int]:
        """Ranks that have never reported."""
        with self._lock:
            return [rank for rank in self._heard if rank and rank not in self._known]

    def loading_fault(self) -> str:
        """Say which rank keeps the others from being loaded, and by what; empty if all is well so far."""
        with self._lock:
            return self._loading_fault()

    def _loading_fault(self) -> str:
        now, known = time.monotonic(), self._known
        failed = [rank for rank, one in known.items() if one.failure and now - self._failed[rank] > SETTLE_SECONDS]
        if failed:
            what = "; ".join(f"rank {rank}: {known[rank].failure}" for rank in failed)
            return f"{what}; others wait for it there"
        stalled = [rank for rank, one in known.items() if now - self._moved[rank] > one.within]
        hung = [rank for rank in stalled if rank and not known[rank].waits]
        if hung:
            return "; ".join(
                f"rank {rank}: no progress within {known[rank].within:.0f} s ({self.doing(rank)})" for rank in hung
            )
        if len(stalled) == len(self._heard):
            if not known[0].waits:  # while others wait for rank 0 it may take its time, unless it gets on with nothing
                return f"rank 0: no progress within {known[0].within:.0f} s ({known[0].doing})"
            return f"{named(stalled)}: each waits for the others, since {known[0].within:.0f} s"
        return ""

    def missing(self) -> list[int]:
        """Find the ranks for which the others wait: those that do not answer, else those that have begun fewer steps.

        It looks for SILENT_SECONDS, so that each rank that is there reports meanwhile.
        """
        self.look()
        begun = time.monotonic()
        while time.monotonic() - begun < SILENT_SECONDS:
            time.sleep(BEAT_SECONDS / 2)
            self.look()
        with self._lock:
            silent = [rank for rank, heard in self._heard.items() if rank and heard <= begun]
            most = max(one.steps for one in self._known.values())
            return silent or [rank for rank, one in self._known.items() if rank and one.steps < most]

    def doing(self, rank: int) -> str:
        """Say what a rank has last told of itself, and whether it still tells anything."""
        said = self._known[rank].doing if rank in self._known else "has not reported yet"
        since = time.monotonic() - self._heard[rank]
        return said if since < SILENT_SECONDS else f"silent for {since:.0f} s, after: {said}"


def named(ranks: Iterable[int]) -> str:
    """Name ranks in a message: "rank 1", "ranks 1 and 3"."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _key(rank: int) -> str:
    return f"kvseek/rank{rank}"

"""Keeps the processes of a server running: starts them, starts those again that die or hang, and ends all in order."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvseek.core.errors import KvseekError, text_of

from .errors import ServerError
from .processes import Child, Guard, Program

POLL_SECONDS = 0.05
FIND_SECONDS = 0.5  # time between two looks for a process's workers
FIRST_DELAY_SECONDS = 0.25  # before the first restart; doubled with each further one in a row
LONGEST_DELAY_SECONDS = 30.0
STEADY_SECONDS = 120.0  # time after which a process that stays up begins a new row of restarts
LOOK_AT_LOG_SECONDS = 10.0
MAX_LOG_BYTES = (
    64 << 20
)  # most bytes of a process's log that nobody has asked for; at this size it is cut, and begins anew
logger = logging.getLogger(__name__)


class Watched:
    """One program with its process, and the number of its restarts."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.child: Child | None = None
        self.restarts = 0  # since the server was started
        self.in_a_row = 0
        self.up_at = math.inf  # when it had finished starting
        self.start_at = 0.0  # when to start it, if there is no child
        self.look_at = 0.0  # when to look for its workers


class Supervisor:
    """Runs programs from a thread of its own until `stop`.

    Until `wait_until` has returned, a program that ends is a failed start; after it, it is started again, up to `restarts` times
    in a row. So is one that does not answer, which is killed first.

    Parameters
    ----------
    programs : sequence of Program
        In the order in which they are started, and asked to end.
    hang_seconds : float
        After so long without an answer a process counts as hung.
    output : Path or None
        File for the output of all; a folder: each has a file there, which is cut when it has MAX_LOG_BYTES; None: this
        process's own.
    state : Path
        A file that tells how often each program was started again, as JSON, for the metrics.
    """

    def __init__(
        self, programs: Sequence[Program], restarts: int, hang_seconds: float, output: Path | None, state: Path
    ) -> None:
        self._watched = [Watched(program) for program in programs]
        self._restarts, self._hang_seconds, self._output, self._state = restarts, hang_seconds, output, state
        self._cut, self._look_at_log = output is not None and output.is_dir(), 0.0
        self._stopping, self._settled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self.failure = ""  # why the server has ended
        self.statuses: dict[str, int] = {}  # exit statuses, once stopped

    def start(self) -> None:
        """Start all programs."""
        self._write_state()
        self._guard = Guard()
        self._thread.start()

    def wait_until(self, is_ready: Callable[[], bool], seconds: float) -> None:
        """Wait until all processes are up and the server is ready; from then on those that die are started again.

        Raises ServerError if one ends, or they are not ready in time.
        """
        deadline = time.monotonic() + seconds
        while any(watched.up_at == math.inf for watched in self._watched) or not is_ready():
            self.check()
            if time.monotonic() > deadline:
                late = [child for one in self._watched if one.up_at == math.inf and (child := one.child) is not None]
                words = f": {late[0].program.name} is not up; {late[0].last_words()}" if late else ""
                raise ServerError(f"the server is not ready after {seconds:g} s, see --ready_seconds{words}")
            time.sleep(POLL_SECONDS)
        self._settled.set()

    def check(self) -> None:
        """Raise ServerError if the server has ended."""
        if self.failure:
            raise ServerError(self.failure)

    def stop(self) -> None:
        """End all programs in order; returns when they have ended. May be called twice."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def process_ids(self) -> dict[str, int]:
        """Process ids by name of the program, and of their workers."""
        found: dict[str, int] = {}
        for watched in self._watched:
            child = watched.child
            if child is not None:
                found |= {watched.program.name: child.process.pid, **child.workers}
        return found

    def _run(self) -> None:
        try:
            while not self._stopping.wait(POLL_SECONDS) and not self.failure:
                for watched in self._watched:
                    self._look_after(watched)
                self._cut_log()
        except KvseekError as error:
            self.failure = str(error)
        except OSError as error:  # for want of a file, of memory or of processes
            self.failure = f"a process could not be started ({text_of(error)})"
        except Exception as error:
            logger.exception("the supervisor failed")
            self.failure = f"the supervisor failed ({error})"
        finally:
            self._end_all()
            self._guard.end()

    def _look_after(self, watched: Watched) -> None:
        now = time.monotonic()
        child = watched.child
        if child is None:
            if now >= watched.start_at:
                output = self._output_of(watched.program)
                watched.child = Child(watched.program, output, self._guard, self._hang_seconds)
                watched.up_at = math.inf
            return
        if watched.up_at == math.inf and child.is_up:
            watched.up_at = now
        if now >= watched.look_at:
            watched.look_at = float("inf") if child.find_workers() else now + FIND_SECONDS
        reason = child.ended() or child.hangs() or self._late(watched, child, now)
        if reason:
            self._kill(watched)
            self._plan_restart(watched, reason, child.last_words(), now)
            for other in self._watched:
                if other.program.ends_with == watched.program.name and other.child is not None:
                    logger.error("%s is ended and started again with it", other.program.name)
                    self._kill(other)
                    other.start_at = watched.start_at

    def _late(self, watched: Watched, child: Child, now: float) -> str:
        """Describe a restart that takes too long; empty if it does not. The first start is `wait_until`'s."""
        limit = watched.program.start_seconds
        if not self._settled.is_set() or watched.up_at < math.inf or now - child.started_at <= limit:
            return ""
        return f"{watched.program.name} was not up {limit:g} s after its start (--ready_seconds) and is killed"

    @staticmethod
    def _kill(watched: Watched) -> None:
        """End a process, or those of its children that are left."""
        if watched.child is not None:
            watched.child.kill()
        watched.child, watched.look_at = None, 0.0

    def _plan_restart(self, watched: Watched, reason: str, words: str, now: float) -> None:
        if now - watched.up_at >= STEADY_SECONDS:
            watched.in_a_row = 0
        watched.in_a_row += 1
        if not self._settled.is_set():
            self.failure = f"{reason}: {words}"
            return
        if watched.in_a_row > self._restarts:
            self.failure = f"{reason}, after {self._restarts} restarts in a row (--restarts): {words}"
            return
        delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** (watched.in_a_row - 1))
        watched.start_at = now + delay
        watched.restarts += 1
        self._write_state()
        logger.error("%s; it is started again in %g s, %d of %d times", reason, delay, watched.in_a_row, self._restarts)

    def _end_all(self) -> None:
        """End the programs one after the other: the engine first, so that the frontends can pass on how requests ended."""
        for watched in self._watched:
            if watched.child is not None:
                watched.child.terminate()
                try:
                    self.statuses[watched.program.name] = watched.child.wait()
                except ServerError as error:
                    self.failure = self.failure or str(error)

    def _output_of(self, program: Program) -> Path | None:
        return self._output / f"{program.name}.log" if self._output is not None and self._cut else self._output

    def _cut_log(self) -> None:
        """Cut logs that nobody has asked for, because they could fill the disk one day."""
        now = time.monotonic()
        if not self._cut or now < self._look_at_log:
            return
        self._look_at_log = now + LOOK_AT_LOG_SECONDS
        for output in [self._output_of(watched.program) for watched in self._watched]:
            with contextlib.suppress(OSError):
                if output is not None and output.stat().st_size > MAX_LOG_BYTES:
                    os.truncate(output, 0)  # processes append to it

    def _write_state(self) -> None:
        counts = {watched.program.name: watched.restarts for watched in self._watched}
        part = self._state.with_suffix(".part")
        try:
            part.write_text(json.dumps(counts), encoding="utf-8")
            part.replace(self._state)  # readers see the old file or the new one
        except OSError as error:  # the metrics are then out of date, which is no reason to end the server
            logger.error("the number of restarts cannot be written for the metrics: %s", error)

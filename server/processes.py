"""Starts processes of a server, finds them in /proc, and ends them. Linux only, as Triton is."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from kvseek.core.errors import KvseekError
from kvseek.core.private_files import open_own_file

from .errors import ServerError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIBC = ctypes.CDLL(None)  # loaded here, because between fork and exec the loader's lock may be another thread's
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
LOG_BYTES = 64 << 10  # bytes of a log's end that are read for an error message
LOG_LINES = 30
REFUSAL = "error: "  # what the last words of a process of ours begin with that refuses to start
PROC = Path("/proc")
UMASK = 0o077  # of what processes of a server make, which may have prompts and answers
logger = logging.getLogger(__name__)
KILL_SECONDS = 300.0  # that a process may take to end once it is killed: it gives back hundreds of GiB of pinned memory
ASK_SECONDS = 1.0  # time between two questions to a process
QUESTIONS = 2  # that a process leaves unanswered before it counts as hung, so that one that is lost ends nothing
Ask = Callable[[float], bool]  # whether something has answered within so many seconds
# Kills the process groups that it has been told, a line each, when its standard input ends.
GUARD = """
import contextlib, os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
"""


@dataclass(frozen=True)
class Program:
    """A program to run as one process of a server.

    Attributes
    ----------
    stop_seconds : float
        Most seconds from SIGTERM to the process's end; after these it is killed.
    is_up : callable
        Returns whether the process has finished starting; called while the process runs.
    ends_with : str
        Name of another program, or empty: when that program dies, this one is ended and started again too.
    workers : tuple of str
        For each child process that must live as long as the process itself, a text that only its command line has.
    asks : mapping of str to callable
        How to find out whether the process and its workers work, by their names. All are asked from the first time on that all
        have answered; then the process is up, too.
    start_seconds : float
        Most seconds from a start to `is_up` and the first answers; only for later starts, the first has a limit of its own.
    clean_up : callable
        Called when the process and its children have ended, to free resources that a killed process leaves behind. What it
        raises is logged, and ends nothing.
    core_dumps : bool
        Whether the process may leave a core dump, which has prompts and answers, and keys.
    """

    name: str
    command: tuple[str, ...]
    stop_seconds: float
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    is_up: Callable[[], bool] = lambda: True
    ends_with: str = ""
    workers: tuple[str, ...] = ()
    asks: Mapping[str, Ask] = field(default_factory=dict)
    start_seconds: float = math.inf
    clean_up: Callable[[], None] = lambda: None
    core_dumps: bool = False


class Child:
    """A program that has been started, in a session of its own, so that Ctrl-C in a terminal reaches only the launcher.

    The kernel ends the process when the thread that started it ends; a Guard sees to its children.

    Attributes
    ----------
    started_at : float
        Of time.monotonic.
    """

    def __init__(self, program: Program, output: Path | None, guard: Guard, hang_seconds: float) -> None:
        """Start the program; its output is appended to the file `output`, or goes to this process's output if that is None."""
        self.program, self._output, self._guard = program, output, guard
        self._written = output.stat().st_size if output is not None and output.is_file() else 0  # by others
        with contextlib.nullcontext() if output is None else open(open_own_file(output, APPEND), "ab") as file:
            self.process = subprocess.Popen(
                program.command,
                env=program.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent if program.core_dumps else die_without_core,
                start_new_session=True,
                umask=UMASK,
            )
        guard.add(self.process.pid)
        self.started_at = time.monotonic()
        self._questions = Questions(program.asks, hang_seconds) if program.asks else None
        self._workers: dict[str, Path] = {}

    @property
    def is_up(self) -> bool:
        """Whether the process has finished starting."""
        return self.program.is_up() and (self._questions is None or self._questions.answered)

    def find_workers(self) -> bool:
        """Look for worker processes that are not known yet; returns whether all are known now."""
        missing = [worker for worker in self.program.workers if worker not in self._workers]
        if missing:
            for folder in PROC.glob("[0-9]*"):
                with contextlib.suppress(OSError):  # the process has just ended
                    if _status(folder)[1] == str(self.process.pid):
                        command = (folder / "cmdline").read_text(errors="replace")
                        self._workers |= {worker: folder for worker in missing if worker in command}
        return len(self._workers) == len(self.program.workers)

    @property
    def workers(self) -> dict[str, int]:
        """Process ids of the workers that `find_workers` has found."""
        return {worker: int(folder.name) for worker, folder in self._workers.items()}

    def ended(self) -> str:
        """Describe how the process, or one of its workers, has ended; empty while all run."""
        status = self.process.poll()
        if status is not None:
            return f"{self.program.name} ended with status {status}"
        gone = [worker for worker, folder in self._workers.items() if _has_ended(folder)]
        return f"{self.program.name}: its process {gone[0]} ended" if gone else ""

    def hangs(self) -> str:
        """Describe which process has left questions unanswered for too long; empty if none has."""
        silent = "" if self._questions is None else self._questions.silent
        if not silent or self._questions is None:
            return ""
        which = silent if silent == self.program.name else f"{self.program.name}: its process {silent}"
        return f"{which} has not answered for {self._questions.seconds:g} s (--hang_seconds) and is killed"

    def last_words(self) -> str:
        """Return what the process wrote last, for an error message: why it refuses to start, or the end of its log."""
        return last_words(self._output, self._written)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.process.terminate()

    def wait(self) -> int:
        """Wait `stop_seconds` for the process to end, then kill it and its children; returns its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self.program.stop_seconds)
        return self.kill()

    def kill(self) -> int:
        """Kill the process and its children now; returns its exit status.

        Raises ServerError if it does not end: it waits inside the kernel, and another one in its place would find its GPU,
        ports and files in use.
        """
        if self._questions is not None:
            self._questions.end()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            status = self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            raise ServerError(
                f"{self.program.name}: process {self.process.pid} has been killed and has not ended for {KILL_SECONDS:g} s: it "
                "waits in the kernel, for a disk or a driver; look there, and start the server again"
            ) from None
        self._guard.remove(self.process.pid)
        try:
            self.program.clean_up()
        except Exception:  # what is left behind takes up room, and is no reason to end the others
            logger.exception("%s: what it has left behind could not be removed", self.program.name)
        return status


class Questions:
    """Asks a process and its workers again and again, from a thread of its own, whether they work.

    Unanswered questions count, and not time alone: when this process itself was stopped for a while, only one of them is lost.

    Attributes
    ----------
    seconds : float
        For which somebody must not have answered to count as hung.
    answered : bool
        Whether all have answered once. Until then a question that is not answered means nothing.
    silent : str
        The name of who counts as hung, or empty.
    """

    def __init__(self, asks: Mapping[str, Ask], seconds: float) -> None:
        self.seconds, self.answered, self.silent = seconds, False, ""
        self._asks, self._ended = asks, threading.Event()
        threading.Thread(target=self._run, name="questions", daemon=True).start()

    def end(self) -> None:
        """Ask no more."""
        self._ended.set()

    def _run(self) -> None:
        unanswered = 0
        while not self._ended.is_set() and not self.silent:
            name = next((name for name, ask in self._asks.items() if not self._answers(ask)), "")
            unanswered = unanswered + 1 if name and self.answered else 0
            self.answered = self.answered or not name
            if unanswered == QUESTIONS:
                self.silent = name
            self._ended.wait(0 if name else ASK_SECONDS)

    def _answers(self, ask: Ask) -> bool:
        deadline = time.monotonic() + self.seconds / QUESTIONS
        while (left := deadline - time.monotonic()) > 0 and not self._ended.is_set():
            if ask(left):
                return True
            self._ended.wait(min(left, ASK_SECONDS / 10))
        return False


class Guard:
    """A small process that kills the processes of a server, with all their children, when this one has died, however it died.

    The kernel's own signal for that reaches children alone, not theirs, and a process that is stopped or deaf is ended by SIGKILL
    alone. Nor can children look after themselves then.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def add(self, group: int) -> None:
        """Guard a process group."""
        self._tell(f"+{group}")

    def remove(self, group: int) -> None:
        """Forget a process group that has ended."""
        self._tell(f"-{group}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it; the server goes on
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """End the guard, and with it what it still guards."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def run_process(serve: Coroutine[Any, Any, int | None]) -> int:
    """Run a process of a server, which logs to its standard error; returns its status, 1 after a line on why it refuses to."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return uvloop.run(serve) or 0
    except KvseekError as error:
        print(f"{REFUSAL}{error}", file=sys.stderr)
        return 1


def last_words(log: Path | None, since: int = 0) -> str:
    """Read what a process has written last, for an error message: its refusal, or the end of its log.

    `since`: bytes of the log that are older than the process.
    """
    if log is None:
        return "its log is above"
    if not log.is_file():
        return f"its log is {log}"
    with log.open("rb") as file:
        size = log.stat().st_size
        file.seek(max(since if since <= size else 0, size - LOG_BYTES))  # a log that has been cut is younger
        lines = file.read().decode("utf-8", "replace").splitlines()
    refusals = [line.removeprefix(REFUSAL) for line in lines if line.startswith(REFUSAL)]
    if refusals:
        return refusals[-1]
    return "its log ends:\n" + "\n".join(lines[-LOG_LINES:]) if lines else "it has written nothing"


def _has_ended(folder: Path) -> bool:
    try:
        return _status(folder)[0] in "ZX"  # proc_pid_stat(5): a zombie, or dead
    except OSError:
        return True


def _status(folder: Path) -> list[str]:
    """Read the fields of /proc/PID/stat from the process's state on; its parent comes next."""
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()


def listens(pid: int, port: int) -> bool:
    """Whether this process of this user listens at a TCP port of IPv4; another process at the same port does not count."""
    try:
        rows = [line.split() for line in (PROC / str(pid) / "net/tcp").read_text().splitlines()[1:]]  # proc_net_tcp.txt
        listening = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
        return any(os.readlink(file) in listening for file in (PROC / str(pid) / "fd").iterdir())
    except OSError:  # the process, or one of its files, has just been closed
        return False


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when the thread that started it ends: Popen's `preexec_fn`."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def die_without_core() -> None:
    """Do as `die_with_parent`, and have this process and its children leave no core dumps: Popen's `preexec_fn`."""
    die_with_parent()
    leave_no_core()


def leave_no_core() -> None:
    """Have this process, and those that it starts, leave no core dumps when they crash."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def raise_file_limit() -> None:
    """Allow as many open files, connections among them, as this user may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some kernels refuse "infinity": then the soft limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_open_files(needed: int, max_queue_size: int) -> None:
    """Raise ServerError unless this process may have so many open files, which connections of a server with this queue need."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < needed:
        raise ServerError(
            f"open files (ulimit -n) = {most:,}: must be >= {needed:,} for the connections of all ports with --max_queue_size = "
            f"{max_queue_size}; raise the limit, or choose a smaller --max_queue_size"
        )

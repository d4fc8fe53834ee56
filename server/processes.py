"""Starts processes of a server, finds them in /proc, and ends them. Linux only, as Triton is."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ServerError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOG_BYTES = 64 << 10  # bytes of a log's end that are read for an error message
LOG_LINES = 30
PROC = Path("/proc")
UMASK = 0o077  # of what processes of a server make, which may have prompts and answers
logger = logging.getLogger(__name__)


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
    clean_up: Callable[[], None] = lambda: None
    core_dumps: bool = False


class Child:
    """A program that has been started, in a session of its own, so that Ctrl-C in a terminal reaches only the launcher.

    The kernel ends the process when the thread that started it ends, so that no server outlives its launcher.
    """

    def __init__(self, program: Program, output: Path | None) -> None:
        """Start the program; its output is appended to the file `output`, or goes to this process's output if that is None."""
        self.program = program
        with contextlib.nullcontext() if output is None else output.open("ab") as file:
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
        self._workers: dict[str, Path] = {}

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

    def terminate(self) -> None:
        """Ask the process to end."""
        self.process.terminate()

    def wait(self) -> int:
        """Wait `stop_seconds` for the process to end, then kill it and its children; returns its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self.program.stop_seconds)
        return self.kill()

    def kill(self) -> int:
        """Kill the process and its children now; returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        try:
            self.program.clean_up()
        except Exception:  # what is left behind takes up room, and is no reason to end the others
            logger.exception("%s: what it has left behind could not be removed", self.program.name)
        return status


def ending(log: Path | None) -> str:
    """Read the end of a log, for an error message."""
    if log is None:
        return "is above"
    if not log.is_file():
        return f"is {log}"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "ends:\n" + "\n".join(lines[-LOG_LINES:])


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
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


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

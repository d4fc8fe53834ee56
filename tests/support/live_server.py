"""A real `kvseek serve` in processes of its own, and what tests look at from outside: processes, memory, metrics."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests
from tests.support.metrics import metric
from tests.support.waiting import wait_for

from kvseek.server.scratch import SHARED_MEMORY, SHARED_MEMORY_PREFIX

PROC = Path("/proc")
# A text that only the command line of this process has.
MARKS = {
    "engine": "kvseek.server.engine.process",
    "doors": "kvseek.server.frontend",
    "triton": "--model-repository=",
    "tensorrt_llm": "/models/tensorrt_llm/",
    "tensorrt_llm_bls": "/models/tensorrt_llm_bls/",
}
START_SECONDS = 180.0
STOP_SECONDS = 60.0


def is_ready(url: str, timeout: float = 5.0) -> bool:
    """Whether the server at host:port says that it is."""
    try:
        return requests.get(f"http://{url}/v2/health/ready", timeout=timeout).status_code == 200
    except requests.RequestException:
        return False


@dataclass(frozen=True)
class Footprint:
    """What one process holds: resident bytes, those of them that no file or other process shares, descriptors, threads."""

    resident: int
    private: int
    descriptors: int
    threads: int


class LiveServer:
    """A running `kvseek serve`; the addresses are host:port."""

    def __init__(self, process: subprocess.Popen[str], ready: str, log: Path) -> None:
        places = r"ready: gRPC (\S+:\d+), HTTP (\S+:\d+), metrics (\S+:\d+)/metrics, OpenAI http://(\S+:\d+)/v1"
        found = re.match(places, ready)
        assert found is not None, f"no ready line: {ready!r}"
        self.process, self.log = process, log
        self.grpc_url, self.http_url, self.metrics_url, self.openai_url = found.groups()
        self.engine_socket = self._engine_socket()

    @property
    def urls(self) -> dict[str, str]:
        """Addresses by the names that tests/server/soak/calls.py has for them."""
        return {"grpc": self.grpc_url, "http": self.http_url, "openai": self.openai_url}

    def process_ids(self) -> dict[str, int]:
        """Process ids by the names of MARKS, and "serve"; those that do not run are left out."""
        found = {"serve": self.process.pid}
        for pid in _descendants(self.process.pid):
            command = command_line(pid)
            for name, mark in MARKS.items():
                if mark in command:
                    found[name] = pid
        return found

    def footprints(self) -> dict[str, Footprint]:
        """Of every process, by name."""
        found = {}
        for name, pid in self.process_ids().items():
            try:
                found[name] = footprint(pid)
            except OSError:  # it has just ended
                continue
        return found

    def _engine_socket(self) -> Path:
        """The Unix socket of the engine process, in the server's scratch folder."""
        arguments = command_line(self.process_ids()["engine"]).split("\0")
        return Path(arguments[arguments.index("--socket") + 1])

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a process by its name; returns the process id that it had."""
        pid = self.process_ids()[name]
        os.kill(pid, number)
        return pid

    def is_ready(self, timeout: float = 5.0) -> bool:
        """What the server says of the whole server."""
        return is_ready(self.http_url, timeout)

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the server is ready; raises AssertionError if it ends or is not in time."""

        def ready() -> bool:
            assert self.process.poll() is None, "kvseek serve has ended"
            return self.is_ready()

        wait_for(ready, "the server is ready", seconds)

    def wait_replaced(self, name: str, pid: int, seconds: float = START_SECONDS) -> int:
        """Wait until another process does what process `pid` did; returns its id."""
        wait_for(lambda: self.process_ids().get(name, pid) != pid, f"{name} is started again", seconds)
        return self.process_ids()[name]

    def metric(self, name: str, *labels: str) -> float:
        """See tests/support/metrics.py."""
        return metric(self.metrics_url, name, *labels)

    def shared_memory(self) -> dict[str, int]:
        """Bytes of this server's regions in /dev/shm that are in use, by name."""
        own = f"{SHARED_MEMORY_PREFIX}{self.engine_socket.parent.name}-*"
        return {path.name: _in_use(path) for path in SHARED_MEMORY.glob(own)}

    def log_text(self) -> str:
        """The server's log so far."""
        return self.log.read_text(errors="replace")

    def tracebacks(self) -> Counter[str]:
        """The exceptions whose tracebacks the log has: the last line of each, and how often it is there."""
        found: Counter[str] = Counter()
        for part in self.log_text().split("Traceback (most recent call last):")[1:]:
            lines = part.splitlines()
            found[next((line for line in lines[1:] if line and not line.startswith(" ")), "?")] += 1
        return found

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)


def serve_command(directory: Path, *flags: str) -> list[str]:
    """The command line of `kvseek serve` on free ports."""
    ports = ("--http_port", "0", "--grpc_port", "0", "--metrics_port", "0", "--openai_port", "0")
    return [sys.executable, "-m", "kvseek.cli.main", "serve", "--engine_dir", str(directory), *ports, *flags]


@contextmanager
def live_server(directory: Path, log: Path, *flags: str) -> Iterator[LiveServer]:
    """Start `kvseek serve` with one thread and wait until it is ready; ends it with the context."""
    command = serve_command(directory, "--threads", "1", *(() if "--log" in flags else ("--log", str(log))), *flags)
    errors = log.with_suffix(".errors")
    with errors.open("w") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        try:
            ready = process.stdout.readline()
            assert ready, f"kvseek serve has ended: {errors.read_text()[-4000:]}"
            yield LiveServer(process, ready, log)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()


def command_line(pid: int) -> str:
    """Arguments of a process with a zero byte between them; empty if it has ended."""
    try:
        return (PROC / str(pid) / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def footprint(pid: int) -> Footprint:
    """What a process holds; raises OSError if it has ended."""
    folder = PROC / str(pid)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    kilobytes = {name: int(status[name].split()[0]) for name in ("VmRSS", "RssAnon") if name in status}
    if not kilobytes:
        raise ProcessLookupError(pid)
    descriptors = len(list((folder / "fd").iterdir()))
    return Footprint(1024 * kilobytes["VmRSS"], 1024 * kilobytes["RssAnon"], descriptors, int(status["Threads"]))


def _in_use(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found

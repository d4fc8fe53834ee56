"""A tritonserver that is started as a user would start it, over a repository of `kvseek repository`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.live_server import is_ready

from kvseek.server.ports import Ports

KVSEEK = (sys.executable, "-m", "kvseek.cli.main")
START_SECONDS = 90.0
# Triton takes the process of a model for dead that gets no CPU for a second while it initialises, and then waits for its end,
# without limit: for this alone a server is started again.
TRIES = 3


@dataclass(frozen=True)
class OwnTriton:
    """A running tritonserver; the addresses are host:port."""

    process: subprocess.Popen[bytes]
    http_url: str
    grpc_url: str


@contextmanager
def own_triton(repository: Path, log: Path, temporary: Path) -> Iterator[OwnTriton]:
    """Start `kvseek tritonserver` on free ports of loopback and wait until it is ready; ends it with the context.

    Parameters
    ----------
    temporary : Path
        TMPDIR of the server: engine processes are looked for there.
    """
    for tries_left in range(TRIES - 1, -1, -1):
        with Ports(0, 0, 0, 0).hold("127.0.0.1", socket.SO_REUSEADDR) as ports:
            server = _started(ports, repository, log, temporary)
            try:
                if _becomes_ready(server, log):
                    yield server
                    return
                assert tries_left, f"not ready within {START_SECONDS:g} s: {log.read_text(errors='replace')[-4000:]}"
            finally:
                end(server.process)


def _started(ports: Ports, repository: Path, log: Path, temporary: Path) -> OwnTriton:
    flags = [f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")]
    flags += [f"--{kind}-header-forward-pattern=[Aa]uthorization" for kind in ("http", "grpc")]
    flags += [f"--{kind}-port={getattr(ports, kind)}" for kind in ("http", "grpc", "metrics")]
    command = [*KVSEEK, "tritonserver", f"--model-repository={repository}", "--exit-timeout-secs=5", *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment(temporary), start_new_session=True
        )
    return OwnTriton(process, f"127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}")


def _becomes_ready(server: OwnTriton, log: Path) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while not (ready := _is_ready(server, log)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return ready


def end(process: subprocess.Popen[Any]) -> int:
    """End a process that has a session of its own, if need be with all its children; returns its exit status."""
    process.terminate()
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def environment(temporary: Path) -> dict[str, str]:
    """An environment with this TMPDIR."""
    return {**os.environ, "TMPDIR": str(temporary)}


def _is_ready(server: OwnTriton, log: Path) -> bool:
    assert server.process.poll() is None, log.read_text(errors="replace")[-4000:]
    return is_ready(server.http_url)

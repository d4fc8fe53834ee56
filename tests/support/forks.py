"""Runs Python programs as forks of one process that has imported what each of them would import for seconds.

They are processes of their own all the same, with the signals, the output and the exit status of a program that was started.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvseek.engine.leading import followers

CONTEXT = multiprocessing.get_context("forkserver")
SERVERS = ("kvseek.engine.service", "kvseek.server.openai.app", "kvseek.server.grpc.server")  # of engines and doors
CONTEXT.set_forkserver_preload([*SERVERS, "transformers.models.auto.tokenization_auto"])


class ForkedProgram:
    """A running program: a module, or the file of a script, with its arguments. What tests use of subprocess.Popen.

    Parameters
    ----------
    output : Path, optional
        File for what it prints, errors included; None: `stdout` has what it prints.
    connection : Connection, optional
        Is the program's, too; its descriptor there is the last argument.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        output: Path | None = None,
        connection: Connection | None = None,
    ) -> None:
        reader, writer = CONTEXT.Pipe(duplex=False)
        with reader, writer:
            place = writer if output is None else str(output)
            self._process = CONTEXT.Process(
                target=_run, args=(program, list(arguments), place, connection), daemon=True
            )
            self._process.start()
            self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status; raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_rank(rank: int, *arguments: str) -> followers.Member:
    """Start a rank, as engine/leading/followers.py does; `arguments` are for another program in its place."""
    own, theirs = Pipe()
    with theirs:
        process: Any = ForkedProgram(followers.FOLLOWER, arguments, connection=theirs)
    return followers.Member(rank, followers.Channel(own), process)


def _run(program: str, arguments: list[str], place: object, connection: Connection | None) -> None:
    if isinstance(place, str):
        with open(place, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    else:
        with place:
            os.dup2(place.fileno(), 1)
    sys.argv = [program, *arguments, *([] if connection is None else [str(connection.fileno())])]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)

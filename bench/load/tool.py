"""Runs a load tester as a program."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .cells import LoadTestError

MOST_SECONDS = 1800  # of one cell: a tool that hangs must not hang its caller
SHOWN_CHARACTERS = 2000


class NothingWrittenError(LoadTestError):
    """A tool says that it has succeeded, and its result is missing or empty; the message has what it printed."""


def run_tool(command: Sequence[str], environment: Mapping[str, str], export: Path) -> str:
    """Run a program, and end all processes that it has started; returns the text of the file that it writes.

    Raises LoadTestError if the program is absent, fails or takes more than MOST_SECONDS, NothingWrittenError if it succeeds
    without a result.
    """
    try:
        # In a session of its own, so that its children end with it: aiperf is a dozen processes.
        tool = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        raise LoadTestError(f"{command[0]}: no such program; run make load-tools, or give its path") from None
    try:
        printed, _ = tool.communicate(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        raise LoadTestError(
            f"{command[0]} has not ended after {MOST_SECONDS} s; ask for fewer or shorter requests"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tool.pid, signal.SIGKILL)
        tool.wait()
    written = export.read_text(encoding="utf-8") if export.is_file() else ""
    tail = f"the end of what it printed:\n{printed.strip()[-SHOWN_CHARACTERS:]}"
    if tool.returncode:
        raise LoadTestError(f"{command[0]} ended with status {tool.returncode}; {tail}")
    if not written:
        raise NothingWrittenError(f"{command[0]} ended with status 0 and has written nothing to {export.name}; {tail}")
    return written

"""Runs a load tester as a program."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from .cells import LoadTestError

MOST_SECONDS = 1800  # of one cell: a tool that hangs must not hang its caller
SHOWN_CHARACTERS = 2000


def run_tool(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a program; returns what it printed. Raises LoadTestError if it is absent, fails or takes more than MOST_SECONDS."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=MOST_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise LoadTestError(f"{command[0]}: no such program; run make load-tools, or give its path") from None
    except subprocess.TimeoutExpired:
        raise LoadTestError(
            f"{command[0]} has not ended after {MOST_SECONDS} s; ask for fewer or shorter requests"
        ) from None
    printed = done.stdout + done.stderr
    if done.returncode:
        tail = printed.strip()[-SHOWN_CHARACTERS:]
        raise LoadTestError(f"{command[0]} ended with status {done.returncode}; the end of what it printed:\n{tail}")
    return printed

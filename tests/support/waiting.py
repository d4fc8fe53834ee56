"""Waiting for an event instead of sleeping, such as the end of a process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 60.0  # that anything may take on a busy machine


def wait_for(condition: Callable[[], Any], what: str = "the condition", seconds: float = SECONDS) -> Any:
    """Wait until `condition` gives something true, and return that; an AssertionError names `what` was waited for."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
    return value


async def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition` gives something true, while the event loop goes on; raises TimeoutError after SECONDS."""
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def is_running(process: int) -> bool:
    """Whether a process of this id runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

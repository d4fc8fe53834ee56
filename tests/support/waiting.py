"""Waiting for an event instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SECONDS = 60.0  # that anything may take on a busy machine


def wait_for(condition: Callable[[], Any], what: str = "the condition", seconds: float = SECONDS) -> Any:
    """Wait until `condition` gives something true, and return that; an AssertionError names `what` was waited for."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
    return value

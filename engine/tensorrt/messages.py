"""Keeps TensorRT's messages. Its API reports a failure as None, and the reason only to a logger."""

from __future__ import annotations

import functools
from collections import deque
from types import ModuleType
from typing import Any

KEPT = 5


class Messages:
    """TensorRT's last warnings and errors."""

    def __init__(self) -> None:
        self._last: deque[str] = deque(maxlen=KEPT)

    def add(self, message: str) -> None:
        """Keep a message."""
        self._last.append(message)

    def take(self) -> str:
        """Return the kept messages and forget them."""
        text = "; ".join(self._last)
        self._last.clear()
        return text or "it gave no reason"


def logger(api: ModuleType) -> Any:
    """Return the logger for a Builder or a Runtime of `api`. A process has one, as TensorRT uses only the first it is given."""
    return _logger(api)[0]


def why(api: ModuleType) -> str:
    """Return TensorRT's name and version, and its last messages."""
    return f"{api.__name__} {api.__version__}: {_logger(api)[1].take()}"


@functools.cache
def _logger(api: ModuleType) -> tuple[Any, Messages]:
    messages, levels = Messages(), api.ILogger.Severity

    def initialise(self: Any) -> None:
        api.ILogger.__init__(self)

    def log(self: Any, severity: Any, message: str) -> None:
        if severity in (levels.INTERNAL_ERROR, levels.ERROR, levels.WARNING):
            messages.add(message)

    return type("Logger", (api.ILogger,), {"__init__": initialise, "log": log})(), messages

"""Finds out that the engine's loop has stopped."""

from __future__ import annotations

import time

from kvseek.engine.service import EngineService

# Time without a round of the engine's loop; no round takes as long, because it reads only units of a prompt.
HUNG_SECONDS = 300.0


class Watchdog:
    """Tells whether the engine's loop still turns."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._asked_at: float | None = None  # time.monotonic of the open question; None: no question is open

    def hangs(self) -> bool:
        """Whether the loop has not answered a question for too long. Also asks; call this again and again."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._service.call(self._answer)
        asked_at = self._asked_at
        return asked_at is not None and time.monotonic() - asked_at > HUNG_SECONDS

    def _answer(self) -> None:
        self._asked_at = None

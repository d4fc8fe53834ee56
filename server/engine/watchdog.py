"""Finds out that the engine's loop has stopped, while the process itself still answers its supervisor."""

from __future__ import annotations

import time

from kvseek.engine.service import EngineService

ENGINE_ROUNDS = 5  # times as long as a process may leave questions unanswered, a round of the engine's loop may take


class Watchdog:
    """Tells whether the engine's loop still turns.

    A round reads only units of a prompt, so on no machine should it take minutes.
    """

    def __init__(self, service: EngineService, hang_seconds: float) -> None:
        self._service, self.seconds = service, ENGINE_ROUNDS * hang_seconds
        self._asked_at: float | None = None  # time.monotonic of the open question; None: no question is open

    def hangs(self) -> bool:
        """Whether the loop has not answered a question for too long. Also asks; call this again and again."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._service.call(self._answer)
        asked_at = self._asked_at
        return asked_at is not None and time.monotonic() - asked_at > self.seconds

    def _answer(self) -> None:
        self._asked_at = None

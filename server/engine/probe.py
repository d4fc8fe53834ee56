"""Finds out whether an engine whose requests have ended with logits that are not finite is sound again."""

from __future__ import annotations

import logging
import time

from kvseek.core.errors import KvseekError
from kvseek.core.request import Request, StepOutput
from kvseek.engine.service import EngineService
from kvseek.server.requests.messages import UNSOUND_REQUESTS

PROBE_SECONDS = 1.0  # between two probes
PROBE = Request((0,), 1)
logger = logging.getLogger(__name__)


class Probe:
    """Asks the engine for a token while it is not ready, as no client may: one that is answered makes it ready again."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._unsound = False
        self._waits = False  # for an answer
        self._next_at = 0.0

    def look(self) -> None:
        """Ask if it is time to; call this again and again."""
        count = self._service.engine.unsound_in_a_row
        unsound = count >= UNSOUND_REQUESTS
        if unsound != self._unsound:
            self._unsound = unsound
            if unsound:
                logger.error("the logits of %d requests in a row were not finite: the server is not ready", count)
            else:
                logger.warning("logits are finite again: the server is ready")
        if unsound and not self._waits and time.monotonic() >= self._next_at:
            self._next_at, self._waits = time.monotonic() + PROBE_SECONDS, True
            try:
                self._service.submit(PROBE, self._on_output)
            except KvseekError:  # the queue is full of requests that tell as much, or the engine is about to end
                self._waits = False

    def _on_output(self, output: StepOutput) -> None:
        self._waits = output.finish_reason is None

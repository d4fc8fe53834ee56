"""An engine process whose engine computes nothing: a step gives every request a token of a text, at a steady pace.

All that lies between an engine's outputs and the socket is real. `ports.py` starts it, also with the code of another
commit.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop

from kvseek.core.config_file import read_config
from kvseek.core.request import FinishReason, LogProbs, Request, StepOutput
from kvseek.core.statistics import RequestStatistics, StepReport
from kvseek.engine.service import EngineService
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.engine.metrics import EngineMetrics
from kvseek.server.engine.process import EngineServer
from kvseek.server.settings import ServeSettings

ATTENDED = 612.0  # tokens that a step attends to, as it has to be some number


class StandIn:
    """What EngineService, EngineServer and EngineMetrics use of an engine.

    Parameters
    ----------
    tokens : list of int
        What requests are answered with, each beginning at another place.
    step_seconds : float
        Time from step to step.
    """

    unsound = unsound_in_a_row = preemptions = 0

    def __init__(self, config: Any, tokens: list[int], step_seconds: float) -> None:
        self.config, self._tokens, self._seconds = config, tokens, step_seconds
        self._ids, self._running = itertools.count(1), dict[int, Any]()
        self._next, self._steps = 0.0, 0
        self.on_step: Any = None

    @property
    def has_work(self) -> bool:
        """Whether there are requests."""
        return bool(self._running)

    @property
    def running(self) -> int:
        """Requests; none ever waits."""
        return len(self._running)

    waiting = 0

    def prepare(self, request: Request) -> Any:
        """Make a request's state."""
        statistics = RequestStatistics(len(request.prompt_ids), time.perf_counter())
        return SimpleNamespace(request_id=next(self._ids), request=request, statistics=statistics)

    def enqueue(self, sequence: Any) -> None:
        """Begin with a request."""
        self._running[sequence.request_id] = sequence

    def cancel_waiting(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Nothing waits."""

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> StepOutput | None:
        """End a request."""
        sequence = self._running.pop(request_id, None)
        return None if sequence is None else StepOutput(request_id, None, reason, statistics=sequence.statistics)

    def step(self) -> list[StepOutput]:
        """Wait for the time of the next step, and give each request a token."""
        began = time.perf_counter()
        if began < self._next:
            time.sleep(self._next - began)
        self._next, now = max(self._next, began) + self._seconds, time.perf_counter()
        sequences = list(self._running.values())
        outputs = [self._token(sequence, now) for sequence in sequences]
        self._steps += 1
        self.on_step(StepReport(self._steps, now - began, len(outputs), running=len(sequences)))
        return outputs

    def _token(self, sequence: Any, now: float) -> StepOutput:
        statistics, request = sequence.statistics, sequence.request
        cached = len(request.prompt_ids) + statistics.generated_tokens
        statistics.record_token(cached, ATTENDED, now)
        count = statistics.generated_tokens
        reason = FinishReason.LENGTH if count == request.max_tokens else None
        token = self._tokens[(31 * sequence.request_id + count) % len(self._tokens)]
        if reason is not None:
            del self._running[sequence.request_id]
        wanted = request.sampling.logprobs
        return StepOutput(
            sequence.request_id,
            token,
            reason,
            cached_tokens=cached,
            attended_tokens=ATTENDED,
            statistics=statistics if reason or count == 1 else None,
            logprobs=None if wanted is None else LogProbs(-0.5, tuple((token + n, -1.5 - n) for n in range(wanted))),
        )

    def settle(self) -> list[StepOutput]:
        """No step is ever under way."""
        return []

    def expire(self) -> list[StepOutput]:
        """No request waits."""
        return []

    def next_deadline(self) -> None:
        """No request waits."""

    def close(self) -> None:
        """There is nothing to close."""


async def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    tokens = Tokenizer(arguments.engine_dir).encode(arguments.text.read_text(encoding="utf-8"), False)
    engine: Any = StandIn(read_config(arguments.engine_dir), tokens, arguments.step_seconds)
    service = EngineService(engine)
    metrics = EngineMetrics(service)
    service.on_step(metrics.record_step)
    try:
        await EngineServer(service, ServeSettings(), metrics).serve(arguments.socket)
    finally:
        await asyncio.to_thread(service.close)


def main() -> None:
    """Run the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine_dir", type=Path, required=True, help="of its configuration and tokenizer")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="what it answers")
    parser.add_argument("--step_seconds", type=float, required=True)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

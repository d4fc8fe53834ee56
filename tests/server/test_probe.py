"""An engine all of whose requests have failed is asked for a token now and then, and the first one that comes makes it ready."""

from __future__ import annotations

import queue

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.engine.number_faults import broken_activations
from tests.support.waiting import wait_for

from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.engine.service import EngineService
from kvseek.server.engine import process
from kvseek.server.engine.process import Probe
from kvseek.server.requests.engine_client import UNSOUND_REQUESTS


def test_a_probe_that_is_answered_makes_an_engine_ready_again(
    random_model: RandomModel, build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PROBE_SECONDS", 0.0)
    service = EngineService.load(build_engine(random_model("llama"), "full"))
    probe, outputs = Probe(service), queue.Queue[StepOutput]()
    with broken_activations(service.engine):
        for number in range(UNSOUND_REQUESTS):
            probe.look()
            assert service.engine.unsound == number, "it asks nothing of an engine that may be ready"
            service.submit(Request((5, 6), 3), outputs.put)
            assert outputs.get(timeout=60).finish_reason is FinishReason.ERROR
        probe.look()
        wait_for(lambda: service.engine.unsound == service.engine.unsound_in_a_row == UNSOUND_REQUESTS + 1)
    wait_for(lambda: probe.look() is None and service.engine.unsound_in_a_row == 0)
    service.close()

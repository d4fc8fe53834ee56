"""The soak test's short form: tests/server/soak/main.py with fewer requests, and the engine process killed twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server.soak import main as soak
from tests.server.soak.engine import build_soak_engine

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_random_requests_and_a_killed_engine(tmp_path: Path) -> None:
    engine = build_soak_engine(tmp_path)
    outcomes, faults = soak.run(
        engine, tmp_path, requests=120, clients=16, kill="engine", kills=2, seed=3, distinct=25, queue_size=8
    )
    assert not faults, "\n".join(faults)
    assert sum(outcome.refusals for outcome in outcomes), "16 clients overfill 4 slots and a queue of 8"

"""The fuzzers' short form: the same inputs in every run, some hundred for each door."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.fuzz.main import DOORS, fuzz
from tests.server.soak.engine import build_soak_engine
from tests.support.live_server import LiveServer, live_server

pytestmark = [pytest.mark.server, pytest.mark.slow]

INPUTS = {"grpc": 25, "http": 50, "openai": 50, "raw": 75, "engine-socket": 25}  # of each of four threads
SECONDS = 60.0  # at most; the inputs take some seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("fuzz")
    with live_server(build_soak_engine(folder, "full"), folder / "server.log") as server:
        yield server


@pytest.mark.parametrize("door", DOORS)
def test_no_input_makes_a_fault(server: LiveServer, door: str, tmp_path: Path) -> None:
    assert not fuzz(server, door, SECONDS, seed=7, folder=tmp_path, inputs=INPUTS[door])

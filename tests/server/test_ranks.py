"""A real server of an engine of two ranks: it answers as one rank does, and starts all ranks again when one dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.support.live_server import command_line, live_server
from tests.support.server_streams import tokens
from tests.support.waiting import wait_for

from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.server.serve import main

pytestmark = [pytest.mark.server, pytest.mark.slow]

PROMPT = tuple(range(5, 45))
LONG = 3900  # tokens, so that a request runs when a rank dies
LIMITS = ("--max_seq_len", "4000", "--max_batch_size", "2")
MARK = "kvseek.engine.leading.follower"


def followers_of(pid: int) -> list[int]:
    """Processes of ranks that a process has started: an engine, or the launcher of another node."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for path in children for child in path.read_text().split()]
    return [child for child in found if MARK in command_line(child)]


def test_a_server_of_two_ranks(random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path) -> None:
    model = random_model("llama", max_position_embeddings=4000)
    (expected,) = Engine.load(build_engine(model, "full", *LIMITS)).generate([Request(PROMPT, 8)])
    directory = build_engine(model, "full", *LIMITS, "--tp_size", "2")
    with live_server(directory, tmp_path / "server.log", "--tp_size", "2") as server:
        for route in ("grpc", "http_stream"):
            assert tokens(server, route, PROMPT, 8).join().ids == expected
        engine = server.process_ids()["engine"]
        (follower,) = followers_of(engine)
        stream = tokens(server, "grpc", PROMPT, LONG).begun()
        os.kill(follower, signal.SIGKILL)
        assert "rank 1" in stream.join().error
        server.wait_replaced("engine", engine)
        server.wait_ready()
        assert tokens(server, "grpc", PROMPT, 8).join().ids == expected
        engine = server.process_ids()["engine"]
        (follower,) = followers_of(engine)
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{follower}").exists(), "the end of rank 1")


def test_another_number_of_ranks_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine_dir", str(directory), "--tp_size", "2"]) == 1
    message = (
        f"tp_size = 2: must be 1, that of {directory}; the engine is divided when it is built, with kvseek build "
        "--tp_size: give 1, or leave it out"
    )
    assert message in capsys.readouterr().err

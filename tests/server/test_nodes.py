"""Two launchers of one engine, as on two hosts: rank 0's serves, the other follows it, and either may end and come back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.server.test_ranks import LIMITS, LONG, PROMPT, followers_of
from tests.support.door_processes import write_keys
from tests.support.live_server import live_server
from tests.support.server_streams import tokens
from tests.support.waiting import is_running, wait_for

from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.server import serve_openai
from kvseek.server.launch import LOOPBACK
from kvseek.server.ports import Ports
from kvseek.server.serve import main
from kvseek.server.settings import ServeSettings
from kvseek.server.triton.repository import write_models

KEY = "a key of the test's own"


@contextmanager
def node(directory: Path, log: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher of node 1; it may wait for rank 0."""
    command = [sys.executable, "-m", "kvseek.cli.main", "serve", "--engine_dir", str(directory), "--node_rank", "1"]
    with subprocess.Popen([*command, "--log", str(log), *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


@pytest.fixture
def endpoint() -> Iterator[str]:
    with Ports(0, 0, 0, 0).hold(LOOPBACK, socket.SO_REUSEADDR) as ports:
        yield f"{LOOPBACK}:{ports.http}"


@pytest.fixture
def of_two(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    """An engine of two ranks."""
    return build_engine(random_model("llama", max_position_embeddings=4000), "full", *LIMITS, "--tp_size", "2")


@pytest.mark.server
@pytest.mark.slow
def test_an_engine_on_two_nodes(
    random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("llama", max_position_embeddings=4000)
    (expected,) = Engine.load(build_engine(model, "full", *LIMITS)).generate([Request(PROMPT, 8)])
    directory = build_engine(model, "full", *LIMITS, "--tp_size", "2")
    key = write_keys(tmp_path / "key", KEY)
    place = ("--nnodes", "2", "--rdzv_endpoint", endpoint)
    monkeypatch.setenv("KVSEEK_RANKS_KEY", KEY)  # of rank 0's; the other has the file
    flags = ("--threads", "1", "--hang_seconds", "8")
    start = lambda name: node(directory, tmp_path / name, *place, "--ranks_key_file", str(key), *flags)  # noqa: E731
    with start("node.log") as follower, live_server(directory, tmp_path / "server.log", *place) as server:
        assert follower.stdout.readline() == f"ready: ranks 1 follow rank 0 at {endpoint}\n"
        for route in ("grpc", "http_stream"):
            assert tokens(server, route, PROMPT, 8).join().ids == expected
        ranks = followers_of(follower.pid)
        assert len(ranks) == 1

        engine = server.process_ids()["engine"]
        stream = tokens(server, "grpc", PROMPT, LONG).begun()
        follower.kill()  # the whole node, with its ranks
        error = stream.join().error
        assert "(node 1 at 127.0.0.1): its connection is closed, so its process or its host has ended" in error
        assert "rank 1" in error
        wait_for(lambda: not any(map(is_running, ranks)), "the end of the node's rank")
        server.wait_replaced("engine", engine)
        assert not server.is_ready()

        with start("node2.log") as second:  # the node is there again
            server.wait_ready()
            assert tokens(server, "grpc", PROMPT, 8).join().ids == expected
            second.stdout.readline()
            ranks, engine = followers_of(second.pid), server.process_ids()["engine"]
            os.kill(ranks[0], signal.SIGSTOP)
            wait_for(lambda: not is_running(ranks[0]), "the end of a rank that does not answer its launcher")
            assert tokens(server, "grpc", PROMPT, 8).join().error  # rank 0 finds it when it needs it
            server.wait_replaced("engine", engine)
            server.wait_ready()
            assert tokens(server, "grpc", PROMPT, 8).join().ids == expected
            assert not set(ranks) & set(followers_of(second.pid)), "it has been started again, as rank 0 has"
            second.terminate()
            assert second.wait(60) == 0


@pytest.mark.server
@pytest.mark.slow
def test_a_node_with_another_engine_is_told_so(
    random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("llama", max_position_embeddings=4000)
    directory = build_engine(model, "full", *LIMITS, "--tp_size", "2")
    other = build_engine(model, "full", *LIMITS, "--tp_size", "2", "--max_input_len", "300")
    monkeypatch.setenv("KVSEEK_RANKS_KEY", KEY)
    place = ("--nnodes", "2", "--rdzv_endpoint", endpoint)
    command = [sys.executable, "-m", "kvseek.cli.main", "serve", "--engine_dir", str(directory), *place]
    command += ["--http_port", "0", "--grpc_port", "0", "--metrics_port", "0", "--openai_port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as leader:
        try:
            with node(other, tmp_path / "other.log", *place) as follower:
                assert follower.wait(120) == 1
            assert "refuses rank 1: fingerprint = " in (tmp_path / "other.log").read_text()
            assert leader.poll() is None, "rank 0 waits for the right one"
        finally:
            leader.terminate()


PLACE = ("--rdzv_endpoint", "127.0.0.1:7000")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--nnodes", "2"), "rdzv_endpoint = None: must be HOST:PORT with nnodes = 2"),
        (("--node_rank", "1"), "node_rank = 1: must be in [0, 0]"),
        (PLACE, "rdzv_endpoint = '127.0.0.1:7000': must be left out with nnodes = 1"),
        ((*PLACE, "--nnodes", "3"), "nnodes = 3: must be a divisor of tp_size = 2"),
        ((*PLACE, "--nnodes", "2", "--node_rank", "2"), "node_rank = 2: must be in [0, 1]"),
        ((*PLACE, "--nnodes", "2", "--replicas", "2"), "nnodes = 2: must be 1 with --replicas"),
        (
            (*PLACE, "--nnodes", "2", "--node_rank", "1", "--http_port", "80"),
            "http_port = 80: must be left out with --node_rank 1",
        ),
        (
            (*PLACE, "--nnodes", "2", "--node_rank", "1", "--max_logits", "9"),
            "max_logits = 9: must be left out with --node_rank 1",
        ),
    ],
)
def test_what_nodes_cannot_be_is_refused_at_once(
    flags: tuple[str, ...],
    message: str,
    of_two: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys: tests/engine/parallel/test_nodes.py."""
    monkeypatch.setenv("KVSEEK_RANKS_KEY", KEY)
    assert main(["--engine_dir", str(of_two), *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_page_that_could_show_nothing_is_refused_at_once(
    of_two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by the engine, with each question that the page sends."""
    write_models(tmp_path / "models", of_two, ServeSettings())
    assert main(["--engine_dir", str(of_two), "--ui"]) == 1
    assert serve_openai.main(["--repository", str(tmp_path / "models"), "--openai_port", "0", "--ui"]) == 1
    refusal = "error: --ui = True: must be left out with --runtime tensorrt, --tp_size above 1, or "
    assert capsys.readouterr().err.count(refusal) == 2

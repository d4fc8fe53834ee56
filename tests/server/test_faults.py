"""Faults of a real server: killed and stopped processes, damaged files, a full disk, shutdown."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from tests.server.soak.engine import build_soak_engine
from tests.server.soak.runner import ENDED
from tests.support.live_server import LiveServer, live_server, serve_command
from tests.support.server_streams import TIMEOUT, Stream, tokens
from tests.support.waiting import is_running, wait_for

from kvseek.server.scratch import scratch_folder

pytestmark = [pytest.mark.server, pytest.mark.slow]

DOCUMENT = tuple((7 * i) % 380 for i in range(1400))  # of more than one extent
PROMPT, SHORT, LONG = tuple(range(5, 45)), 8, 2900  # LONG takes many seconds, so that it runs when something happens
ROUTES = ("grpc", "http_stream")
ERROR_SECONDS = 20.0  # from the death of a process to the errors of its clients: before --hang_seconds, 60, have passed


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_soak_engine(tmp_path_factory.mktemp("soak"), "full", extents=12)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps prefixes."""
    return tmp_path_factory.mktemp("disk") / "prefixes"


@pytest.fixture(scope="module")
def server(directory: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its log is on a full disk, which is no fault. The last test that has it ends it."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    flags = ("--restarts", "20", "--log", "/dev/full", "--drain_seconds", "2", "--disk_dir", str(disk))
    with live_server(directory, log, *flags) as server:
        yield server


def running(server: LiveServer, route: str, count: int = LONG) -> Stream:
    return tokens(server, route, PROMPT, count).begun()


def check_serves(server: LiveServer) -> list[int]:
    """Both doors give the same tokens; one that has to connect to a process again may take a little. Returns them."""
    found = []
    for route in ROUTES:
        wait_for(lambda route=route: tokens(server, route, PROMPT, SHORT).join().count == SHORT, f"served by {route}")
        found.append(tokens(server, route, PROMPT, SHORT).join().ids)
    assert found[0] == found[1]
    assert len(found[0]) == SHORT
    return found[0]


def test_prefixes_outlive_a_killed_engine(server: LiveServer) -> None:
    """The first test that has the server: nothing else is on disk."""
    expected = tokens(server, "grpc", DOCUMENT, SHORT).join().ids
    wait_for(lambda: server.metric("kvseek:prefix_disk_files") == 2, "both extents on disk")
    pid = server.kill("engine")
    server.wait_replaced("engine", pid)
    server.wait_ready()
    assert tokens(server, "http_stream", DOCUMENT, SHORT).join().ids == expected
    assert server.metric("kvseek:prefix_disk_loaded_tokens_total") == len(DOCUMENT) - 1


@pytest.mark.parametrize(
    ("name", "breaks"),
    [
        ("engine", ROUTES),
        ("doors", ROUTES),
        ("triton", ("grpc",)),
        ("tensorrt_llm", ("grpc",)),
        ("tensorrt_llm_bls", ("grpc",)),
    ],
)
def test_a_killed_process_is_started_again_and_its_clients_are_told(
    server: LiveServer, name: str, breaks: tuple[str, ...]
) -> None:
    expected = check_serves(server)
    streams = {route: running(server, route) for route in ROUTES}
    pid = server.kill(name)
    killed_at = time.monotonic()
    for route in breaks:
        stream = streams[route].join()
        assert ENDED.search(stream.error), f"{route}: {stream.error!r}"
        if name != "tensorrt_llm_bls":  # not the model of these requests: Triton first ends its other work
            assert stream.ended_at - killed_at < ERROR_SECONDS, f"{route} was told late"
    server.wait_replaced(name, pid)
    server.wait_ready()
    assert check_serves(server) == expected
    for route in set(ROUTES) - set(breaks):
        streams[route].leave()
        assert streams[route].count > SHORT, "a stream that does not need the process goes on"


STOPPED = [  # together those whose ends do not hide each other's, with what is said of them
    {"engine": "engine has", "tensorrt_llm": "triton: its process /models/tensorrt_llm/ has"},
    {"triton": "triton has"},
    {"doors": "doors has"},
]


def test_stopped_processes_are_killed_and_started_again(directory: Path, tmp_path: Path) -> None:
    seconds = 8.0
    with live_server(directory, tmp_path / "server.log", "--hang_seconds", f"{seconds}") as server:
        expected = check_serves(server)
        for names in STOPPED:
            stream = running(server, "grpc")
            stopped = {name: server.kill(name, signal.SIGSTOP) for name in names}
            for name, pid in stopped.items():
                server.wait_replaced(name, pid)
                assert not is_running(pid)
            assert ENDED.search(stream.join().error), stream.error
            server.wait_ready()
            assert check_serves(server) == expected
        before = server.process_ids()
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            time.sleep(1.5 * seconds)
            assert check_serves(server) == expected, "the server goes on without its launcher"
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        time.sleep(3.0)  # in which the launcher asks all again
        assert server.process_ids() == before
    said = (tmp_path / "server.errors").read_text()
    for who in (text for names in STOPPED for text in names.values()):
        assert f"{who} not answered for 8 s (--hang_seconds) and is killed" in said


def test_a_stopped_engine_is_not_ready_until_it_goes_on(server: LiveServer) -> None:
    ready = f"http://{server.http_url}/v2/health/ready"
    pid = server.kill("engine", signal.SIGSTOP)
    try:
        wait_for(lambda: "has not answered for 10 s" in requests.get(ready, timeout=30).text, "not ready")
        assert requests.get(ready, timeout=30).status_code == 503
        live = requests.get(f"http://{server.http_url}/v2/health/live", timeout=5).status_code
        assert live == 200, "a server that comes back is not to be killed"
    finally:
        os.kill(pid, signal.SIGCONT)
    server.wait_ready()
    assert server.process_ids()["engine"] == pid, "it went on within --hang_seconds"
    check_serves(server)


def damage(directory: Path) -> None:
    """Replace a byte of the weights; by another file, as the one in use must stay as it is."""
    (weights,) = (path for path in directory.rglob("*.safetensors") if path.stat().st_size > 10_000)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 0x40
    copy = weights.with_suffix(".new")
    copy.write_bytes(data)
    copy.replace(weights)


def test_a_damaged_engine_does_not_start(directory: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(directory, tmp_path / "engine"))
    damage(copy)
    result = subprocess.run(serve_command(copy), capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert result.returncode == 1
    assert re.search(r"error: .*\.safetensors", result.stderr), result.stderr
    assert "Traceback" not in result.stderr


def test_an_engine_damaged_while_it_is_served_ends_the_server_after_its_restarts(
    directory: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(directory, tmp_path / "engine"))
    log = tmp_path / "server.log"
    with live_server(copy, log, "--restarts", "1") as server:
        damage(copy)
        check_serves(server)
        server.kill("engine")
        assert server.process.wait(TIMEOUT) == 1
    errors = log.with_suffix(".errors").read_text()
    assert "after 1 restarts in a row (--restarts)" in errors
    assert ".safetensors" in errors, "the end of the log says why"


def test_sigterm_lets_streams_finish_and_ends_the_others_as_shutdown(server: LiveServer) -> None:
    """The server is gone then."""
    long = [running(server, route) for route in ROUTES]
    short = [running(server, route, 60) for route in ROUTES]
    server.process.terminate()
    wait_for(lambda: not server.is_ready(), "not ready any more")
    late = [tokens(server, route, PROMPT, SHORT) for route in ROUTES]
    assert [stream.join().reason for stream in long] == ["shutdown", "shutdown"]
    assert all(0 < stream.count < LONG for stream in long)
    assert [stream.join().reason for stream in short] == ["length", "length"]
    for stream in late:
        assert not stream.join().pieces
        assert ENDED.search(stream.error), stream.error
        assert stream.status in (0, 503)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(TIMEOUT)
    assert server.process.returncode == 0


def test_prefixes_outlive_a_restart_and_nothing_else_outlives_the_launcher(
    directory: Path, disk: Path, tmp_path: Path
) -> None:
    """No process, though all are stopped, and after the next start no folder and no shared memory."""
    with live_server(directory, tmp_path / "server.log", "--disk_dir", str(disk)) as server:
        assert tokens(server, "grpc", DOCUMENT, SHORT).join().count == SHORT
        assert server.metric("kvseek:prefix_disk_loaded_tokens_total") == len(DOCUMENT) - 1
        others = [pid for name, pid in server.process_ids().items() if name != "serve"]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(TIMEOUT)
        wait_for(lambda: not any(is_running(pid) for pid in others), "the end of all processes")
        assert server.engine_socket.parent.exists()
    with scratch_folder() as folder:  # of another server
        assert folder.exists()
        assert not server.engine_socket.parent.exists()
        assert not server.shared_memory()

"""A whole server with an API key: what asks for it, and that no other user of the machine sees keys, prompts or answers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.door_processes import write_keys
from tests.support.live_server import command_line

from kvseek.client import chat
from kvseek.client.errors import ClientError
from kvseek.client.grpc_client import GrpcClient
from kvseek.client.text_models import GenerateOptions
from kvseek.server.errors import ServerError
from kvseek.server.launch import RunningServer, running_server
from kvseek.server.ports import CLOSED, Ports
from kvseek.server.processes import Child, Guard, Program
from kvseek.server.scratch import SHARED_MEMORY, SHARED_MEMORY_PREFIX
from kvseek.server.settings import ServeSettings

KEY = "0123456789abcdef" * 4
SECONDS = 60.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_keys(tmp_path_factory.mktemp("keys") / "keys", KEY)


@pytest.fixture(scope="module")
def server(directory: Path, keys: Path) -> Iterator[RunningServer]:
    settings = ServeSettings(threads=1, api_key_file=str(keys))
    with running_server(directory, ports=Ports(CLOSED, 0, CLOSED, 0), settings=settings) as server:
        yield server


@pytest.mark.server
def test_clients_over_grpc_need_the_key(server: RunningServer, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = GenerateOptions(max_tokens=3, end_id=-1)
    assert list(GrpcClient(server.grpc_url, SECONDS, api_key=KEY).generate_stream("a ship", options))
    with pytest.raises(ClientError, match="has none of the server's API keys"):
        list(GrpcClient(server.grpc_url, SECONDS).generate_stream("a ship", options))
    flags = ["--url", server.grpc_url, "--prompt", "a ship", "--max_tokens", "3", "--no-chat_template", "--json"]
    assert chat.main([*flags, "--api_key_file", str(keys)]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 3
    keys.chmod(0o644)
    assert chat.main([*flags, "--api_key_file", str(keys)]) == 1
    assert "so others may read it: must be 0600" in capsys.readouterr().err
    keys.chmod(0o600)


@pytest.mark.server
def test_no_secret_is_on_a_command_line(server: RunningServer) -> None:
    """Every user of the machine sees those: nothing there is long enough for a key."""
    for name, pid in server.process_ids().items():
        command = command_line(pid)
        assert command, name
        assert not re.search("[0-9a-f]{32}", command), name


@pytest.mark.server
def test_no_process_leaves_a_core_dump_or_readable_memory(server: RunningServer) -> None:
    pids = server.process_ids()
    assert len(pids) == 5, "engine, doors, Triton and its models"
    for name, pid in pids.items():
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(r"Max core file size +0 +0 ", limits), name
    scratch = re.search(r"--model-repository=(\S+?)/models", command_line(pids["triton"]).replace("\0", " "))
    regions = list(SHARED_MEMORY.glob(f"{SHARED_MEMORY_PREFIX}{Path(scratch[1]).name}*"))
    assert regions
    assert {region.stat().st_mode & 0o777 for region in regions} == {0o600}


@pytest.mark.server
def test_triton_takes_requests_in_a_folder_of_the_servers_user_alone(server: RunningServer) -> None:
    """Every program of the machine could ask at a port."""
    triton = command_line(server.process_ids()["triton"]).split("\0")
    (address,) = (word for word in triton if word.startswith("--grpc-address="))
    assert address.startswith("--grpc-address=unix:/")
    assert Path(address.partition("unix:")[2]).parent.stat().st_mode & 0o777 == 0o700


def test_one_port_at_which_health_is_asked_stays_open(directory: Path) -> None:
    with (
        pytest.raises(ServerError, match="--http_port, --metrics_port, --openai_port = off: one must be open"),
        running_server(directory, ports=Ports(CLOSED, 0, CLOSED, CLOSED)),
    ):
        pass


def test_core_dumps_can_be_asked_for() -> None:
    code = "import resource; raise SystemExit(resource.getrlimit(resource.RLIMIT_CORE) == (0, 0))"
    guard = Guard()
    try:
        for asked in (False, True):
            program = Program("one", (sys.executable, "-c", code), 60.0, core_dumps=asked)
            assert Child(program, None, guard, SECONDS).process.wait(SECONDS) == (not asked)
    finally:
        guard.end()

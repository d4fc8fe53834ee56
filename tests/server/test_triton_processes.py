"""Triton's process of the text model under cancelled and finished streams: nothing of Python is freed without its lock."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvseek.builder.compile.cpu import find_compiler
from kvseek.client.grpc_client import GrpcClient
from kvseek.client.text_models import GenerateOptions
from kvseek.server.launch import running_server
from kvseek.server.settings import ServeSettings

pytestmark = pytest.mark.server

TIMEOUT = 60.0
OPTIONS = GenerateOptions(max_tokens=20, end_id=-1)
CHUNKS = (1, 2, 3, 5, 8, 20) * 4  # what each client reads before it leaves; 20 is all


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("probe") / "gil_probe.so"
    source = Path(__file__).with_name("gil_probe.cpp")
    command = [*find_compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library


def read_and_leave(url: str, chunks: int) -> int:
    """Read so many chunks of an answer, and cancel what is left of it."""
    stream = GrpcClient(url, TIMEOUT).generate_stream("the harbour master", OPTIONS)
    read = [chunk for chunk, _ in zip(stream, range(chunks), strict=False)]
    stream.close()  # type: ignore[attr-defined]
    return len(read)


def test_objects_are_freed_under_the_interpreter_lock(
    directory: Path, probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not breaks Python's allocator: the process crashes some hundreds of streams later."""
    report = tmp_path / "report"
    monkeypatch.setenv("LD_PRELOAD", str(probe))
    monkeypatch.setenv("KVSEEK_GIL_PROBE", str(report))
    with running_server(directory, settings=ServeSettings(threads=1)) as server:
        process = server.process_ids()["/models/tensorrt_llm_bls/"]
        with ThreadPoolExecutor(6) as pool:
            assert tuple(pool.map(lambda chunks: read_and_leave(server.grpc_url, chunks), CHUNKS)) == CHUNKS
        lines = report.read_text().splitlines()
    assert f"{process} watched" in lines, "the probe is in that process"
    assert not [line for line in lines if line.endswith("unsafe")]

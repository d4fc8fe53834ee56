"""The HTTP door when what it needs is away, dies or hangs, and with clients that are too slow."""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import requests
from tests.conftest import BuildEngine, RandomModel
from tests.support.door_processes import CLOSED_PORT, Door, doors, events, reply
from tests.support.waiting import SECONDS, wait_for
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvseek.core.request import StepOutput
from kvseek.server.errors import ServerError
from kvseek.server.frontend import Frontend
from kvseek.server.ports import Ports
from kvseek.server.processes import require_open_files
from kvseek.server.requests.engine_client import (
    UNSOUND_REQUESTS,
    FromFrontend,
    Metrics,
    Outputs,
    Ping,
    Pong,
    ReadMetrics,
    Submit,
    frame,
    read_frame,
)
from kvseek.server.settings import ServeSettings

SETTINGS = ServeSettings(threads=1, max_queue_size=8, drain_seconds=3.0)
TOKENS = {"input_ids": [5, 6, 7, 8], "request_output_len": 6, "end_id": -1}
STREAM = TOKENS | {"streaming": True}
PATH = "tensorrt_llm/generate"


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    model = random_model("llama", max_position_embeddings=20_000)
    return build_engine(model, "full", "--max_batch_size", "2", "--max_seq_len", "20000", "--max_input_len", "800")


class FakeEngine:
    """An engine process in a thread, which gives every request some outputs and then hangs or, when told to, goes away."""

    def __init__(self, path: Path, outputs: Sequence[StepOutput] = (StepOutput(1, token_id=7),)) -> None:
        self.outputs, self.submitted = outputs, 0
        self._path, self._writers = path, list[asyncio.StreamWriter]()
        self.answering, self.draining, self.unsound = True, False, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_unix_server(self._connected, str(path)), self._loop
        ).result()

    def die(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        for writer in self._writers:
            self._loop.call_soon_threadsafe(writer.transport.abort)
        self._path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        decoder = msgspec.msgpack.Decoder(FromFrontend)
        while True:
            try:
                message = await read_frame(reader, decoder)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if isinstance(message, Submit):
                self.submitted += 1
                writer.write(frame(Outputs([(message.number, output) for output in self.outputs])))
            elif isinstance(message, Ping) and self.answering:
                writer.write(frame(Pong(message.number, 0, 1, self.draining, self.unsound)))
            elif isinstance(message, ReadMetrics):
                writer.write(frame(Metrics(message.number, "kvseek:fake 1\n")))


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Triton's gRPC endpoint, as far as the door asks it."""

    ready = True

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=self.ready)

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        if request.name != "tensorrt_llm":
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model: '{request.name}' is not found")
        tensor = service_pb2.ModelMetadataResponse.TensorMetadata(name="input_ids", datatype="INT32", shape=[-1, -1])
        return service_pb2.ModelMetadataResponse(name=request.name, versions=["1"], platform="python", inputs=[tensor])


@contextmanager
def triton() -> Iterator[tuple[FakeTriton, str]]:
    server, fake = grpc.server(ThreadPoolExecutor(2)), FakeTriton()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield fake, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def ready(door: Door) -> tuple[int, str]:
    response = requests.get(f"{door.url}/health/ready", timeout=SECONDS)
    return response.status_code, response.json()["error"] if response.content else ""


def test_readiness_follows_the_engine_and_triton(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with triton() as (fake, target), doors(directory, path, SETTINGS, target) as door:
        assert requests.get(f"{door.url}/health/live", timeout=SECONDS).status_code == 200
        wait_for(lambda: ready(door) == (503, "not ready: the engine process does not run, or is loading the engine"))
        engine = FakeEngine(path)
        wait_for(lambda: ready(door) == (200, ""))
        assert requests.get(f"{door.url}/models/tensorrt_llm/versions/1/ready", timeout=SECONDS).status_code == 200
        engine.draining = True
        wait_for(lambda: ready(door) == (503, "not ready: the server is shutting down"))
        engine.draining, fake.ready = False, False
        wait_for(lambda: ready(door) == (503, "not ready: Triton does not answer on its gRPC port, or is not ready"))
        fake.ready = True
        wait_for(lambda: ready(door) == (200, ""))
        engine.unsound = UNSOUND_REQUESTS
        wait_for(lambda: "the last 5 requests ended because their logits were not finite" in ready(door)[1])
        engine.unsound = UNSOUND_REQUESTS - 1
        wait_for(lambda: ready(door) == (200, ""))
        engine.die()
        wait_for(lambda: "does not run" in ready(door)[1])


def test_a_triton_that_dies_is_noticed_between_two_questions(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with contextlib.ExitStack() as stack:
        _, target = stack.enter_context(triton())
        with doors(directory, path, SETTINGS, target) as door:
            engine = FakeEngine(path)
            wait_for(lambda: ready(door) == (200, ""))
            answers = [(time.sleep(0.05), ready(door)[0])[1] for _ in range(30)]
            assert answers == [200] * 30, "readiness does not come and go"
            stack.close()
            wait_for(lambda: ready(door)[0] == 503)
            engine.die()


def test_model_metadata_is_tritons(directory: Path, tmp_path: Path) -> None:
    with triton() as (_, target), doors(directory, tmp_path / "engine.sock", SETTINGS, target) as door:
        metadata = requests.get(f"{door.url}/models/tensorrt_llm", timeout=SECONDS).json()
        assert metadata == {
            "name": "tensorrt_llm",
            "versions": ["1"],
            "platform": "python",
            "inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [-1, -1]}],
            "outputs": [],
        }
        response = requests.get(f"{door.url}/models/nothing", timeout=SECONDS)
        assert (response.status_code, response.json()["error"]) == (404, "unknown model: 'nothing' is not found")


@contextmanager
def faked(directory: Path, tmp_path: Path, *arguments: Any) -> Iterator[tuple[FakeEngine, Door]]:
    path = tmp_path / "engine.sock"
    engine = FakeEngine(path)
    with doors(directory, path, SETTINGS, *arguments) as door:
        wait_for(lambda: 'process="engine"} 1' in door.metrics())
        yield engine, door
        engine.die()


def test_an_engine_that_goes_away_ends_streams_and_answers(directory: Path, tmp_path: Path) -> None:
    with faked(directory, tmp_path) as (engine, door):
        whole = door.send(PATH, TOKENS)
        with door.post(f"{PATH}_stream", STREAM, stream=True) as response:
            stream = events(response)
            assert next(stream)["output_ids"] == 7
            wait_for(lambda: engine.submitted == 2, "the other request")
            engine.die()
            (error,) = stream
            assert "the engine process ended" in error["error"]
            status, answer = reply(whole)
            assert (status, "the engine process ended" in answer["error"]) == (503, True)
        refused = door.post(PATH, TOKENS)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")


def test_an_engine_that_hangs_does_not_keep_the_door_from_ending(directory: Path, tmp_path: Path) -> None:
    with faked(directory, tmp_path) as (engine, door), door.send(PATH, TOKENS):
        wait_for(lambda: engine.submitted == 1, "the request")
        door.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        engine.die()
        assert door.process.wait(SECONDS) == 0


def test_metrics_end_with_tritons(directory: Path, tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"nv_inference_count 5\n")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state = tmp_path / "restarts.json"
    state.write_text('{"engine": 2, "doors": 0}')
    address = f"127.0.0.1:{server.server_port}"
    with faked(directory, tmp_path, CLOSED_PORT, address, "--state", str(state)) as (_, door):
        lines = door.metrics().splitlines()
    server.shutdown()
    for line in ("kvseek:fake 1", "nv_inference_count 5", 'kvseek:up{process="triton"} 1'):
        assert line in lines
    assert any("restarts" in line and 'process="engine"' in line and line.endswith(" 2.0") for line in lines)


def in_process(directory: Path, tmp_path: Path, check: Any, **seconds: float) -> None:
    """Run `check(port)` in a thread against a door of this process with other time limits."""

    async def serve() -> None:
        door = Frontend(directory, tmp_path / "engine.sock", SETTINGS, CLOSED_PORT, CLOSED_PORT, **seconds)
        try:
            ports = await door.start("127.0.0.1", Ports(0, 0, 0, 0))
            await asyncio.to_thread(check, Door(None, ports.http, ports.metrics, ports.openai))  # type: ignore[arg-type]
        finally:
            await door.close()

    asyncio.run(serve())


def test_bodies_that_come_too_slowly_are_given_up(directory: Path, tmp_path: Path) -> None:
    def check(door: Door) -> None:
        slow = door.connect(PATH, b'{"input_ids": ', "Content-Length: 1000000")
        with contextlib.suppress(ConnectionError):  # the connection is closed behind the answer
            for _ in range(round(SECONDS / 0.1)):
                if select.select([slow], [], [], 0.1)[0]:
                    break
                slow.sendall(b" ")
        status, answer = reply(slow)
        assert (status, "a body must arrive" in answer["error"]) == (408, True)

    in_process(directory, tmp_path, check, body_seconds=0.5)


def test_limits_on_connections_that_open_files_do_not_suffice_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseek.server.processes.resource.getrlimit", lambda _: (1000, 1000))
    require_open_files(1000, 8)
    message = r"open files \(ulimit -n\) = 1,000: must be >= 1,001 for the connections .* --max_queue_size = 8; raise"
    with pytest.raises(ServerError, match=message):
        require_open_files(1001, 8)

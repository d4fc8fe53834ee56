"""The HTTP door over a real engine process: answers, refusals, and requests that end with their clients."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.conftest import BuildEngine, RandomModel
from tests.support.door_processes import CLOSED_PORT, Door, doors, engine_process, events, reply, write_keys
from tests.support.waiting import SECONDS, wait_for

from kvseek.client.errors import ClientError
from kvseek.client.http_client import HttpClient
from kvseek.client.text_models import GenerateOptions
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.server.requests.engine_client import EngineClient, Pong
from kvseek.server.requests.models import INFLIGHT_BATCHER_LLM
from kvseek.server.settings import ServeSettings

TOKEN_MODEL, TEXT_MODEL = INFLIGHT_BATCHER_LLM.models
PROMPT = "the quick brown fox jumps over the lazy dog " * 4
SETTINGS = ServeSettings(threads=1, max_queue_size=4, drain_seconds=3.0)
SLOTS, QUEUE = 3, 4
KEYS = ("the-first-key-of-tests", "the-second-key-of-tests")
WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
TEXT = {"text_input": PROMPT, "max_tokens": 12, "end_id": -1, "exclude_input_in_output": True}
TOKENS = {"input_ids": [5, 6, 7, 8], "request_output_len": 6, "end_id": -1}
ENDLESS = {"text_input": PROMPT, "max_tokens": 19_000, "end_id": -1}  # some minutes
STREAM = ENDLESS | {"stream": True}


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    model = random_model("llama", max_position_embeddings=20_000)
    limits = ("--max_batch_size", str(SLOTS), "--max_seq_len", "20000", "--max_input_len", "800")
    return build_engine(model, "pariskv", *WINDOW, *limits, "--pariskv.top_k", "20")


@pytest.fixture(scope="module")
def engine_socket(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("run") / "engine.sock"
    with engine_process(directory, path, SETTINGS):
        yield path


@pytest.fixture(scope="module")
def door(directory: Path, engine_socket: Path) -> Iterator[Door]:
    with doors(directory, engine_socket, SETTINGS) as door:
        yield door


def load(path: Path) -> tuple[int, int]:
    """Requests of an engine process that run and that wait."""

    async def ask() -> Pong:
        client = EngineClient(path, asyncio.get_running_loop())
        try:
            while not client.connected:
                await asyncio.sleep(0.002)
            return await client.ping()
        finally:
            client.close()

    pong = asyncio.run(ask())
    return pong.running, pong.waiting


@contextlib.contextmanager
def busy(door: Door, engine_socket: Path, waiting: int = 0) -> Iterator[list[socket.socket]]:
    """All slots taken, and so many requests waiting, until the end."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(door.send(f"{TEXT_MODEL}/generate_stream", STREAM)) for _ in range(SLOTS)]
        wait_for(lambda: load(engine_socket) == (SLOTS, 0))
        clients += [stack.enter_context(door.send(f"{TEXT_MODEL}/generate", ENDLESS)) for _ in range(waiting)]
        wait_for(lambda: load(engine_socket) == (SLOTS, waiting))
        yield clients
    wait_for(lambda: load(engine_socket) == (0, 0))


def test_answers_are_the_engines(door: Door, engine: Engine) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    (tokens,) = engine.generate([Request(tuple(ids), 12)])
    answer = door.post(f"{TEXT_MODEL}/versions/1/generate", TEXT).json()
    assert answer["text_output"] == engine.tokenizer.decode(tokens)
    assert (answer["model_name"], answer["model_version"]) == (TEXT_MODEL, "1")
    (tokens,) = engine.generate([Request((5, 6, 7, 8), 6)])
    answer = door.post(f"{TOKEN_MODEL}/generate", TOKENS | {"id": "mine"}).json()
    assert (answer["output_ids"], answer["sequence_length"], answer["id"]) == ([5, 6, 7, 8, *tokens], 10, "mine")


def test_streams_have_every_token_and_one_end(door: Door, engine: Engine) -> None:
    (tokens,) = engine.generate([Request((5, 6, 7, 8), 6)])
    with door.post(f"{TOKEN_MODEL}/generate_stream", TOKENS | {"streaming": True}, stream=True) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        found = list(events(response))
    ids = [event["output_ids"] for event in found]  # one, or several that a busy door has found together
    assert [token for each in ids for token in (each if isinstance(each, list) else [each])] == tokens
    assert [event["finish_reason"] for event in found] == [""] * (len(found) - 1) + ["length"]
    options = GenerateOptions(max_tokens=12, end_id=-1, return_prefill_progress=True)
    chunks = list(HttpClient(f"127.0.0.1:{door.port}", SECONDS).generate_stream(PROMPT, options))
    assert "".join(chunk.text for chunk in chunks) == door.post(f"{TEXT_MODEL}/generate", TEXT).json()["text_output"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (f"{TEXT_MODEL}/generate", TEXT | {"max_tokens": 0}, 400, "max_tokens = 0: must be >= 1"),
        (f"{TEXT_MODEL}/generate", TEXT | {"max_tokens": 30_000}, 400, "must be <= max_seq_len = 20000"),
        (f"{TEXT_MODEL}/generate", TEXT | {"text_input": "word " * 1300}, 400, "must be <= max_input_len = 800"),
        (f"{TEXT_MODEL}/generate_stream", TEXT | {"top_p": 2}, 400, "top_p = 2.0: must be in [0, 1]"),
        (f"{TEXT_MODEL}/generate", TEXT | {"stream": True}, 400, "stream = true: must be false with generate"),
        (f"{TOKEN_MODEL}/generate", TOKENS | {"input_ids": [99_999]}, 400, "input_ids = 99999: must be in [0, "),
        (f"{TEXT_MODEL}/generate", b"[" * 300_000, 400, "not a JSON object"),
        (f"{TEXT_MODEL}/generate", b"x" * (2 << 20), 413, "must be <= "),
        ("nothing/generate", TEXT, 404, "model nothing is not found"),
        (f"{TEXT_MODEL}/versions/2/generate", TEXT, 404, "has no version 2"),
        (f"{TEXT_MODEL}/infer", {}, 400, "use generate or generate_stream"),
    ],
)
def test_bad_requests_are_refused(door: Door, path: str, body: Any, status: int, message: str) -> None:
    response = door.post(path, body)
    assert response.status_code == status
    assert message in response.json()["error"]


def test_administration_is_closed(door: Door) -> None:
    for method, path, status in (
        ("POST", "/repository/index", 403),
        ("POST", "/repository/models/tensorrt_llm/unload", 403),
        ("POST", "/systemsharedmemory/region/x/register", 403),
        ("POST", f"/models/{TEXT_MODEL}/trace/setting", 403),
        ("POST", "/logging", 403),
        ("GET", "/anything", 404),
        ("GET", f"/models/{TEXT_MODEL}/generate", 405),
        ("GET", "/models/nothing/ready", 404),
    ):
        response = requests.request(method, f"{door.url}{path}", timeout=SECONDS)
        assert (response.status_code, "error" in response.json()) == (status, True), path


def test_bodies_in_tiny_chunks(door: Door) -> None:
    connection = door.connect(f"{TEXT_MODEL}/generate", b"", "Transfer-Encoding: chunked")
    body = json.dumps(TEXT).encode()
    spaces = b"1\r\n \r\n" * 1000
    for _ in range(600):
        connection.sendall(spaces)
    connection.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    status, answer = reply(connection)
    assert (status, answer["finish_reason"]) == (200, "length")


def test_compressed_bodies_and_announced_sizes_are_refused_before_they_are_read(door: Door) -> None:
    path = f"{TEXT_MODEL}/generate"
    assert reply(door.connect(path, b"x", "Content-Encoding: gzip", "Content-Length: 9"))[0] == 415
    status, answer = reply(door.connect(path, b"", "Content-Length: 99999999999"))
    assert (status, answer["error"][:35]) == (413, "the body has 99999999999 bytes: mus")


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_a_client_that_leaves_cancels_its_request(door: Door, engine_socket: Path, endpoint: str) -> None:
    connection = door.send(f"{TEXT_MODEL}/{endpoint}", STREAM if endpoint == "generate_stream" else ENDLESS)
    wait_for(lambda: load(engine_socket) == (1, 0))
    if endpoint == "generate_stream":
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    connection.close()
    wait_for(lambda: load(engine_socket) == (0, 0), seconds=2.0)


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_a_client_that_leaves_the_queue_cancels_its_request(door: Door, engine_socket: Path, endpoint: str) -> None:
    with busy(door, engine_socket):
        connection = door.send(f"{TEXT_MODEL}/{endpoint}", STREAM if endpoint == "generate_stream" else ENDLESS)
        wait_for(lambda: load(engine_socket) == (SLOTS, 1))
        connection.close()
        wait_for(lambda: load(engine_socket) == (SLOTS, 0), seconds=2.0)


def test_a_text_with_too_many_tokens_is_refused_by_its_beginning(door: Door) -> None:
    response = door.post(f"{TEXT_MODEL}/generate", TEXT | {"text_input": "zq " * 2_333})
    assert response.status_code == 400
    assert re.search(
        r"tokens in its first [\d,]+ of 6,999 characters: must be <= max_input_len", response.json()["error"]
    )


def test_a_full_queue_refuses_with_429(door: Door, engine_socket: Path) -> None:
    with busy(door, engine_socket, waiting=QUEUE), ThreadPoolExecutor(8) as pool:
        path = f"{TEXT_MODEL}/generate_stream"
        for response in pool.map(lambda _: door.post(path, STREAM), range(16)):
            assert response.status_code == 429
            assert response.headers["Retry-After"]
            assert "max_queue_size" in response.json()["error"]
    assert door.post(f"{TEXT_MODEL}/generate", TEXT).status_code == 200


@pytest.fixture(scope="module")
def keyed(directory: Path, engine_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Doors of two keys, before the same engine; nothing listens at the gRPC port."""
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", *KEYS)
    settings = dataclasses.replace(SETTINGS, api_key_file=str(keys))
    with doors(directory, engine_socket, settings, CLOSED_PORT, CLOSED_PORT, "--grpc_port", "off") as door:
        wait_for(lambda: ask_with(door, KEYS[0]).status_code == 200, "an engine answers")
        yield door


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask_with(door: Door, key: str, **fields: Any) -> requests.Response:
    return door.post(f"{TOKEN_MODEL}/generate", TOKENS | fields, headers=bearer(key))


def test_every_port_asks_for_a_key_but_for_health_and_the_metrics_port(keyed: Door) -> None:
    """A key of one line of the file, at the HTTP and the OpenAI port alike; paths that are not there tell nothing."""
    http, openai = f"http://127.0.0.1:{keyed.port}", f"http://127.0.0.1:{keyed.openai_port}"
    model = f"{http}/v2/models/{TOKEN_MODEL}"
    guarded = [f"{http}/v2", model, f"{model}/config", f"{model}/stats", f"{http}/v2/models/stats", f"{http}/none"]
    guarded += [f"{http}/v2/repository/index", f"{openai}/v1/models", f"{openai}/metrics", f"{openai}/none"]
    for path in guarded:
        for headers in ({}, bearer("another key of any"), bearer(KEYS[0][:-1]), {"Authorization": KEYS[0]}):
            assert requests.get(path, headers=headers, timeout=SECONDS).status_code == 401, path
        for key in KEYS:
            assert requests.get(path, headers=bearer(key), timeout=SECONDS).status_code != 401, path
    for path in (f"{http}/v2/health/live", f"{http}/v2/health/ready", f"{model}/ready", f"{openai}/health"):
        assert requests.get(path, timeout=SECONDS).status_code != 401, path
    assert "kvseek:up" in keyed.metrics()
    for path in (f"{TOKEN_MODEL}/generate", f"{TOKEN_MODEL}/generate_stream", f"{TOKEN_MODEL}/infer", "x/ready"):
        assert keyed.post(path, TOKENS).status_code == 401, path
    assert ask_with(keyed, KEYS[1]).status_code == 200


def test_the_own_client_sends_a_key(keyed: Door) -> None:
    options, url = GenerateOptions(max_tokens=2, end_id=-1), f"127.0.0.1:{keyed.port}"
    assert HttpClient(url, api_key=KEYS[0]).generate(PROMPT, options).num_output_tokens == 2
    with pytest.raises(ClientError, match="has none of the server's API keys"):
        HttpClient(url).generate(PROMPT, options)


def test_each_key_shares_what_was_read_with_itself_alone(keyed: Door) -> None:
    prompt = {"input_ids": [9] * 600, "return_perf_metrics": True}
    rates = [ask_with(keyed, key, **prompt).json()["kv_cache_hit_rate"] for key in (*KEYS, *KEYS)]
    assert rates == [0, 0, 1, 1]


def test_stop_ends_the_request_of_the_same_id_and_key(keyed: Door, engine_socket: Path) -> None:
    """One of another key is answered like one of an id that nobody has."""
    data = json.dumps(TOKENS | {"request_output_len": 19_000, "id": "long"}).encode()
    headers = (f"Content-Length: {len(data)}", f"Authorization: Bearer {KEYS[0]}")
    connection = keyed.connect(f"{TOKEN_MODEL}/generate", data, *headers)
    wait_for(lambda: load(engine_socket) == (1, 0))
    unknown, others = (ask_with(keyed, KEYS[1], stop=True, id=name) for name in ("nobody's", "long"))
    assert unknown.json() | {"id": "long"} == others.json()
    time.sleep(0.5)
    assert load(engine_socket) == (1, 0), "another's runs on"
    assert ask_with(keyed, KEYS[0], stop=True, id="long").status_code == 200
    status, answer = reply(connection)
    assert (status, answer["finish_reason"]) == (200, "cancelled")


def test_without_keys_nobody_stops_a_request_over_http(door: Door, engine_socket: Path) -> None:
    connection = door.send(f"{TOKEN_MODEL}/generate", TOKENS | {"request_output_len": 19_000, "id": "long"})
    wait_for(lambda: load(engine_socket) == (1, 0))
    refused = door.post(f"{TOKEN_MODEL}/generate", TOKENS | {"stop": True, "id": "long"})
    assert refused.status_code == 400
    assert "over HTTP needs an API key" in refused.json()["error"]
    assert load(engine_socket) == (1, 0)
    connection.close()
    wait_for(lambda: load(engine_socket) == (0, 0))


@pytest.mark.parametrize("names", [("http", "grpc"), ("metrics", "openai")])
def test_ports_can_be_closed(names: tuple[str, str], directory: Path, tmp_path: Path) -> None:
    flags = [word for name in names for word in (f"--{name}_port", "off")]
    with doors(directory, tmp_path / "none.sock", SETTINGS, CLOSED_PORT, CLOSED_PORT, *flags) as door:
        assert (door.port, door.metrics_port, door.openai_port).count(0) == (1 if "http" in names else 2)
        assert len(listening(door.process.pid)) == 2


def listening(pid: int) -> set[str]:
    """Sockets of TCP at which a process listens."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return sockets & {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}


def test_a_time_limit_in_the_queue_is_a_504(door: Door, engine_socket: Path) -> None:
    with busy(door, engine_socket):
        response = door.post(f"{TEXT_MODEL}/generate", TEXT | {"timeout": 0.3})
    assert response.status_code == 504
    assert response.json()["error"].startswith("timeout = 0.3 s: passed"), "as the client has sent it"


def test_metrics_without_triton(door: Door) -> None:
    lines = door.metrics().splitlines()
    assert 'kvseek:up{process="engine"} 1' in lines
    assert 'kvseek:up{process="triton"} 0' in lines
    assert any(line.startswith("kvseek:generation_tokens_total") for line in lines)

"""The OpenAI door with API keys, without an engine, when the engine dies, and with clients that are too slow."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from openai import OpenAI
from tests.conftest import BuildEngine, RandomModel
from tests.support.door_processes import Door, doors, engine_process, write_keys
from tests.support.metrics import running
from tests.support.waiting import SECONDS, wait_for

from kvseek.server.errors import ServerError
from kvseek.server.launch import running_server
from kvseek.server.settings import ServeSettings

NAME, KEY = "org/my model", "sk-one-of-the-tests"
ASK: dict[str, Any] = {"model": NAME, "prompt": [5, 6], "max_tokens": 3}
ENDLESS = ASK | {"max_tokens": 15_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    model = random_model("llama", max_position_embeddings=20_000)
    return build_engine(model, "full", "--max_batch_size", "2", "--max_seq_len", "20000", "--max_input_len", "800")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServeSettings:
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", "another-of-the-tests", KEY)
    return ServeSettings(threads=1, drain_seconds=1.0, served_model_name=NAME, api_key_file=str(keys))


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("socket") / "engine.sock"


@pytest.fixture(scope="module")
def door(directory: Path, socket_path: Path, settings: ServeSettings) -> Iterator[Door]:
    with doors(directory, socket_path, settings) as door:
        yield door


@pytest.fixture(scope="module")
def engine(directory: Path, socket_path: Path, settings: ServeSettings, door: Door) -> Iterator[Any]:
    with engine_process(directory, socket_path, settings) as process:
        client = door.openai_client(KEY)
        wait_for(lambda: answers(client), "the door has found the engine")
        yield process


def answers(client: OpenAI) -> bool:
    try:
        return bool(client.completions.create(**ASK).choices)
    except openai.InternalServerError:
        return False


def test_without_an_engine_requests_are_503(door: Door) -> None:
    """Before any test that starts one."""
    with pytest.raises(openai.InternalServerError, match="the engine is not running") as caught:
        door.openai_client(KEY).completions.create(**ASK)
    assert caught.value.status_code == 503
    assert caught.value.code == "engine_unavailable"
    assert caught.value.response.headers["Retry-After"] == "1"
    health = requests.get(f"{door.openai_url.removesuffix('/v1')}/health", timeout=SECONDS)
    assert health.status_code == 503
    assert "the engine process does not run" in health.json()["error"]["message"]


def test_a_wrong_key_is_401_everywhere_but_for_health(door: Door) -> None:
    for key in ("wrong", KEY[:-1], KEY + "x"):
        with pytest.raises(openai.AuthenticationError, match="none of the server's API keys") as caught:
            door.openai_client(key).models.list()
        assert caught.value.code == "invalid_api_key"
    root = door.openai_url.removesuffix("/v1")
    for path in ("v1/models", "v1/nothing", "metrics"):
        response = requests.get(f"{root}/{path}", timeout=SECONDS)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
    assert requests.post(f"{door.openai_url}/completions", data=b"{", timeout=SECONDS).status_code == 401
    assert requests.get(f"{root}/health", timeout=SECONDS).status_code == 503
    assert requests.get(f"{root}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=SECONDS).ok


def test_the_model_has_the_name_that_serve_gives_it(door: Door, engine: Any) -> None:
    client = door.openai_client(KEY)
    assert [card.id for card in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME, "a slash in the name is part of the path"
    assert client.completions.create(**ASK).model == NAME


def test_the_doors_end_although_a_stream_runs(
    directory: Path, socket_path: Path, settings: ServeSettings, door: Door, engine: Any
) -> None:
    with doors(directory, socket_path, settings) as other:
        wait_for(lambda: answers(other.openai_client(KEY)))
        headers = {"Authorization": f"Bearer {KEY}"}
        with requests.post(
            f"{other.openai_url}/completions", json=ENDLESS, headers=headers, stream=True, timeout=SECONDS
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith(b"data: {")
            other.process.terminate()
            assert other.process.wait(SECONDS) == 0
            with contextlib.suppress(requests.RequestException):
                assert b"data: [DONE]" not in list(lines), "the answer was not complete"
    wait_for(lambda: running(f"127.0.0.1:{door.metrics_port}") == 0, "its request is cancelled")


def test_a_file_without_keys_stops_the_start(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    settings = ServeSettings(api_key_file=str(tmp_path / "keys"))
    with pytest.raises(ServerError, match="--api_key_file"), running_server(directory, settings=settings):
        pass


def test_an_engine_that_dies_ends_streams_with_an_error_event_and_others_with_503(door: Door, engine: Any) -> None:
    """The last test of this file, as it leaves no engine behind."""
    body = json.dumps(ENDLESS | {"stream": False}).encode()
    endless = ASK | {"max_tokens": 15_000}
    with socket.create_connection(("127.0.0.1", door.openai_port), SECONDS) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        stream = door.openai_client(KEY).completions.create(**endless, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        wait_for(lambda: running(f"127.0.0.1:{door.metrics_port}") == 2, "both run")
        engine.kill()
        with pytest.raises(openai.APIError, match="the engine process ended"):
            list(stream)
        assert connection.recv(4096).startswith(b"HTTP/1.1 503")

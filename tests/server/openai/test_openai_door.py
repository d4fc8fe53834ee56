"""The OpenAI door of two API keys and a real engine process: without it, sessions, tenants, and when either of them ends."""

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
from tests.support.metrics import metric, running
from tests.support.waiting import SECONDS, wait_for

from kvseek.server.errors import ServerError
from kvseek.server.launch import running_server
from kvseek.server.settings import ServeSettings

pytestmark = pytest.mark.server

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
NAME, KEYS = "org/my model", ("the-first-key-of-tests", "the-second-key-of-tests")
BEARER = {"Authorization": f"Bearer {KEYS[0]}"}
STORY = "the light was lit at dusk " * 40
ASK: dict[str, Any] = {"model": NAME, "prompt": [5, 6], "max_tokens": 3}
ENDLESS = ASK | {"max_tokens": 15_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    model = random_model("llama", max_position_embeddings=20_000)
    return build_engine(model, "pariskv", *WINDOW, "--max_batch_size", "2", "--max_seq_len", "20000")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServeSettings:
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", *KEYS)
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
        wait_for(lambda: answers(door.openai_client(KEYS[0])), "the door has found the engine")
        yield process


@pytest.fixture(scope="module")
def client(door: Door, engine: Any) -> OpenAI:
    return door.openai_client(KEYS[0])


def answers(client: OpenAI) -> bool:
    try:
        return bool(client.completions.create(**ASK).choices)
    except openai.InternalServerError:
        return False


def ask(client: OpenAI, text: str, **fields: Any) -> tuple[int, str]:
    """Ask a chat; returns its cached tokens and its text."""
    body = {"ignore_eos": True} | fields
    talk: Any = [{"role": "user", "content": text}]
    reply = client.chat.completions.create(model=NAME, messages=talk, temperature=0, max_tokens=4, extra_body=body)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0, reply.choices[0].message.content or ""


def end(client: OpenAI, session_id: str) -> dict[str, Any]:
    return client.delete(f"/sessions/{session_id}", cast_to=dict[str, Any])


def test_without_an_engine_requests_are_503(door: Door) -> None:
    """Before any test that starts one."""
    client = door.openai_client(KEYS[0])
    for call in (lambda: client.completions.create(**ASK), lambda: end(client, "a")):
        with pytest.raises(openai.InternalServerError, match="the engine is not running") as caught:
            call()
        assert caught.value.status_code == 503
        assert caught.value.code == "engine_unavailable"
        assert caught.value.response.headers["Retry-After"] == "1"
    health = requests.get(f"{door.openai_url.removesuffix('/v1')}/health", timeout=SECONDS)
    assert health.status_code == 503
    assert "the engine process does not run" in health.json()["error"]["message"]


def test_a_wrong_key_is_401_before_anything_else(door: Door) -> None:
    with pytest.raises(openai.AuthenticationError, match="none of the server's API keys") as caught:
        door.openai_client("wrong").models.list()
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["WWW-Authenticate"] == "Bearer"
    assert requests.post(f"{door.openai_url}/completions", data=b"{", timeout=SECONDS).status_code == 401
    assert requests.delete(f"{door.openai_url}/sessions/a", timeout=SECONDS).status_code == 401


def test_the_model_has_the_name_that_serve_gives_it(client: OpenAI) -> None:
    assert [card.id for card in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME, "a slash in the name is part of the path"
    assert client.completions.create(**ASK).model == NAME


def test_a_session_is_held_and_ended(door: Door, client: OpenAI) -> None:
    text = "a conversation " + STORY
    assert ask(client, text, session_id="talk/1 é", retention_priority=90, retention_seconds=600)[0] == 0
    again, _ = ask(client, text, session_id="talk/1 é")
    assert again > 100
    port = f"127.0.0.1:{door.metrics_port}"
    held = [metric(port, f"kvseek:{name}") for name in ("sessions", "extents_pinned")]
    assert held == [1, 1]
    ended = end(client, "talk%2F1%20%C3%A9")
    assert ended.pop("freed_tokens") > again
    assert ended == {"id": "talk/1 é", "object": "session.deleted", "deleted": True, "freed_extents": 1}
    assert metric(port, "kvseek:sessions") == 0
    assert ask(client, text)[0] == 0, "its extents are free"
    with pytest.raises(openai.NotFoundError, match="session_id = talk/1 é: there is no such session") as caught:
        end(client, "talk%2F1%20%C3%A9")
    assert (caught.value.code, caught.value.param) == ("session_not_found", "session_id")


def test_each_key_is_a_tenant(door: Door, client: OpenAI) -> None:
    """Another key finds nothing, and learns nothing of a session that exists for the first."""
    two = door.openai_client(KEYS[1])
    text = "a secret " + STORY
    first, answer = ask(client, text, session_id="mine")
    assert first < 50, "a template's tokens and a letter or two"
    assert ask(two, text) == (0, answer)
    refusals = []
    for session_id in ("mine", "none"):
        with pytest.raises(openai.NotFoundError) as caught:
            end(two, session_id)
        refusals.append(caught.value.response.text.replace(session_id, "ID"))
    assert refusals[0] == refusals[1]
    assert ask(client, text)[0] > 100
    assert end(client, "mine")["deleted"]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("sessions/a?cache_sald=x", 400, "cache_sald: there is no such parameter"),
        ("sessions/a?cache_salt=", 400, "cache_salt has 0 characters"),
        ("sessions/" + "a" * 257, 400, "session_id has 257 characters"),
        ("sessions/", 400, "session_id has 0 characters"),
        ("sessions", 404, "not found"),
    ],
)
def test_deletions_that_name_nothing(door: Door, path: str, status: int, message: str) -> None:
    response = requests.delete(f"{door.openai_url}/{path}", headers=BEARER, timeout=SECONDS)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_sessions_can_only_be_deleted(door: Door) -> None:
    response = requests.get(f"{door.openai_url}/sessions/a", headers=BEARER, timeout=SECONDS)
    assert (response.status_code, response.headers["Allow"]) == (405, "DELETE")


def test_the_doors_end_although_a_stream_runs(
    directory: Path, socket_path: Path, settings: ServeSettings, door: Door, engine: Any
) -> None:
    with doors(directory, socket_path, settings) as other:
        wait_for(lambda: answers(other.openai_client(KEYS[0])))
        with requests.post(
            f"{other.openai_url}/completions", json=ENDLESS, headers=BEARER, stream=True, timeout=SECONDS
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


def test_an_engine_that_dies_ends_streams_with_an_error_event_and_others_with_503(
    door: Door, client: OpenAI, engine: Any
) -> None:
    """The last test of this file, as it leaves no engine behind."""
    body = json.dumps(ENDLESS | {"stream": False}).encode()
    endless = ASK | {"max_tokens": 15_000}
    with socket.create_connection(("127.0.0.1", door.openai_port), SECONDS) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Length: {len(body)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        stream = client.completions.create(**endless, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        wait_for(lambda: running(f"127.0.0.1:{door.metrics_port}") == 2, "both run")
        engine.kill()
        with pytest.raises(openai.APIError, match="the engine process ended"):
            list(stream)
        assert connection.recv(4096).startswith(b"HTTP/1.1 503")

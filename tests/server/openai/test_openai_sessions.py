"""Sessions and tenants at the OpenAI port: doors and an engine process, two API keys, OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from openai import OpenAI
from tests.conftest import BuildEngine, RandomModel
from tests.support.door_processes import Door, doors, engine_process, write_keys
from tests.support.metrics import metric
from tests.support.waiting import SECONDS, wait_for

from kvseek.server.settings import ServeSettings

pytestmark = pytest.mark.server

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
KEYS = ("the-first-key-of-tests", "the-second-key-of-tests")
NAME = "harbour"
STORY = "the light was lit at dusk " * 40


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    model = random_model("llama", max_position_embeddings=4096)
    return build_engine(model, "pariskv", *WINDOW, "--max_batch_size", "2", "--max_seq_len", "2400")


def served(directory: Path, folder: Path, **settings: Any) -> Iterator[Door]:
    write_keys(folder / "keys", *KEYS)
    own = ServeSettings(threads=1, served_model_name=NAME, api_key_file=str(folder / "keys"), **settings)
    socket = folder / "engine.sock"
    with doors(directory, socket, own) as door, engine_process(directory, socket, own):
        url, headers = f"{door.openai_url}/sessions/none", {"Authorization": f"Bearer {KEYS[0]}"}
        wait_for(lambda: requests.delete(url, headers=headers, timeout=SECONDS).status_code == 404, "an engine answers")
        yield door


@pytest.fixture(scope="module")
def door(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    yield from served(directory, tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def client(door: Door) -> OpenAI:
    return door.openai_client(KEYS[0])


def ask(client: OpenAI, text: str, **fields: Any) -> tuple[int, str]:
    """Ask a chat; returns its cached tokens and its text."""
    body = {"ignore_eos": True} | fields
    talk: Any = [{"role": "user", "content": text}]
    reply = client.chat.completions.create(model=NAME, messages=talk, temperature=0, max_tokens=4, extra_body=body)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0, reply.choices[0].message.content or ""


def end(client: OpenAI, session_id: str, salt: str | None = None) -> dict[str, Any]:
    params = {} if salt is None else {"cache_salt": salt}
    return client.delete(f"/sessions/{session_id}", cast_to=dict[str, Any], options={"params": params})


def test_a_session_is_held_and_ended(door: Door, client: OpenAI) -> None:
    text = "a conversation " + STORY
    assert ask(client, text, session_id="talk/1 é", retention_priority=90, retention_seconds=600)[0] == 0
    again, _ = ask(client, text, session_id="talk/1 é")
    assert again > 100
    port = f"127.0.0.1:{door.metrics_port}"
    held = [metric(port, f"kvseek:{name}") for name in ("sessions", "extents_pinned", "extents_kept")]
    assert held == [1, 1, 1]
    ended = end(client, "talk%2F1%20%C3%A9")
    assert ended.pop("freed_tokens") > again
    assert ended == {"id": "talk/1 é", "object": "session.deleted", "deleted": True, "freed_extents": 1}
    assert metric(port, "kvseek:sessions") == 0
    assert ask(client, text)[0] == 0, "its extents are free"
    with pytest.raises(openai.NotFoundError, match="session_id = talk/1 é: there is no such session") as caught:
        end(client, "talk%2F1%20%C3%A9")
    assert (caught.value.code, caught.value.param) == ("session_not_found", "session_id")


def test_completions_have_sessions_too(client: OpenAI) -> None:
    body = {"session_id": "completion"}
    client.completions.create(model=NAME, prompt=[5] * 400, max_tokens=2, extra_body=body)
    assert end(client, "completion")["freed_extents"] == 1


def test_a_stream_tells_what_was_cached(client: OpenAI) -> None:
    text: Any = [{"role": "user", "content": "a stream " + STORY}]
    found = []
    for _ in range(2):
        fields: Any = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4}
        *_, last = client.chat.completions.create(model=NAME, messages=text, extra_body={"session_id": "s"}, **fields)
        assert last.usage is not None
        assert last.usage.prompt_tokens_details is not None
        found.append(last.usage.prompt_tokens - (last.usage.prompt_tokens_details.cached_tokens or 0))
    assert found[0] > 100
    assert found[1] == 1


def test_each_key_is_a_tenant(door: Door) -> None:
    """Another key finds nothing, and learns nothing of a session that exists for the first."""
    one, two = (door.openai_client(key) for key in KEYS)
    text = "a secret " + STORY
    first, answer = ask(one, text, session_id="mine")
    assert first < 50, "a template's tokens and a letter or two"
    assert ask(two, text) == (0, answer)
    refusals = []
    for session_id in ("mine", "none"):
        with pytest.raises(openai.NotFoundError) as caught:
            end(two, session_id)
        refusals.append(caught.value.response.text.replace(session_id, "ID"))
    assert refusals[0] == refusals[1]
    assert ask(one, text)[0] > 100
    assert end(one, "mine")["deleted"]


def test_a_salt_is_a_tenant_of_a_key(client: OpenAI) -> None:
    text = "a salted secret " + STORY
    assert [ask(client, text, cache_salt=salt, session_id="own")[0] > 0 for salt in ("a", "b", "a")] == [
        False,
        False,
        True,
    ]
    for salt in (None, "c"):
        with pytest.raises(openai.NotFoundError):
            end(client, "own", salt)
    assert end(client, "own", "a")["freed_extents"] == 1
    assert ask(client, text, cache_salt="b")[0] > 100


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
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    response = requests.delete(f"{door.openai_url}/{path}", headers=headers, timeout=SECONDS)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_a_deletion_needs_a_key_and_other_methods_are_405(door: Door) -> None:
    url = f"{door.openai_url}/sessions/a"
    assert requests.delete(url, timeout=SECONDS).status_code == 401
    response = requests.get(url, headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=SECONDS)
    assert (response.status_code, response.headers["Allow"]) == (405, "DELETE")


def test_keys_share_if_the_server_says_so(directory: Path, tmp_path: Path) -> None:
    for door in served(directory, tmp_path, share_prefixes="all"):
        one, two = (door.openai_client(key) for key in KEYS)
        assert ask(one, STORY, session_id="ours")[0] == 0
        assert ask(two, STORY)[0] > 100
        assert end(two, "ours")["freed_extents"] == 0, "the last request was of no session"


def test_without_an_engine_a_deletion_is_503(directory: Path, tmp_path: Path) -> None:
    with doors(directory, tmp_path / "engine.sock", ServeSettings(threads=1, served_model_name=NAME)) as door:
        response = requests.delete(f"{door.openai_url}/sessions/a", timeout=SECONDS)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")

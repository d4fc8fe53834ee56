"""Sessions and salts of the Triton models, with kvseek's own clients: whole servers of both layouts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from tests.support.grpc_inputs import grpc_input, stream_infer
from tests.support.metrics import metric
from tests.support.waiting import SECONDS

from kvseek.client import chat
from kvseek.client.errors import ClientError
from kvseek.client.grpc_client import GrpcClient
from kvseek.client.http_client import HttpClient
from kvseek.client.openai_client import OpenAIClient
from kvseek.client.text_models import TEXT_MODELS, GenerateOptions, TextModel
from kvseek.server.launch import RunningServer

pytestmark = pytest.mark.server

STORY = "the quick brown fox jumps over the lazy dog " * 20


@pytest.fixture(scope="module", params=TEXT_MODELS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(layout: str, request: pytest.FixtureRequest) -> RunningServer:
    own: RunningServer = request.getfixturevalue(f"{layout.partition('_')[0]}_server")
    return own


@pytest.fixture
def model(layout: str) -> TextModel:
    return TEXT_MODELS[layout]


def hit_rate(server: RunningServer, model: TextModel, text: str, **fields: Any) -> float:
    """Ask over HTTP, and return the share of the prompt's blocks that were reused."""
    names = {
        "max_tokens": "sampling_param_max_tokens",
        "return_perf_metrics": "sampling_param_return_perf_metrics",
    }
    body = {"text_input": text, "max_tokens": 3, "return_perf_metrics": True, "end_id": -1}
    if not model.batched:
        body = {names.get(name, name): value for name, value in body.items()}
    url = f"http://{server.http_url}/v2/models/{model.name}/generate"
    response = requests.post(url, data=json.dumps(body | fields), timeout=SECONDS)
    told = response.json()
    assert response.ok, told
    plural = "s" if model.batched else ""
    reused, missed = (told[f"kv_cache_{name}_block{plural}"] for name in ("reused", "missed"))
    assert told["kv_cache_hit_rate"] == reused / (reused + missed)
    return float(told["kv_cache_hit_rate"])


def sessions(server: RunningServer) -> float:
    return metric(server.metrics_url, "kvseek:sessions")


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_session_is_held_and_ended(server: RunningServer, model: TextModel, protocol: str) -> None:
    kept: dict[str, Any] = {"session_id": "talk", "retention_priority": 90, "retention_seconds": 600}
    options, salt = GenerateOptions(max_tokens=3, end_id=-1, cache_salt=f"é {protocol}", **kept), f"é {protocol}"
    kind, url = (GrpcClient, server.grpc_url) if protocol == "grpc" else (HttpClient, server.http_url)
    assert "".join(chunk.text for chunk in kind(url, SECONDS, model).generate_stream(STORY, options))
    assert (sessions(server), metric(server.metrics_url, "kvseek:extents_pinned")) == (1, 1)
    client = OpenAIClient(server.openai_url, SECONDS)
    with pytest.raises(ClientError, match="session_id = talk: there is no such session"):
        client.end_session("talk")
    assert client.end_session("talk", salt) > 100
    assert sessions(server) == 0
    assert hit_rate(server, model, STORY, cache_salt=salt) == 0, "its rows are gone"


def test_a_salt_keeps_tenants_apart(server: RunningServer, model: TextModel) -> None:
    text = "tenants: " + STORY
    found = [hit_rate(server, model, text, cache_salt=salt) for salt in ("a", "b", "a", "")]
    assert found == [0, 0, 1, 0], "an empty salt is none"
    assert hit_rate(server, model, text) == 1


def test_chat_of_the_command_line(server: RunningServer, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--url", server.grpc_url, "--layout", layout, "--no-chat_template"]
    what = ["--prompt", STORY, "--max_tokens", "2", "--end_id", "-1", "--json"]
    kept = ["--session_id", "shell", "--cache_salt", "s", "--retention_priority", "80", "--retention_seconds", "60.5"]
    assert chat.main([*where, *what, *kept]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 2
    assert OpenAIClient(server.openai_url, SECONDS).end_session("shell", "s") > 100
    talk = ["--openai_url", server.openai_url, *what, *kept]
    assert chat.main(talk) == 0
    assert OpenAIClient(server.openai_url, SECONDS).end_session("shell", "s") > 100


@pytest.mark.parametrize("layout", ["inflight_batcher_llm"], indirect=True)
def test_rows_of_a_batch_of_token_ids_have_sessions_of_their_own(server: RunningServer) -> None:
    rows = {
        "input_ids": ("INT32", [[5] * 300, [6] * 300]),
        "input_lengths": ("INT32", [[300], [300]]),
        "request_output_len": ("INT32", [[2], [2]]),
        "end_id": ("INT32", [[-1], [-1]]),
        "cache_salt": ("BYTES", [["tokens"], ["tokens"]]),
        "session_id": ("BYTES", [["first"], [""]]),
    }
    assert len(stream_infer(server.grpc_url, "tensorrt_llm", [grpc_input(name, *rows[name]) for name in rows])) >= 2
    assert sessions(server) == 1
    assert OpenAIClient(server.openai_url, SECONDS).end_session("first", "tokens") == 301

"""`kvseek repository`, served by a tritonserver that is started by hand, and `kvseek openai` beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpc
from openai import OpenAI
from tests.conftest import BuildEngine, RandomModel
from tests.server.conftest import loop_in_a_thread
from tests.support.door_processes import write_keys
from tests.support.grpc_inputs import inputs_of, stream_infer
from tests.support.live_server import command_line
from tests.support.metrics import running
from tests.support.own_triton import KVSEEK, OwnTriton, end, environment, own_triton
from tests.support.waiting import wait_for

from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.server.engine.process import ALONE_SECONDS
from kvseek.server.engine.shared import SharedEngine
from kvseek.server.errors import ServerError
from kvseek.server.requests.engine_client import EngineClient
from kvseek.server.serve_openai import find_engine
from kvseek.server.settings import ServeSettings
from kvseek.server.triton.model import _connect
from kvseek.server.triton.repository import main, read_models, write_models

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox jumps over the lazy dog"
TIMEOUT = 120.0
KEY = "the-key-of-this-test"
BEARER = f"Bearer {KEY}"


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    limits = ("--max_batch_size", "3", "--max_seq_len", "20000")
    return build_engine(random_model("llama", max_position_embeddings=20_000), "full", *limits)


@pytest.fixture(scope="module")
def other(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    limits = ("--max_batch_size", "2", "--max_seq_len", "512")
    return build_engine(random_model("qwen3", max_position_embeddings=20_000), "full", *limits)


@pytest.fixture(scope="module")
def third(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    return build_engine(random_model("llama"), "full", "--max_batch_size", "2", "--max_seq_len", "256")


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """Where engine processes are looked for; its path must be short, as it is a part of a socket's."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def repository(directory: Path, other: Path, third: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three engines: one of them decoupled, as by default, the others not; the third in the LLM API layout, with a key."""
    folder = tmp_path_factory.mktemp("repository") / "models"
    settings = ServeSettings(threads=1, max_queue_size=40, hang_seconds=10.0)
    write_models(folder, directory, settings, name="one", aliases=True)
    write_models(folder, other, settings, name="two", decoupled=False)
    keys = write_keys(folder.with_name("keys"), KEY)
    keyed = dataclasses.replace(settings, layout="llmapi", api_key_file=str(keys))
    write_models(folder, third, keyed, name="llm", decoupled=False)
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "triton.log"


@pytest.fixture(scope="module")
def triton(repository: Path, log: Path, temporary: Path) -> Iterator[OwnTriton]:
    with own_triton(repository, log, temporary) as server:
        yield server


def engine_processes(directory: Path) -> list[int]:
    """Process ids of the shared engine processes of an engine directory."""
    found = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    marks = ("kvseek.server.engine.process", "--shared", str(directory))
    return [pid for pid in found if all(mark in command_line(pid) for mark in marks)]


def text(directory: Path, count: int = 10) -> str:
    engine = Engine.load(directory)
    (ids,) = engine.generate([Request(tuple(engine.tokenizer.encode(PROMPT)), count)])
    return engine.tokenizer.decode(ids)


def generate(triton: OwnTriton, model: str, **fields: Any) -> requests.Response:
    """Triton's own HTTP endpoint."""
    body = {"text_input": PROMPT, "max_tokens": 10, "end_id": -1, "exclude_input_in_output": True} | fields
    return requests.post(f"http://{triton.http_url}/v2/models/{model}/generate", json=body, timeout=TIMEOUT)


def test_every_name_of_every_engine_answers(triton: OwnTriton, directory: Path, other: Path) -> None:
    """Streams and single answers, over gRPC and over Triton's own HTTP endpoint."""
    first, second = text(directory), text(other)
    for model in ("one_tensorrt_llm_bls", "one_ensemble"):
        assert generate(triton, model).json()["text_output"] == first
    assert generate(triton, "two_tensorrt_llm_bls").json()["text_output"] == second
    client = grpc.InferenceServerClient(triton.grpc_url)
    answer = client.infer(
        "two_tensorrt_llm_bls", inputs_of({"text_input": PROMPT, "max_tokens": 10, "exclude_input_in_output": True})
    )
    assert answer.as_numpy("text_output").tolist() == [second.encode()]
    assert "".join(stream(triton, "one_tensorrt_llm_bls", 10)) == first
    for folder, model in ((directory, "one_tensorrt_llm"), (other, "two_tensorrt_llm")):
        body = {"input_ids": [5, 6, 7], "request_output_len": 4, "end_id": -1, "exclude_input_in_output": True}
        reply = requests.post(f"http://{triton.http_url}/v2/models/{model}/generate", json=body, timeout=TIMEOUT).json()
        (ids,) = Engine.load(folder).generate([Request((5, 6, 7), 4)])
        assert reply["output_ids"] == ids


def test_the_llm_api_layout_as_tensorrt_llm_configures_it(triton: OwnTriton, third: Path) -> None:
    """Not decoupled: the quick start's curl reaches Triton's own endpoint, and ModelInfer the model."""
    model, answer = "llm_tensorrt_llm", PROMPT + text(third)
    url = f"http://{triton.http_url}/v2/models/{model}/generate"
    body = {"text_input": PROMPT, "sampling_param_max_tokens": 10, "end_id": -1}
    keyed = body | {"authorization": BEARER}  # `generate` forwards no headers
    reply = requests.post(url, json=keyed, timeout=TIMEOUT).json()
    assert reply == {"model_name": model, "model_version": "1", "text_output": answer}
    prompt = grpc.InferInput("text_input", [1], "BYTES")
    count = grpc.InferInput("sampling_param_max_tokens", [1], "INT32")
    prompt.set_data_from_numpy(np.array([PROMPT], object))
    count.set_data_from_numpy(np.array([10], np.int32))
    with grpc.InferenceServerClient(triton.grpc_url) as client:
        result = client.infer(model, [prompt, count], headers={"authorization": BEARER})
    assert result.as_numpy("text_output").tolist() == [answer.encode()]
    for own in ({}, {"authorization": "Bearer another-key-of-tests"}):
        reply = requests.post(url, json=body | own, timeout=TIMEOUT)
        assert reply.status_code >= 400
        assert "authorization: has none of the repository's API keys" in reply.json()["error"]
    reply = requests.post(url, json=keyed | {"streaming": True}, timeout=TIMEOUT).json()
    assert "streaming = true: must be false, because llm_tensorrt_llm has one response" in reply["error"]


def stream(triton: OwnTriton, model: str, count: int) -> list[str]:
    """The texts of a stream over gRPC."""
    inputs = inputs_of({"text_input": PROMPT, "max_tokens": count, "stream": True, "end_id": -1})
    return [part.as_numpy("text_output")[0].decode() for part in stream_infer(triton.grpc_url, model, inputs)]


def test_one_engine_process_serves_all_models_of_an_engine(triton: OwnTriton, directory: Path, other: Path) -> None:
    assert len(engine_processes(directory)) == 1
    assert len(engine_processes(other)) == 1


def test_bad_requests_are_refused_by_name(triton: OwnTriton) -> None:
    for model, field, message in (
        ("one_ensemble", {"max_tokens": 0}, "max_tokens = 0"),
        ("one_ensemble", {"max_tokns": 3}, "max_tokns: one_ensemble has no such input"),
        (
            "two_tensorrt_llm_bls",
            {"stream": True},
            "stream = true: must be false, because two_tensorrt_llm_bls has one response",
        ),
        ("two_tensorrt_llm_bls", {"num_return_sequences": 2}, "1 prompts, 2 sequences: must be 1"),
        ("one_ensemble", {"kvseek_leave": True}, "which only kvseek's gRPC port sends"),
    ):
        answer = generate(triton, model, **field)
        assert answer.status_code >= 400
        assert message in answer.json()["error"]
    assert generate(triton, "two_tensorrt_llm_bls").status_code == 200


@pytest.mark.parametrize("model", ["one_tensorrt_llm", "two_tensorrt_llm"])
def test_stop_is_answered(triton: OwnTriton, model: str) -> None:
    """Also by a model that is not decoupled, of which Triton expects a response to every request."""
    body = {"input_ids": [5], "request_output_len": 4, "stop": True}
    reply = requests.post(f"http://{triton.http_url}/v2/models/{model}/generate", json=body, timeout=TIMEOUT)
    assert "output_ids" not in reply.json()


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_ends_its_request(triton: OwnTriton, openai_url: str, streaming: bool) -> None:
    """Nobody tells the models: they ask Triton. The OpenAI port has the engine's metrics."""
    address = openai_url.removeprefix("http://").removesuffix("/v1")
    client = grpc.InferenceServerClient(triton.grpc_url)
    client.start_stream(lambda result, error: None)
    inputs = inputs_of({"text_input": PROMPT, "max_tokens": 15_000, "stream": streaming, "end_id": -1})
    client.async_stream_infer("one_tensorrt_llm_bls", inputs)
    wait_for(lambda: running(address) == 1)
    client.stop_stream(cancel_requests=True)
    wait_for(lambda: running(address) == 0)


@pytest.fixture(scope="module")
def openai_url(triton: OwnTriton, repository: Path, temporary: Path, tmp_path_factory: Any) -> Iterator[str]:
    """`kvseek openai` over the first engine."""
    command = [*KVSEEK, "openai", "--repository", str(repository), "--name", "one", "--openai_port", "0"]
    with (tmp_path_factory.mktemp("openai") / "log").open("w") as file:
        process = subprocess.Popen(
            [*command, "--served_model_name", "mine"],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=environment(temporary),
            start_new_session=True,
        )
    try:
        line = process.stdout.readline()
        assert line.startswith("listening: OpenAI http://127.0.0.1:"), line
        yield line.split()[-1]
    finally:
        assert end(process) == 0


def test_the_openai_port_asks_the_same_engine(openai_url: str, directory: Path) -> None:
    wait_for(lambda: requests.get(f"{openai_url.removesuffix('/v1')}/health", timeout=TIMEOUT).status_code == 200)
    with OpenAI(base_url=openai_url, api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["mine"]
        answer = client.completions.create(model="mine", prompt=PROMPT, max_tokens=10, temperature=0)
    assert answer.choices[0].text == text(directory)
    assert len(engine_processes(directory)) == 1


def test_a_hung_engine_process_is_killed_and_started_again(triton: OwnTriton, directory: Path) -> None:
    (hung,) = engine_processes(directory)
    os.kill(hung, signal.SIGSTOP)
    wait_for(lambda: generate(triton, "one_ensemble").status_code == 200)
    assert engine_processes(directory) not in ([hung], [])


def test_an_engine_process_ends_with_the_last_of_its_users(
    other: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other settings than Triton's models have: another process."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = engine_processes(other)
    engines = [SharedEngine(other, ServeSettings(threads=1, max_queue_size=3)) for _ in range(2)]
    with loop_in_a_thread() as loop, contextlib.ExitStack() as last, contextlib.ExitStack() as first:
        clients = [EngineClient(engine.socket, loop, engine.start_if_absent) for engine in engines]
        for stack, client in zip((last, first), clients, strict=True):
            stack.callback(client.close)
        for engine, client in zip(engines, clients, strict=True):
            engine.wait(client)
        assert len(engine_processes(other)) == len(before) + 1
        first.close()
        time.sleep(2 * ALONE_SECONDS)
        assert len(engine_processes(other)) == len(before) + 1, "it has a user"
    wait_for(lambda: engine_processes(other) == before)


def test_a_repository_is_written_and_read(
    directory: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / 'with "quotes" and \\'
    assert main(["--engine_dir", str(directory), "--output", str(folder), "--max_queue_size", "77"]) == 0
    assert "wrote tensorrt_llm, tensorrt_llm_bls, ensemble" in capsys.readouterr().out
    models = read_models(folder)
    assert list(models) == ["ensemble", "tensorrt_llm", "tensorrt_llm_bls"]
    for parameters in models.values():
        assert parameters["engine_dir"] == str(directory)
        assert ServeSettings.from_json(parameters["settings"]).max_queue_size == 77
    assert "${" not in (folder / "ensemble/config.pbtxt").read_text()
    assert "max_batch_size: 3" in (folder / "ensemble/config.pbtxt").read_text()
    assert find_engine(folder, None)["model"] == "tensorrt_llm_bls"


def test_a_repository_of_the_llm_api_layout_is_written(directory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    assert main(["--engine_dir", str(directory), "--output", str(folder), "--layout", "llmapi"]) == 0
    assert list(read_models(folder)) == ["tensorrt_llm"]
    written = (folder / "tensorrt_llm/config.pbtxt").read_text()
    assert "${" not in written.partition("\nname:")[2]
    assert "max_batch_size: 0" in written
    assert (folder / "tensorrt_llm/1/model.py").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine_dir", "{here}"], "is there already"),
        (["--engine_dir", "{here}", "--layout", "x"], "--layout = 'x': must be one of inflight_batcher_llm, llmapi"),
        (["--engine_dir", "{here}", "--engine_dir", "{here}"], "--name is given 0 times: must be 2"),
        (["--engine_dir", "{here}", "--name", "a/b"], "--name = 'a/b': must be 1 to 64 letters"),
        (["--engine_dir", "{here}", "--name", "a", "--engine_dir", "{here}", "--name", "a"], "'a' is given twice"),
        (["--engine_dir", "{here}", "--max_queue_size", "0"], "--max_queue_size = 0: must be >= 1"),
        (["--engine_dir", "nowhere"], "nowhere"),
    ],
)
def test_bad_flags_are_refused(
    flags: list[str], message: str, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path if "already" in message else tmp_path / "new"
    assert main([flag.format(here=directory) for flag in flags] + ["--output", str(target)]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_engine_is_chosen_by_name(repository: Path, directory: Path, tmp_path: Path) -> None:
    assert find_engine(repository, "one")["engine_dir"] == str(directory)
    with pytest.raises(ServerError, match=r"has 3 engines: must be one; choose with --name"):
        find_engine(repository, None)
    with pytest.raises(ServerError, match=r"--name = 'three'.* has no engine of this name"):
        find_engine(repository, "three")
    with pytest.raises(ServerError, match=r"has no model of kvseek"):
        find_engine(tmp_path, None)


def test_a_model_whose_engine_cannot_be_loaded_says_so(
    directory: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine directory that is damaged after the repository was written."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    copy = tmp_path / "engine"
    subprocess.run(["cp", "-r", str(directory), str(copy)], check=True)
    for file in copy.glob("*.safetensors"):
        file.write_bytes(b"damaged")
    refused = pytest.raises(ServerError, match="the engine process ended with status 1 before it was ready")
    with loop_in_a_thread() as loop, refused:
        _connect(copy, ServeSettings(threads=1), "", loop)


def test_an_engine_process_comes_back_although_the_folder_is_gone(
    other: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        engine = SharedEngine(other, ServeSettings(threads=1))
        engine.socket.parent.rmdir()
        with (
            loop_in_a_thread() as loop,
            contextlib.closing(EngineClient(engine.socket, loop, engine.start_if_absent)) as client,
        ):
            engine.wait(client)
        (pid,) = [pid for pid in engine_processes(other) if place in command_line(pid)]
        wait_for(lambda: not command_line(pid))


def test_a_path_that_is_too_long_for_a_socket_is_refused(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ("long" * 20)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    with pytest.raises(ServerError, match=r"bytes: must be <= 107, as a socket's path; set TMPDIR"):
        SharedEngine(other, ServeSettings())


def test_a_folder_of_somebody_else_is_no_place_for_sockets(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"kvseek-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(ServerError, match="must be a folder of this user that nobody else can enter"):
        SharedEngine(directory, ServeSettings())

"""End to end through a real tritonserver: streaming, HTTP, concurrency, bad input, cancellation, shutdown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpc
from tests.support.grpc_inputs import grpc_input, stream_infer
from tests.support.metrics import metric
from tests.support.waiting import wait_for

from kvseek.client import chat
from kvseek.client.errors import ClientError
from kvseek.client.grpc_client import GrpcClient
from kvseek.client.http_client import HttpClient
from kvseek.client.text_models import GenerateOptions
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.server.launch import RunningServer

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
LONG = GenerateOptions(max_tokens=300, end_id=-1)
ENDLESS = GenerateOptions(max_tokens=15_000, end_id=-1)
SHORT = GenerateOptions(max_tokens=12, end_id=-1)
TIMEOUT = 60.0


def grpc_client(server: RunningServer) -> GrpcClient:
    return GrpcClient(server.grpc_url, TIMEOUT)


def answer(server: RunningServer, prompt: str = PROMPT, options: GenerateOptions = SHORT) -> str:
    return "".join(chunk.text for chunk in grpc_client(server).generate_stream(prompt, options))


def test_streamed_text_is_the_engines(server: RunningServer, engine: Engine) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    (expected,) = engine.generate([Request(tuple(ids), 12)])
    chunks = list(grpc_client(server).generate_stream(PROMPT, SHORT))
    assert "".join(chunk.text for chunk in chunks) == engine.tokenizer.decode(expected)
    assert [chunk.num_output_tokens for chunk in chunks] == list(range(1, 13))
    last = chunks[-1]
    assert last.finish_reason == "length"
    assert last.num_input_tokens == len(ids)
    assert last.cached_tokens == len(ids) + 11
    assert 0 < last.attended_tokens < last.cached_tokens


def infer(server: RunningServer, model: str, *inputs: tuple[str, str, Any], **options: Any) -> Any:
    """ModelInfer's result for inputs (name, datatype, values)."""
    with grpc.InferenceServerClient(server.grpc_url) as client:
        return client.infer(model, [grpc_input(*each) for each in inputs], **options)


def test_model_infer_and_the_other_name_of_the_text_model(server: RunningServer) -> None:
    inputs = (("text_input", "BYTES", [[PROMPT]]), ("max_tokens", "INT32", [[12]]), ("end_id", "INT32", [[-1]]))
    result = infer(server, "ensemble", *inputs, request_id="mine")
    assert result.as_numpy("text_output").tolist() == [(PROMPT + answer(server)).encode()]
    assert (result.get_response().model_name, result.get_response().id) == ("ensemble", "mine")
    url = f"http://{server.http_url}/v2/models/ensemble"
    body = {"text_input": PROMPT, "max_tokens": 12, "end_id": -1}
    assert requests.post(f"{url}/generate", json=body, timeout=TIMEOUT).json()["text_output"] == PROMPT + answer(server)
    assert requests.get(f"{url}/ready", timeout=TIMEOUT).status_code == 200
    with grpc.InferenceServerClient(server.grpc_url) as client:
        assert client.is_model_ready("ensemble")
        assert client.get_model_metadata("ensemble").inputs


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([("stream", "BOOL", [[True]])], "stream = true: ModelInfer has one response"),
        ([("num_return_sequences", "INT32", [[2]])], "num_return_sequences = 2: ModelInfer has one response"),
    ],
)
def test_model_infer_refuses_what_has_no_single_response(server: RunningServer, inputs: Any, message: str) -> None:
    with pytest.raises(grpc.InferenceServerException, match=message) as caught:
        infer(server, "tensorrt_llm_bls", ("text_input", "BYTES", [[PROMPT]]), ("max_tokens", "INT32", [[4]]), *inputs)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.parametrize("name", ["OK", "UNAVAILABLE"])
def test_a_refusal_that_begins_like_a_code_is_a_refusal(server: RunningServer, name: str) -> None:
    inputs = (("text_input", "BYTES", [[PROMPT]]), ("max_tokens", "INT32", [[4]]))
    with pytest.raises(
        grpc.InferenceServerException, match=f"{name}: tensorrt_llm_bls has no such parameter"
    ) as caught:
        infer(server, "tensorrt_llm_bls", *inputs, parameters={name: 1})
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def infer_stream(server: RunningServer, *inputs: tuple[str, str, Any]) -> list[Any]:
    return stream_infer(server.grpc_url, "tensorrt_llm_bls", [grpc_input(*each) for each in inputs])


def test_each_prompt_of_a_batch_has_its_sequences(server: RunningServer) -> None:
    prompts = [PROMPT, "a lazy dog"]
    found = infer_stream(
        server,
        ("text_input", "BYTES", [[prompt] for prompt in prompts]),
        ("max_tokens", "INT32", [[12], [12]]),
        ("end_id", "INT32", [[-1], [-1]]),
        ("num_return_sequences", "INT32", [[2], [2]]),
    )
    texts = {
        (result.as_numpy("batch_index")[0, 0], result.as_numpy("sequence_index")[0, 0]): result.as_numpy("text_output")[
            0
        ]
        for result in found
    }
    expected = {
        (row, number): (prompt + answer(server, prompt)).encode()
        for row, prompt in enumerate(prompts)
        for number in (0, 1)
    }
    assert texts == expected


def token_request(server: RunningServer, **values: Any) -> list[dict[str, np.ndarray]]:
    """Responses of tensorrt_llm to tensors given as name=(dtype, list)."""
    inputs = [grpc_input(name, dtype, [data]) for name, (dtype, data) in values.items()]
    results = stream_infer(server.grpc_url, "tensorrt_llm", inputs)
    outputs = [[output.name for output in result.get_response().outputs] for result in results]
    assert outputs[-1], "the last response is the end: no empty one follows it"
    return [{name: result.as_numpy(name) for name in own} for result, own in zip(results, outputs, strict=True)]


def test_token_ids_streaming_and_not(server: RunningServer, engine: Engine) -> None:
    (expected,) = engine.generate([Request((5, 6, 7, 8), 6)])
    base = {
        "input_ids": ("INT32", [5, 6, 7, 8]),
        "input_lengths": ("INT32", [4]),
        "request_output_len": ("INT32", [6]),
        "end_id": ("INT32", [-1]),
    }
    streamed = token_request(server, **base, streaming=("BOOL", [True]))
    assert [int(r["output_ids"].item()) for r in streamed] == expected
    assert all(r["output_ids"].shape == (1, 1, 1) and r["sequence_length"].tolist() == [[1]] for r in streamed)
    (whole,) = token_request(server, **base)
    assert whole["output_ids"].tolist() == [[[5, 6, 7, 8, *expected]]]
    assert whole["sequence_length"].tolist() == [[10]]
    (bare,) = token_request(server, **base, exclude_input_in_output=("BOOL", [True]))
    assert bare["output_ids"].tolist() == [[expected]]
    first_two = expected[:2]
    stop = np.array([first_two, [2, -1]]).tolist()
    (stopped,) = token_request(
        server, **base, stop_words_list=("INT32", stop), exclude_input_in_output=("BOOL", [True])
    )
    assert stopped["output_ids"].tolist() == [[first_two]]


BAD = [  # others are the same for every port: tests/server/frontend/test_refusals.py
    ("", SHORT, "text_input is empty"),
    ("word " * 1400, SHORT, "must be <= max_input_len = 1000"),
    ("word " * 2000, SHORT, "text_input has 10,000 bytes: must be <= 9,000, max_input_len tokens of the .* longest"),
    (PROMPT, replace(SHORT, max_tokens=-4), r"max_tokens = -4: must be >= 1"),
    (PROMPT, replace(SHORT, max_tokens=50_000), "must be <= max_seq_len = 20000"),
    (PROMPT, replace(SHORT, end_id=10**6), r"end_id = 1000000: must be in \[0, "),
]


def test_bad_input_is_refused_and_other_streams_go_on(server: RunningServer) -> None:
    expected = answer(server, options=LONG)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(answer, server, PROMPT, LONG)
        for prompt, options, message in BAD:
            with pytest.raises(ClientError, match=message):
                answer(server, prompt, options)
            with pytest.raises(ClientError, match=message):
                HttpClient(server.http_url, TIMEOUT).generate(prompt, options)
        assert other.result(TIMEOUT) == expected


def test_prompts_are_not_logged(server: RunningServer, log: Path) -> None:
    """Neither those that are served nor those that are refused, with --log_verbose."""
    secret = "the harbour master's password is Lady-Trelawny-412"
    too_long, cold = secret * 400, replace(SHORT, temperature=-1.0)
    for client in (grpc_client(server), HttpClient(server.http_url, TIMEOUT)):
        assert list(client.generate_stream(secret, SHORT))
        for prompt, options in ((too_long, SHORT), (secret, cold)):
            with pytest.raises(ClientError):
                list(client.generate_stream(prompt, options))
    text = log.read_text(errors="replace")
    assert "tensorrt_llm_bls" in text, "requests are logged"
    assert "Trelawny" not in text


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_chat_prints_the_answer(server: RunningServer, protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    flags = ["--protocol", protocol, "--url", url, "--timeout", str(TIMEOUT)]
    flags += ["--prompt", PROMPT, "--no-chat_template", "--end_id", "-1"]
    assert chat.main([*flags, "--max_tokens", "12", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["text"] == answer(server)
    assert (shown["output_tokens"], shown["finish_reason"]) == (12, "length")
    assert 0 < shown["attended_tokens_per_step"] < shown["cached_tokens_per_step"]
    assert chat.main([*flags, "--temperature", "-1"]) == 1
    assert "error: temperature = -1.0: must be finite and >= 0" in capsys.readouterr().err


def test_clients_that_leave_their_streams_end_generation(server: RunningServer) -> None:
    """Over HTTP: tests/server/frontend/test_http_door.py."""
    tokens = metric(server.metrics_url, "kvseek:generation_tokens_total")
    streams = [grpc_client(server).generate_stream(PROMPT, ENDLESS) for _ in range(3)]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    wait_for(lambda: metric(server.metrics_url, "kvseek:num_requests_running") == 0)
    more = metric(server.metrics_url, "kvseek:generation_tokens_total") - tokens
    assert more < 2 * ENDLESS.max_tokens, "3 x were asked for"


def test_no_duration_is_told_that_triton_cannot_know(server: RunningServer) -> None:
    """Triton counts a request of a decoupled model until the model has taken it: a thousandth of its time."""
    answer(server)
    shown = requests.get(f"http://{server.metrics_url}/metrics", timeout=20).text
    assert 'nv_inference_count{model="tensorrt_llm_bls",version="1"}' in shown
    for name in (
        "request_success",
        "request_failure",
        "request_duration_us",
        "queue_duration_us",
        "compute_infer_duration_us",
    ):
        assert f"nv_inference_{name}" not in shown
    with grpc.InferenceServerClient(server.grpc_url) as client:
        over_grpc = client.get_inference_statistics("tensorrt_llm_bls", as_json=True)["model_stats"]
    url = f"http://{server.http_url}/v2/models/tensorrt_llm_bls/stats"
    for (model,) in (over_grpc, requests.get(url, timeout=20).json()["model_stats"]):
        counted = {name: part for name, part in model["inference_stats"].items() if int(part.get("count", 0))}
        assert {"success", "queue", "compute_infer"} <= set(counted)
        assert all(int(part.get("ns", 0)) == 0 for part in counted.values())
        assert all(int(batch["compute_infer"].get("ns", 0)) == 0 for batch in model["batch_stats"])
    assert metric(server.metrics_url, "kvseek:e2e_request_latency_seconds_sum") > 0


def serve(directory: Path) -> list[str]:
    command = [sys.executable, "-m", "kvseek.cli.main", "serve", "--engine_dir", str(directory)]
    ports = ["--http_port", "0", "--grpc_port", "0", "--metrics_port", "0", "--openai_port", "0"]
    return [*command, *ports, "--threads", "1"]


def test_a_container_listens_on_all_addresses_logs_to_standard_output_and_ends_on_sigterm(directory: Path) -> None:
    command = [*serve(directory), "--host", "0.0.0.0", "--log", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as launcher:
        assert launcher.stdout is not None
        lines = []
        for line in launcher.stdout:
            lines.append(line)
            if line.startswith("ready: "):
                break
        port = lines[-1].partition("HTTP 0.0.0.0:")[2].partition(",")[0]
        assert requests.get(f"http://127.0.0.1:{port}/v2/health/ready", timeout=TIMEOUT).status_code == 200
        threads = Path(f"/proc/{launcher.pid}/task").iterdir()
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
        launcher.terminate()
        rest = launcher.stdout.read()
        assert launcher.wait(TIMEOUT) == 0
    assert len(children) == 4, "the engine process, the doors, Triton and the guard"
    assert not any(os.path.exists(f"/proc/{child}") for child in children)
    assert any("Started GRPCInferenceService" in line for line in lines)
    assert "unloaded" in rest, "the log goes on to the end"


@pytest.mark.parametrize("log", ["-", "server.log"])
def test_a_start_that_takes_too_long_is_given_up(directory: Path, tmp_path: Path, log: str) -> None:
    command = [*serve(directory), "--ready_seconds", "1", "--log", log]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT, cwd=tmp_path)
    assert result.returncode == 1
    words = "its log is above" if log == "-" else "it has written nothing|its log ends:"
    late = rf"error: the server is not ready after 1 s, see --ready_seconds: \w+ is not up; ({words})"
    assert re.search(late, result.stderr), result.stderr

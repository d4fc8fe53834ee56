"""The LLM API layout through a real server: gRPC with and without streaming, HTTP as the quick start's curl, cancelling, chat."""

from __future__ import annotations

import itertools
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import tritonclient.grpc as grpc
from tests.support.grpc_inputs import grpc_input
from tests.support.metrics import running
from tests.support.waiting import wait_for

from kvseek.client import chat
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.server.launch import RunningServer

pytestmark = pytest.mark.server

MODEL = "tensorrt_llm"
PROMPT = "the quick brown fox jumps over the lazy dog"
TOKENS = 12
TIMEOUT = 60.0
OWN = {"model_name": MODEL, "model_version": "1"}
BODY = {"text_input": PROMPT, "sampling_param_max_tokens": TOKENS, "end_id": -1}
Tensor = tuple[str, Any]  # a datatype and its values
ENDLESS: Tensor = ("INT32", [15_000])  # tokens of a request that is still running when a test ends it


@pytest.fixture(scope="module")
def server(llmapi_server: RunningServer) -> RunningServer:
    return llmapi_server


@pytest.fixture(scope="module")
def texts(directory: Path) -> list[str]:
    """What the engine generates: the text that is certain after one token, after two, and so on, and at last all of it."""
    engine = Engine.load(directory)
    (ids,) = engine.generate([Request(tuple(engine.tokenizer.encode(PROMPT)), TOKENS)])
    stream = engine.tokenizer.stream()
    found = list(itertools.accumulate(stream.push(token) for token in ids))
    return [*found[:-1], engine.tokenizer.decode(ids)]


def post(server: RunningServer, endpoint: str, **fields: Any) -> requests.Response:
    url = f"http://{server.http_url}/v2/models/{MODEL}/{endpoint}"
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl -d says
    return requests.post(url, data=json.dumps(BODY | fields), headers=headers, timeout=TIMEOUT)


def tensors(**more: Tensor) -> list[Any]:
    """Inputs of BODY and others, as TensorRT-LLM's clients send them: without a batch dimension."""
    own: dict[str, Tensor] = {
        "text_input": ("BYTES", [PROMPT]),
        "sampling_param_max_tokens": ("INT32", [TOKENS]),
        "end_id": ("INT32", [-1]),
    }
    return [grpc_input(name, datatype, values) for name, (datatype, values) in (own | more).items()]


class Stream:
    """One ModelStreamInfer call."""

    def __init__(self, server: RunningServer) -> None:
        self.results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.client = grpc.InferenceServerClient(server.grpc_url)
        self.client.start_stream(lambda result, error: self.results.put((result, error)))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def ask(self, request_id: str = "", **inputs: Tensor) -> None:
        self.client.async_stream_infer(
            MODEL, tensors(**inputs), request_id=request_id, enable_empty_final_response=True
        )

    def next(self) -> tuple[dict[str, Any], bool]:
        """Outputs of the next response, and whether it is the last of its request; raises its error."""
        result, error = self.results.get(timeout=TIMEOUT)
        if error is not None:
            raise error
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        return outputs, response.parameters["triton_final_response"].bool_param

    def rest(self) -> Iterator[dict[str, Any]]:
        last = False
        while not last:
            outputs, last = self.next()
            if outputs:
                yield outputs


def test_the_quick_starts_curl(server: RunningServer, texts: list[str]) -> None:
    assert post(server, "generate").json() == OWN | {"text_output": PROMPT + texts[-1]}
    bare = post(server, "generate", sampling_param_exclude_input_from_output=True).json()
    assert bare == OWN | {"text_output": texts[-1]}


def test_streamed_over_http_each_event_has_the_text_so_far(server: RunningServer, texts: list[str]) -> None:
    events = post(server, "generate_stream", streaming=True).text.split("\n\n")
    found = [json.loads(event.removeprefix("data: ")) for event in events if event]
    assert all(event == OWN | {"text_output": event["text_output"]} for event in found)
    assert found[-1]["text_output"] == texts[-1]
    left = iter(texts)
    assert all(event["text_output"] in left for event in found), "in order; a busy server leaves some out"


def test_streamed_over_grpc(server: RunningServer, texts: list[str]) -> None:
    with Stream(server) as stream:
        stream.ask(streaming=("BOOL", [True]), return_finish_reason=("BOOL", [True]))
        found = list(stream.rest())
    assert [outputs["text_output"].tolist() for outputs in found] == [[text.encode()] for text in texts]
    assert [outputs["finish_reason"].tolist() for outputs in found] == [[b"None"]] * (TOKENS - 1) + [[b"length"]]
    assert set(found[0]) == {"text_output", "finish_reason"}


def test_model_infer_and_the_shapes_of_outputs(server: RunningServer, texts: list[str]) -> None:
    flags = ("return_finish_reason", "return_stop_reason", "return_cumulative_logprob", "return_attended_tokens")
    word = texts[-1][-3:]
    stop = texts[-1].index(word)
    with grpc.InferenceServerClient(server.grpc_url) as client:
        plain = client.infer(MODEL, tensors(), request_id="mine", client_timeout=TIMEOUT)
        asked = tensors(
            sampling_param_stop=("BYTES", ["no such text", word]),
            sampling_param_return_perf_metrics=("BOOL", [True]),
            **{name: ("BOOL", [True]) for name in flags},
        )
        full = client.infer(MODEL, asked, timeout=int(TIMEOUT * 1e6))
    assert plain.as_numpy("text_output").tolist() == [(PROMPT + texts[-1]).encode()]
    assert [output.name for output in plain.get_response().outputs] == ["text_output"]
    assert (plain.get_response().model_name, plain.get_response().id) == (MODEL, "mine")
    values = {output.name: full.as_numpy(output.name) for output in full.get_response().outputs}
    assert {name: array.shape for name, array in values.items()} == dict.fromkeys(values, (1,))
    assert values["text_output"][0] == (PROMPT + texts[-1][:stop]).encode()
    assert (values["finish_reason"][0], values["stop_reason"][0]) == (b"stop", word.encode())
    assert values["cumulative_logprob"][0] < 0
    assert values["arrival_time_ns"][0] < values["first_token_time_ns"][0] <= values["last_token_time_ns"][0]


def test_a_refusal_ends_its_request_and_not_its_call(server: RunningServer, texts: list[str]) -> None:
    """What is refused: tests/server/frontend/, test_llmapi_request.py, test_refusals.py and test_grpc_checks.py."""
    with Stream(server) as stream:
        stream.ask(sampling_param_temperature=("FP32", [-1.0]))
        with pytest.raises(grpc.InferenceServerException, match=r"sampling_param_temperature = -1\.0: must be finite"):
            stream.next()
        stream.ask()
        (answer,) = stream.rest()
    assert answer["text_output"].tolist() == [(PROMPT + texts[-1]).encode()]


def test_stop_ends_the_request_of_the_same_id(server: RunningServer) -> None:
    endless = {"sampling_param_max_tokens": ENDLESS, "return_finish_reason": ("BOOL", [True])}
    with Stream(server) as stream, Stream(server) as other:
        stream.ask("mine", **endless)
        wait_for(lambda: running(server.metrics_url) == 1)
        other.ask("mine", stop=("BOOL", [True]))
        assert not list(other.rest())
        last = list(stream.rest())[-1]
    assert last["finish_reason"].tolist() == [b"cancelled"]


def test_the_layouts_model_is_the_only_one(server: RunningServer) -> None:
    url = f"http://{server.http_url}/v2/models"
    assert requests.get(f"{url}/{MODEL}/ready", timeout=TIMEOUT).status_code == 200
    found = requests.get(f"{url}/{MODEL}", timeout=TIMEOUT).json()
    assert {"name": "text_input", "datatype": "BYTES", "shape": [-1]} in found["inputs"]
    assert requests.get(f"{url}/ensemble/ready", timeout=TIMEOUT).status_code == 404
    reply = requests.post(f"{url}/tensorrt_llm_bls/generate", json=BODY, timeout=TIMEOUT)
    assert (reply.status_code, reply.json()) == (
        404,
        {"error": "model tensorrt_llm_bls is not found; there are tensorrt_llm"},
    )
    with grpc.InferenceServerClient(server.grpc_url) as client:
        assert client.is_model_ready(MODEL)
        assert not client.is_model_ready("tensorrt_llm_bls")
        assert client.get_model_config(MODEL).config.max_batch_size == 0


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_chat(server: RunningServer, texts: list[str], protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    flags = ["--protocol", protocol, "--url", url, "--timeout", str(TIMEOUT), "--prompt", PROMPT, "--no-chat_template"]
    flags += ["--end_id", "-1", "--max_tokens", str(TOKENS), "--json"]
    assert chat.main([*flags, "--layout", "llmapi"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["output_tokens"], shown["finish_reason"]) == (texts[-1], TOKENS, "length")
    assert shown["cached_tokens_per_step"] > 0
    assert chat.main([*flags, "--layout", "llmapi", "--temperature", "-1", "--stop_word", "x", "--seed", "7"]) == 1
    assert "error: sampling_param_temperature = -1.0: must be finite" in capsys.readouterr().err
    assert chat.main(flags) == 1
    limit = f"must be llmapi, which the server at {url} was started with; give --layout llmapi"
    assert f"error: --layout = 'inflight_batcher_llm': {limit}" in capsys.readouterr().err

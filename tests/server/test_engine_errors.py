"""Errors of the engine after a request was accepted, in its prompt or in a decode step, reach the clients of every door."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import tritonclient.grpc as grpc
from safetensors.torch import load_file, save_file
from tests.conftest import RandomModel
from tests.server.soak.calls import OPENAI_ROUTE, ROUTES
from tests.support.door_processes import Door, doors, engine_process, events
from tests.support.failing_engine import (
    DEAD_ERROR,
    DEAD_PROMPT,
    FAILING_PROMPT,
    HANGING_PROMPT,
    HUNG_SECONDS,
    PROMPT_ERROR,
    STEP_ERROR,
)
from tests.support.grpc_inputs import grpc_input, inputs_of
from tests.support.live_server import LiveServer, live_server
from tests.support.server_streams import Stream, tokens
from tests.support.waiting import SECONDS, wait_for

from kvseek.builder import build
from kvseek.core.manifest import MANIFEST_FILE, read_manifest, write_manifest
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.server.engine.process import STATUS_FAILED
from kvseek.server.settings import ServeSettings

pytestmark = pytest.mark.server

SHARD = "rank0-00001-of-00001.safetensors"
LONG = 1500  # tokens of a request that runs beside the others
ANSWER = 6  # tokens of a short answer
ERROR = "must be finite"


@dataclass(frozen=True)
class Prompt:
    """A text and its token ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Poisoned:
    """An engine two of whose tokens have NaN as their embedding, so that the logits after them are NaN.

    `in_prompt` is such a token. `in_decode` is answered by two tokens and then by the other one, which the next step reads.
    The long answer to `healthy` has neither.
    """

    directory: Path
    in_prompt: Prompt
    in_decode: Prompt
    healthy: Prompt


@pytest.fixture(scope="module")
def poisoned(random_model: RandomModel, tmp_path_factory: pytest.TempPathFactory) -> Poisoned:
    directory = tmp_path_factory.mktemp("poisoned") / "engine"
    model = random_model("llama", max_position_embeddings=4096)
    limits = ("--max_batch_size", "4", "--max_seq_len", "4000", "--max_input_len", "100")
    where = ("--model", str(model), "--method", "full", "--output_dir", str(directory), "--quiet")
    assert build.main([*where, *limits]) == 0
    engine = Engine.load(directory)

    def prompt(text: str) -> Prompt:
        return Prompt(text, tuple(engine.tokenizer.encode(text)))

    def answer(prompt: Prompt, count: int) -> list[int]:
        return engine.generate([Request(prompt.ids, count)])[0]

    in_prompt, healthy = prompt("{"), prompt("one ship")
    safe = {*answer(healthy, LONG), *healthy.ids}
    (first,) = in_prompt.ids
    for in_decode in map(prompt, "abcdefghijklmnopqrstuvwxyz"):
        *before, second = answer(in_decode, 3)
        if second not in {*safe, *in_decode.ids, *before} and first not in {*safe, *before, second}:
            break
    else:
        raise AssertionError("no answer has a third token that is its own")
    weights = load_file(directory / SHARD)
    weights["embed.weight"][[first, second]] = torch.nan
    save_file(weights, directory / SHARD)
    manifest = read_manifest(directory)
    (directory / MANIFEST_FILE).unlink()
    write_manifest(directory, "model", manifest.fingerprint)
    return Poisoned(directory, in_prompt, in_decode, healthy)


Ask = Callable[[LiveServer, Prompt], str]  # returns the message of the error, empty without one


def over_http(path: str, stream: str, **fields: Any) -> Ask:
    def ask(server: LiveServer, prompt: Prompt) -> str:
        own = {"text_input": prompt.text, "end_id": -1, stream: "stream" in path, **fields}
        response = requests.post(f"http://{server.http_url}/v2/models/{path}", json=own, timeout=SECONDS)
        return message_of(response)

    return ask


def over_openai(path: str, stream: bool) -> Ask:
    def ask(server: LiveServer, prompt: Prompt) -> str:
        own: dict[str, Any] = {"prompt": prompt.text}
        if "chat" in path:
            own = {"messages": [{"role": "user", "content": prompt.text}]}
        own |= {"model": "model", "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": stream}
        return message_of(requests.post(f"http://{server.openai_url}/v1/{path}", json=own, timeout=SECONDS))

    return ask


def message_of(response: requests.Response) -> str:
    """Of an error, as status and body or as the last event of a stream."""
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    bodies = [json.loads(event) for event in events if event != "[DONE]"] or [response.json()]
    error = bodies[-1].get("error", "")
    assert bool(error) or response.status_code == 200
    assert not any("error" in body for body in bodies[:-1])
    return str(error)


def over_grpc(model: str, inputs: Callable[[Prompt], list[Any]]) -> Ask:
    def ask(server: LiveServer, prompt: Prompt) -> str:
        results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        client = grpc.InferenceServerClient(server.grpc_url)
        client.start_stream(lambda result, error: results.put((result, error)))
        try:
            client.async_stream_infer(model, inputs(prompt), enable_empty_final_response=True)
            while True:
                result, error = results.get(timeout=SECONDS)
                if error is not None:
                    return str(error)
                if result.get_response().parameters["triton_final_response"].bool_param:
                    return ""
        finally:
            client.stop_stream(cancel_requests=True)
            client.close()

    return ask


def inferred(model: str, inputs: Callable[[Prompt], list[Any]]) -> Ask:
    """ModelInfer, without a stream."""

    def ask(server: LiveServer, prompt: Prompt) -> str:
        with grpc.InferenceServerClient(server.grpc_url) as client:
            try:
                client.infer(model, inputs(prompt), client_timeout=SECONDS)
            except grpc.InferenceServerException as error:
                return str(error)
        return ""

    return ask


def text_inputs(stream: bool) -> Callable[[Prompt], list[Any]]:
    return lambda prompt: inputs_of({"text_input": prompt.text, "max_tokens": ANSWER, "end_id": -1, "stream": stream})


def llmapi_inputs(stream: bool) -> Callable[[Prompt], list[Any]]:
    values = {
        "sampling_param_max_tokens": ("INT32", [ANSWER]),
        "end_id": ("INT32", [-1]),
        "streaming": ("BOOL", [stream]),
    }
    return lambda prompt: [
        grpc_input("text_input", "BYTES", [prompt.text]),
        *(grpc_input(name, datatype, found) for name, (datatype, found) in values.items()),
    ]


OPENAI = {
    "openai": over_openai("completions", False),
    "openai stream": over_openai("completions", True),
    "openai chat": over_openai("chat/completions", False),
    "openai chat stream": over_openai("chat/completions", True),
}
LLMAPI = {
    "generate": over_http("tensorrt_llm/generate", "streaming", sampling_param_max_tokens=ANSWER),
    "generate_stream": over_http("tensorrt_llm/generate_stream", "streaming", sampling_param_max_tokens=ANSWER),
    "grpc": over_grpc("tensorrt_llm", llmapi_inputs(True)),
    "infer": inferred("tensorrt_llm", llmapi_inputs(False)),
}


def model_doors(model: str) -> dict[str, Ask]:
    return {
        f"{model} generate": over_http(f"{model}/generate", "stream", max_tokens=ANSWER),
        f"{model} generate_stream": over_http(f"{model}/generate_stream", "stream", max_tokens=ANSWER),
        f"{model} grpc": over_grpc(model, text_inputs(True)),
        f"{model} infer": inferred(model, text_inputs(False)),
    }


def ids(route: str) -> Ask:
    """A request of token ids to the model tensorrt_llm. A gRPC stream stays open until the server ends."""

    def ask(server: LiveServer, prompt: Prompt) -> str:
        return tokens(server, route, prompt.ids, ANSWER).join(SECONDS).error

    return ask


LAYOUTS = {
    "inflight_batcher_llm": model_doors("tensorrt_llm_bls")
    | {f"tensorrt_llm {route}": ids(route) for route in ROUTES}
    | OPENAI,
    "llmapi": LLMAPI | OPENAI,
}


class Beside:
    """A stream of LONG tokens that runs while others ask: where one has ended, however fast, the next begins."""

    def __init__(self, server: LiveServer, prompt: Prompt) -> None:
        self.server = server
        self.fields = {"text_input": prompt.text, "max_tokens": LONG, "end_id": -1}
        self.stream = self._begun()

    def ensure_running(self) -> None:
        """Return with a stream that has begun and not ended; raises AssertionError if one did not end well."""
        while self.stream.ended_at:
            self.end()
            self.stream = self._begun()

    def end(self) -> None:
        """Wait until the stream has ended as it should."""
        assert self.stream.join().count == LONG, self.stream.error
        assert not self.stream.error

    def _begun(self) -> Stream:
        return Stream(self.server, OPENAI_ROUTE, "tensorrt_llm_bls", self.fields).begun()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_door_tells_of_an_error_of_the_engine(layout: str, poisoned: Poisoned, tmp_path: Path) -> None:
    """Another request runs all the while; the server ends as it should."""
    log = tmp_path / "server.log"
    with live_server(poisoned.directory, log, "--layout", layout) as server:
        beside = Beside(server, poisoned.healthy)

        def told(ask: Ask, prompt: Prompt) -> str:
            beside.ensure_running()
            return ask(server, prompt)

        for name, ask in LAYOUTS[layout].items():
            assert ERROR in told(ask, poisoned.in_prompt), name
            if "chat" not in name:  # a chat template puts other tokens after those of the prompt
                assert ERROR in told(ask, poisoned.in_decode), name
            assert not told(ask, poisoned.healthy), name
        beside.end()
        assert server.stop() == 0
        assert not server.tracebacks()


@pytest.fixture(scope="module")
def failing(poisoned: Poisoned, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A door to an engine process that raises as tests/support/failing_engine.py says."""
    socket_path, settings = tmp_path_factory.mktemp("socket") / "engine.sock", ServeSettings(threads=1)
    module = "tests.support.failing_engine"
    where = (poisoned.directory, socket_path, settings)
    with doors(*where) as door, engine_process(*where, module) as process:
        wait_for(lambda: not asked(door, "generate", (5,)), "the door has found the engine")
        yield door
        process.terminate()
        assert process.wait(SECONDS) == 0


def asked(door: Door, path: str, prompt: Sequence[int], count: int = ANSWER) -> str:
    """Message of the error that the model tensorrt_llm, or with the path "v1" OpenAI's port, gives; empty without one."""
    if path == "v1":
        own: dict[str, Any] = {"model": "model", "prompt": list(prompt), "max_tokens": count, "temperature": 0}
        own |= {"ignore_eos": True, "stream": True}  # greedy: a token that is drawn may be one of NaN
        return message_of(requests.post(f"{door.openai_url}/completions", json=own, timeout=SECONDS))
    body = {"input_ids": list(prompt), "request_output_len": count, "end_id": -1, "streaming": "stream" in path}
    return message_of(door.post(f"tensorrt_llm/{path}", body))


PATHS = ("generate", "generate_stream", "v1")


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_whose_reading_fails_ends_alone(path: str, failing: Door) -> None:
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(asked, failing, "generate_stream", (5, 6), 300)
        assert PROMPT_ERROR in asked(failing, path, range(5, 5 + FAILING_PROMPT))
        assert not beside.result(SECONDS)


def test_a_step_that_fails_ends_its_requests_and_no_later_one(failing: Door) -> None:
    first = {"input_ids": [5, 6], "request_output_len": 3000, "end_id": -1, "streaming": True}
    for path in PATHS:
        with failing.post("tensorrt_llm/generate_stream", first, stream=True) as response:
            stream = events(response)
            assert "output_ids" in next(stream)  # it decodes alone
            assert STEP_ERROR in asked(failing, path, (7, 8), 3000)
            *_, last = stream
            assert STEP_ERROR in last["error"]
        assert not asked(failing, path, (7, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "error"),
    [(DEAD_PROMPT, DEAD_ERROR), (HANGING_PROMPT, f"EngineHungError: a step has not ended for {HUNG_SECONDS:g} s")],
)
def test_an_engine_that_cannot_go_on_ends_its_process_by_name(
    prompt: int, error: str, poisoned: Poisoned, tmp_path: Path
) -> None:
    """All its requests are told why."""
    where = (poisoned.directory, tmp_path / "engine.sock", ServeSettings(threads=1))
    module = "tests.support.failing_engine"
    with doors(*where) as door, ThreadPoolExecutor() as pool, engine_process(*where, module) as process:
        wait_for(lambda: not asked(door, "generate", (5,)), "the door has found the engine")
        beside = pool.submit(asked, door, "generate_stream", (5, 6), 3000)
        told = asked(door, "v1", range(5, 5 + prompt))
        assert error in told
        assert error in beside.result(SECONDS)
        assert process.wait(SECONDS) == STATUS_FAILED

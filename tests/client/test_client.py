"""Clients against a small HTTP server that answers as Triton does, and against no server at all."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from kvseek.client import chat
from kvseek.client.chunk import AnswerFigures, Chunk
from kvseek.client.errors import ClientError
from kvseek.client.grpc_client import GrpcClient
from kvseek.client.http_client import HttpClient
from kvseek.client.openai_client import OpenAIClient
from kvseek.client.options import GenerateOptions

TEXT = "Ruhe und Kühle"
EVENTS = [
    {"text_output": "", "finish_reason": "", "prefill_progress": 0.5, "num_input_tokens": 40},
    {"text_output": "Ruhe und", "num_output_tokens": 1, "model_name": "tensorrt_llm_bls"},
    {
        "text_output": " Kühle",
        "finish_reason": "length",
        "num_output_tokens": 2,
        "cached_tokens": 40,
        "attended_tokens": 10.0,
    },
]


class TritonLike(BaseHTTPRequestHandler):
    """Answers /generate with one JSON object and /generate_stream with events.

    As text, "bad" is refused and "silent" never answered.
    """

    received: list[dict[str, Any]]
    ended: threading.Event  # set when those that answer nothing may go

    def do_GET(self) -> None:
        """Answer as OpenAI's port does where there is nothing."""
        self.reply(404, json.dumps({"error": {"message": f"{self.path} is not found"}}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.received.append(body)
        if body["text_input"] == "bad":
            event = "data: " if self.path.endswith("/generate_stream") else ""
            self.reply(400, event + json.dumps({"error": "text_input = 'bad': must be good"}))
        elif body["text_input"] == "fails later":
            self.reply(200, f'data: {json.dumps(EVENTS[1])}\n\ndata: {{"error": "the engine failed"}}\n\n')
        elif body["text_input"] in ("silent", "silent later"):
            if body["text_input"] == "silent later":
                self.reply(200, f"data: {json.dumps(EVENTS[1])}\n\n")
            self.ended.wait(10)
        elif body["text_input"] == "no triton":
            self.reply(502, "bad gateway")
        elif self.path.endswith("/generate_stream"):
            self.reply(200, "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS))
        else:
            self.reply(200, json.dumps({"text_output": TEXT, "finish_reason": "length", "num_output_tokens": 2}))

    def reply(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments: object) -> None:
        """Keep the tests' output quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    TritonLike.received, TritonLike.ended = [], threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), TritonLike) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        TritonLike.ended.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_fields_that_are_not_set_are_not_sent() -> None:
    fields = GenerateOptions(max_tokens=3, temperature=0.0).fields("hello", stream=True)
    assert fields == {
        "text_input": "hello",
        "max_tokens": 3,
        "temperature": 0.0,
        "apply_chat_template": False,
        "return_prefill_progress": False,
        "exclude_input_in_output": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "stream": True,
    }
    assert GenerateOptions(stop_words=("a", "b")).fields("", stream=False)["stop_words"] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "top_p"),
    [
        (GenerateOptions(), None),
        (GenerateOptions(temperature=0.0), None),
        (GenerateOptions(temperature=0.8), 1.0),
        (GenerateOptions(temperature=0.8, top_k=0), 1.0),
        (GenerateOptions(temperature=0.8, top_k=5), None),
        (GenerateOptions(temperature=0.8, top_p=0.5), 0.5),
    ],
)
def test_a_temperature_samples(options: GenerateOptions, top_p: float | None) -> None:
    """The models would draw the likeliest token, as TensorRT-LLM's do, if top_k and top_p were both off."""
    assert options.fields("x", stream=True).get("top_p") == top_p


def test_http_generate(url: str) -> None:
    chunk = HttpClient(url).generate("hello", GenerateOptions(max_tokens=2))
    assert chunk == Chunk(TEXT, "length", num_output_tokens=2)
    assert TritonLike.received[0]["stream"] is False


def test_http_stream_is_the_events_in_order(url: str) -> None:
    chunks = list(HttpClient(url).generate_stream("hello", GenerateOptions()))
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [chunk.prefill_progress for chunk in chunks] == [0.5, 1.0, 1.0]
    assert chunks[-1].finish_reason == "length"
    assert TritonLike.received[0]["stream"] is True


def test_http_errors_are_the_servers(url: str) -> None:
    client = HttpClient(url)
    with pytest.raises(ClientError, match="text_input = 'bad': must be good"):
        client.generate("bad", GenerateOptions())
    with pytest.raises(ClientError, match=r"^text_input = 'bad': must be good$"):
        list(client.generate_stream("bad", GenerateOptions()))
    with pytest.raises(ClientError, match="the engine failed"):
        list(client.generate_stream("fails later", GenerateOptions()))
    with pytest.raises(ClientError, match="HTTP status 502: bad gateway"):
        client.generate("no triton", GenerateOptions())


@pytest.mark.parametrize("client", [GrpcClient, HttpClient])
def test_no_server_says_what_to_do(client: type[GrpcClient] | type[HttpClient], nobody: str) -> None:
    with pytest.raises(ClientError, match=f"no server answers at {nobody} .*start one with kvseek serve"):
        list(client(nobody).generate_stream("hello", GenerateOptions()))


CLIENTS: dict[str, Callable[[str], Iterator[Chunk]]] = {
    "grpc": lambda url: GrpcClient(url).generate_stream("hello", GenerateOptions()),
    "http": lambda url: HttpClient(url).generate_stream("hello", GenerateOptions()),
    "openai": lambda url: OpenAIClient(url).chat_stream([], GenerateOptions()),
}


@pytest.mark.parametrize(
    ("kind", "address", "message"),
    [
        ("grpc", "http://127.0.0.1:9", "url = 'http://127.0.0.1:9': must be HOST:PORT, without .*; write 127.0.0.1:9"),
        ("http", "http://127.0.0.1:9/v2", "url = 'http://127.0.0.1:9/v2': must be HOST:PORT, .*; write 127.0.0.1:9"),
        ("grpc", "localhost", "url = 'localhost': must be HOST:PORT"),
        ("http", "localhost:70000", "url = 'localhost:70000': must be HOST:PORT"),
        ("openai", "localhost:9000/v1", "openai_url = 'localhost:9000/v1': must be http://HOST:PORT/v1"),
        ("openai", "grpc://localhost:9000", "openai_url = 'grpc://localhost:9000': must be http://HOST:PORT/v1"),
        ("grpc", "nobody.invalid:9", "no host has the name in nobody.invalid:9"),
        ("http", "nobody.invalid:9", "no host has the name in nobody.invalid:9"),
        ("openai", "http://nobody.invalid:9/v1", "no host has the name in http://nobody.invalid:9/v1"),
        ("grpc", "{http}", "what listens at {http} does not speak gRPC .*--protocol http"),
        ("http", "{grpc}", "what listens at {grpc} does not speak HTTP .*--protocol grpc"),
        ("openai", "https://{http}/v1", "no TLS with https://{http}/v1 .*give an http:// URL"),
        ("openai", "http://{http}", "http://{http} offers no models by OpenAI's API .*with /v1"),
        ("http", "{closing}", "{closing} closed the connection"),
        ("openai", "http://{closing}/v1", "http://{closing}/v1 closed the connection"),
    ],
)
def test_a_wrong_address_is_told_from_a_server_that_is_absent(
    kind: str, address: str, message: str, places: dict[str, str]
) -> None:
    with pytest.raises(ClientError, match=message.format(**places)):
        list(CLIENTS[kind](address.format(**places)))


@pytest.fixture
def places(url: str) -> Iterator[dict[str, str]]:
    """An HTTP port, a gRPC port, and one that closes every connection."""
    server = grpc.server(ThreadPoolExecutor(1))
    other = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with socket.create_server(("127.0.0.1", 0)) as closing:
        threading.Thread(target=close_all, args=[closing], daemon=True).start()
        yield {"http": url, "grpc": other, "closing": f"127.0.0.1:{closing.getsockname()[1]}"}
        closing.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
    server.stop(None).wait()


def close_all(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            connection.recv(1)
            connection.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (GenerateOptions(max_tokens=2**40), r"max_tokens = 1099511627776: must be in \[-2147483648, 2147483647\]"),
        (GenerateOptions(seed=-1), r"seed = -1: must be in \[0, 18446744073709551615\]"),
        (GenerateOptions(session_id="\udcff"), "session_id: character 0 is half of a surrogate pair"),
    ],
)
def test_what_a_message_cannot_hold_is_not_sent_as_something_else(options: GenerateOptions, message: str) -> None:
    with pytest.raises(ClientError, match=message):
        list(GrpcClient("127.0.0.1:9").generate_stream("hello", options))


class Silent(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Takes a stream, as a server whose model has crashed, and answers nothing."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        self.ended.wait(10)
        yield from ()


def test_a_silent_grpc_server_is_given_up() -> None:
    silent = Silent()
    server = grpc.server(ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(silent, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with pytest.raises(ClientError, match=rf"timeout = 0.2 s: the server at {address} sent nothing .*--timeout"):
            list(GrpcClient(address, timeout=0.2).generate_stream("hello", GenerateOptions()))
    finally:
        silent.ended.set()
        server.stop(None).wait()


@pytest.mark.parametrize("prompt", ["silent", "silent later"])
def test_a_silent_http_server_is_given_up(url: str, prompt: str) -> None:
    with pytest.raises(ClientError, match=rf"timeout = 0.2 s: the server at {url} sent nothing .*--timeout"):
        list(HttpClient(url, timeout=0.2).generate_stream(prompt, GenerateOptions()))


def test_figures_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 3.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    figures = AnswerFigures(started_at=next(clock))
    for event in EVENTS:
        values = {**event, "text": event["text_output"]}
        figures.add(Chunk(**{key: value for key, value in values.items() if key not in ("text_output", "model_name")}))
    assert figures.to_dict() == {
        "prompt_tokens": 40,
        "output_tokens": 2,
        "ttft_seconds": 2.0,
        "tpot_seconds": 0.5,
        "finish_reason": "length",
        "attended_tokens_per_step": 10.0,
        "cached_tokens_per_step": 40.0,
    }
    assert figures.summary().endswith("40 tokens in, 2 out · each step attended to 10 of 40 cached tokens (25.0%)")
    assert AnswerFigures(started_at=0.0).to_dict()["attended_tokens_per_step"] is None


def ask(url: str, *flags: str) -> int:
    return chat.main(["--protocol", "http", "--url", url, *flags])


def test_chat_shows_the_text_and_the_figures(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(url, "--prompt", "hello") == 0
    out = capsys.readouterr().out
    assert f"{TEXT}\n" in out
    assert "40 tokens in, 2 out" in out
    assert TritonLike.received[0]["apply_chat_template"] is True


def test_chat_with_a_document_for_machines(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "log.txt"
    document.write_text("The light was lit.\n", encoding="utf-8")
    assert ask(url, "--document", str(document), "--question", "When?", "--no-chat_template", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["output_tokens"]) == (TEXT, 2)
    sent = TritonLike.received[0]
    assert sent["text_input"] == chat.build_prompt("The light was lit.\n", "When?")
    assert sent["text_input"].startswith("The light was lit.")
    assert sent["apply_chat_template"] is False


def test_chat_reads_files_and_standard_input(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("from a file", encoding="utf-8")
    assert ask(url, "--prompt_file", str(prompt)) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("from standard input"))
    assert ask(url) == 0
    assert [body["text_input"] for body in TritonLike.received] == ["from a file", "from standard input"]


def test_chat_errors(url: str, nobody: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(url, "--prompt", "bad") == 1
    assert "error: text_input = 'bad': must be good" in capsys.readouterr().err
    assert ask(nobody, "--prompt", "hello") == 1
    assert f"error: no server answers at {nobody}" in capsys.readouterr().err
    assert ask(url, "--prompt", "hello", "--document", str(tmp_path / "absent.txt")) == 1
    assert "absent.txt" in capsys.readouterr().err
    assert ask(url, "--prompt", "silent", "--timeout", "0.2") == 1
    assert "error: timeout = 0.2 s: the server at" in capsys.readouterr().err
    assert ask(url, "--prompt", "hello", "--timeout", "0") == 1
    assert "error: --timeout = 0: must be > 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        ask(url, "--prompt", "hello", "--top_q", "1")

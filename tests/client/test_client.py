"""Clients against small HTTP servers that answer as Triton and the OpenAI port do, and against no server at all."""

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
from kvseek.client.chat import Conversation, read_messages
from kvseek.client.chunk import AnswerFigures, Chunk
from kvseek.client.errors import ClientError
from kvseek.client.grpc_client import GrpcClient
from kvseek.client.http_client import HttpClient
from kvseek.client.openai_client import OpenAIClient, chat_fields
from kvseek.client.text_models import GenerateOptions

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


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """A server in a thread of its own, by its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def url() -> Iterator[str]:
    TritonLike.received, TritonLike.ended = [], threading.Event()
    with serving(TritonLike) as port:
        yield f"127.0.0.1:{port}"
        TritonLike.ended.set()


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_fields_that_are_not_set_are_not_sent() -> None:
    fields = GenerateOptions(max_tokens=3, temperature=0.0).fields("hello", stream=True)
    assert fields.items() >= {"text_input": "hello", "max_tokens": 3, "temperature": 0.0, "stream": True}.items()
    assert "top_k" not in fields
    assert None not in fields.values()
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


# Conversations with the OpenAI port


def show(chunks: Iterator[Chunk]) -> tuple[str, AnswerFigures]:
    return "".join(chunk.text for chunk in chunks), AnswerFigures()


@contextlib.contextmanager
def answering(events: list[Any], status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers every chat with these events, and what it was sent."""
    sent: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, json.dumps({"data": [{"id": "m"}]}).encode())

        def do_POST(self) -> None:
            sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            data = b"".join(
                b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events
            )
            self._reply(status, data if status == 200 else json.dumps(events[0]).encode())

        def _reply(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Handler) as port:
        yield f"http://127.0.0.1:{port}/v1", sent


def said(content: str, reason: str | None = None, name: str = "content") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {name: content}, "finish_reason": reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}


def test_every_turn_sends_all_messages(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with answering([said("Sa"), said("lt."), said("", "stop"), USAGE, b"[DONE]"]) as (url, sent):
        client = OpenAIClient(url)
        Conversation(file, "Be brief.").turn("What is the sea?", client, GenerateOptions(), show)
        Conversation(file).turn("And a lake?", client, GenerateOptions(), show)
    assert [message["content"] for message in sent[1]["messages"]] == [
        "Be brief.",
        "What is the sea?",
        "Salt.",
        "And a lake?",
    ]
    assert [message["role"] for message in read_messages(file)] == ["system", *["user", "assistant"] * 2]


def test_figures_end_with_the_servers_numbers() -> None:
    with answering([said("Salt."), said("", "stop"), USAGE, b"[DONE]"]) as (url, _):
        chunks = list(OpenAIClient(url).chat_stream([{"role": "user", "content": "x"}], GenerateOptions()))
    assert [chunk.text for chunk in chunks] == ["Salt.", ""]
    assert (chunks[-1].finish_reason, chunks[-1].num_input_tokens, chunks[-1].num_output_tokens) == ("stop", 5, 2)


def test_thinking_is_shown_and_not_remembered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "talk.json"
    thought = [said("It is ", name="reasoning"), said("wet.", name="reasoning")]
    with answering([*thought, said("Salt"), said("."), said("", "stop"), USAGE, b"[DONE]"]) as (url, _):
        chat.main(["--openai_url", url, "--conversation", str(file), "--prompt", "What is the sea?"])
    assert "It is wet.\n\nSalt.\n" in capsys.readouterr().out
    assert read_messages(file)[-1] == {"role": "assistant", "content": "Salt."}


@pytest.mark.parametrize(
    ("events", "status", "message"),
    [
        ([said("Sa"), {"error": {"message": "the engine process ended"}}], 200, "the engine process ended"),
        ([said("Sa")], 200, "broke off its answer"),
        ([{"error": {"message": "the queue is full"}}], 429, "the queue is full"),
    ],
)
def test_an_answer_that_failed_is_not_remembered(tmp_path: Path, events: list[Any], status: int, message: str) -> None:
    file = tmp_path / "talk.json"
    with answering(events, status) as (url, _), pytest.raises(ClientError, match=message):
        Conversation(file).turn("x", OpenAIClient(url), GenerateOptions(), show)
    assert not file.exists()


def test_a_typed_conversation_goes_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "log.txt"
    document.write_text("The log.")
    lines = iter(["first", "second"])
    answers: list[Any] = [{"error": {"message": "the queue is full"}}]

    def typed(_: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        if line == "second":
            answers[:] = [said("Salt."), said("", "stop"), USAGE, b"[DONE]"]
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with answering(answers) as (url, sent):
        assert chat.main(["--openai_url", url, "--document", str(document)]) == 0
    assert "error: " in (printed := capsys.readouterr()).err
    assert "the queue is full" in printed.err
    assert "Salt." in printed.out
    contents = [[message["content"] for message in body["messages"]] for body in sent]
    assert len(contents[1]) == 1, "the failed question is not remembered"
    assert contents[1][0].startswith("The log."), "the document goes with the first question that is answered"


def test_it_is_greedy_unless_told_otherwise() -> None:
    assert chat_fields(GenerateOptions())["temperature"] == 0
    assert "temperature" not in chat_fields(GenerateOptions(top_k=5)), "then the server's default, 1"
    assert chat_fields(GenerateOptions(temperature=0.5, end_id=-1))["ignore_eos"] is True


@pytest.mark.parametrize("content", ["{", "{}", '[{"role": "user"}]', '[{"role": 1, "content": "x"}]', '["x"]'])
def test_files_that_are_no_conversation_are_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(content)
    with pytest.raises(ClientError, match=r"--conversation = .*talk\.json"):
        Conversation(file)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "12 knots", "tool_call_id": "call_1"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1"}]},
        {"role": "function", "name": "wind", "content": "12 knots"},
    ],
)
def test_messages_of_tools_are_refused_by_name(tmp_path: Path, message: dict[str, Any]) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps([{"role": "user", "content": "x"}, message]))
    with pytest.raises(ClientError, match=r"message 1 belongs to a tool: must be of .* kvseek has no tools, remove"):
        Conversation(file)


def test_answers_with_empty_fields_of_tools_are_read(tmp_path: Path) -> None:
    """OpenAI's client writes them so; the server takes null and an empty list."""
    file = tmp_path / "talk.json"
    answer = {"role": "assistant", "content": "x", "tool_calls": None, "function_call": None}
    file.write_text(json.dumps([{"role": "user", "content": "x"}, answer, {**answer, "tool_calls": []}]))
    assert len(Conversation(file).messages) == 3


def test_a_system_message_must_come_first(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text('[{"role": "user", "content": "x"}]')
    with pytest.raises(ClientError, match="--system"):
        Conversation(file, "Be brief.")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--system", "x"], "--system: is for the OpenAI port"),
        (["--openai_url", "http://x/v1", "--protocol", "http"], "--protocol = http: has no meaning with --openai_url"),
        (["--openai_url", "http://x/v1", "--end_id", "5"], "--end_id = 5: has no meaning"),
        (["--openai_url", "http://x/v1", "--no-chat_template"], "--no-chat_template: has no meaning"),
        (["--openai_url", "http://127.0.0.1:1/v1"], "no server answers at http://127.0.0.1:1/v1"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--prompt", "x", *flags]) == 1
    assert message in capsys.readouterr().err

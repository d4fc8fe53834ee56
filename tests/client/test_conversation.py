"""Conversations of `kvseek chat` with the OpenAI port, without a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvseek.client import chat
from kvseek.client.chunk import AnswerFigures, Chunk
from kvseek.client.conversation import Conversation, read_messages
from kvseek.client.errors import ClientError
from kvseek.client.openai_client import OpenAIClient, chat_fields
from kvseek.client.options import GenerateOptions


def show(chunks: Iterator[Chunk]) -> tuple[str, AnswerFigures]:
    return "".join(chunk.text for chunk in chunks), AnswerFigures()


@contextmanager
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

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def text(content: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}


def test_every_turn_sends_all_messages(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with answering([text("Sa"), text("lt."), text("", "stop"), USAGE, b"[DONE]"]) as (url, sent):
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
    with answering([text("Salt."), text("", "stop"), USAGE, b"[DONE]"]) as (url, _):
        chunks = list(OpenAIClient(url).chat_stream([{"role": "user", "content": "x"}], GenerateOptions()))
    assert [chunk.text for chunk in chunks] == ["Salt.", ""]
    assert (chunks[-1].finish_reason, chunks[-1].num_input_tokens, chunks[-1].num_output_tokens) == ("stop", 5, 2)


@pytest.mark.parametrize(
    ("events", "status", "message"),
    [
        ([text("Sa"), {"error": {"message": "the engine process ended"}}], 200, "the engine process ended"),
        ([text("Sa")], 200, "broke off its answer"),
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
            answers[:] = [text("Salt."), text("", "stop"), USAGE, b"[DONE]"]
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

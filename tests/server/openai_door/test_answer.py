"""Choices that end together, clients that do not read, and connections beyond the limit."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from starlette.types import Receive, Scope, Send
from tests.support.waiting import SECONDS

from kvseek.core.errors import ErrorCode
from kvseek.server.openai_door.answer import ABORT, Writer, _merged
from kvseek.server.openai_door.app import ErrorsAsJson, Gate, make_app
from kvseek.server.openai_door.errors import StatusError, error_json, error_response
from kvseek.server.openai_door.listener import SPARE_CONNECTIONS, Listener
from kvseek.server.openai_door.request_body import ClientLeftError, unless_left
from kvseek.server.requests.generations import CodedError
from kvseek.server.requests.keys import Keys
from kvseek.server.requests.unread import UnreadAnswer, UnreadAnswers


async def pieces(*texts: str, error: Exception | None = None, endless: bool = False) -> AsyncIterator[dict[str, Any]]:
    for text in texts:
        yield {"text": text}
        await asyncio.sleep(0)
    if error is not None:
        raise error
    if endless:
        await asyncio.Event().wait()


def test_pieces_of_all_choices_arrive_in_their_own_order() -> None:
    async def collect() -> list[tuple[int, dict[str, Any]]]:
        return [each async for each in _merged([pieces("a", "b"), pieces("x"), pieces()])]

    found = asyncio.run(collect())
    assert [piece["text"] for index, piece in found if index == 0] == ["a", "b"]
    assert [piece["text"] for index, piece in found if index == 1] == ["x"]


def test_an_error_of_one_choice_ends_all() -> None:
    async def collect() -> None:
        error = CodedError(ErrorCode.QUEUE_FULL, "full")
        async for _ in _merged([pieces("a", endless=True), pieces(error=error)]):
            pass
        raise AssertionError("the error is lost")

    with pytest.raises(CodedError, match="full"):
        asyncio.run(asyncio.wait_for(collect(), SECONDS))


def test_an_error_that_nobody_has_foreseen_is_told_as_json_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> bytes:
        raise ValueError("/private/path")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    service: Any = SimpleNamespace(model="tiny")
    app = make_app(service, Keys(()), list, fail, lambda: False)
    scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/metrics", "raw_path": b"/metrics"}
    scope |= {"query_string": b"", "root_path": "", "scheme": "http", "headers": [], "server": ("127.0.0.1", 9000)}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 500
    error = json.loads(sent[1]["body"])["error"]
    assert error["type"] == "server_error"
    assert "/private" not in error["message"]
    assert "/private/path" in caplog.text, "the log says more"


def test_a_client_that_does_not_read_is_cut_off() -> None:
    aborted: list[bool] = []

    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    answer = UnreadAnswer(UnreadAnswers(1 << 20, seconds=0.01))
    writer = Writer({"state": {ABORT: lambda: aborted.append(True)}}, never, answer)
    with pytest.raises(ClientLeftError):
        asyncio.run(writer.event(b"{}"))
    assert aborted == [True]


def test_who_does_not_read_a_list_of_models_is_cut_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseek.server.openai_door.app.WRITE_SECONDS", 0.01)
    aborted: list[bool] = []

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    service: Any = SimpleNamespace(model="tiny", config=SimpleNamespace(max_seq_len=9))
    app = make_app(service, Keys(()), list, never, lambda: False)
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/models", "raw_path": b"/v1/models"}
    scope |= {"http_version": "1.1", "query_string": b"", "root_path": "", "scheme": "http", "headers": []}
    scope["state"] = {ABORT: lambda: aborted.append(True)}
    with pytest.raises(ClientLeftError):
        asyncio.run(app(scope, never, never))
    assert aborted


def test_a_large_answer_is_given_to_the_server_in_pieces() -> None:
    """It would take all of it at once, however slowly the client reads."""
    unread, sizes = UnreadAnswers(1 << 20), list[int]()

    async def send(message: Any) -> None:
        sizes.append(len(message.get("body", b"")))
        assert unread.bytes == 1 << 20, "all of it counts until the last piece is taken"

    async def run() -> None:
        with unread.answer() as answer:
            await Writer({"state": {ABORT: list}}, send, answer).all(bytes(1 << 20))
            assert unread.bytes == 0

    asyncio.run(run())
    assert sizes == [0, *([64 << 10] * 16)]


def test_a_client_that_leaves_cancels_the_work() -> None:
    cancelled: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientLeftError):
        asyncio.run(unless_left(receive, work()))
    assert cancelled == [True]


def test_an_unforeseen_error_is_500_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    status, body = error_json(ZeroDivisionError("a prompt"))
    assert (status, body["error"]["type"], body["error"]["code"]) == (500, "server_error", "internal_error")
    assert "a prompt" not in body["error"]["message"]
    assert "a request failed" in caplog.text


@contextmanager
def listening(app: Any, most: int) -> Iterator[int]:
    """An application on a port, whose loop runs in a thread of its own."""
    loop, listener = asyncio.new_event_loop(), Listener(most, 5.0)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(listener.start(app, "127.0.0.1", 0, "--port"), loop).result(SECONDS)
    finally:
        asyncio.run_coroutine_threadsafe(listener.close(), loop).result(SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(StatusError(413, "too large", "large"))(scope, receive, send)


def test_a_client_that_is_still_sending_reads_its_refusal() -> None:
    with listening(refuse, 4) as port:
        for _ in range(5):
            response = requests.post(f"http://127.0.0.1:{port}/", data=b"x" * (20 << 20), timeout=SECONDS)
            assert (response.status_code, response.headers["Connection"]) == (413, "close")


def test_beyond_the_limit_requests_are_refused_and_health_is_not() -> None:
    full = Gate(refuse, Keys(()), lambda: True)
    with listening(full, 4) as port:
        response = requests.post(f"http://127.0.0.1:{port}/v1/completions", data=b"{}", timeout=SECONDS)
        assert (response.status_code, response.headers["Connection"]) == (503, "close")
        assert "open connections" in response.json()["error"]["message"]
        assert requests.get(f"http://127.0.0.1:{port}/health", timeout=SECONDS).status_code == 413, "it is passed on"


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise ZeroDivisionError("secret")


def test_a_fault_of_a_handler_is_answered_as_json() -> None:
    with listening(ErrorsAsJson(broken), 4) as port:
        response = requests.get(f"http://127.0.0.1:{port}/", timeout=SECONDS)
        assert response.status_code == 500
        assert "secret" not in json.dumps(response.json())


def test_connections_beyond_the_limit_are_closed() -> None:
    with listening(refuse, 1) as port:
        held = [socket.create_connection(("127.0.0.1", port), SECONDS) for _ in range(1 + SPARE_CONNECTIONS)]
        with socket.create_connection(("127.0.0.1", port), SECONDS) as further, suppress(ConnectionResetError):
            assert further.recv(1) == b""
        for each in held:
            each.close()

"""Clients that ask and do not read: what their answers, logits above all, may take of memory, and that others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import requests
from tests.server.frontend.test_http_faults import FakeEngine, directory
from tests.support.door_processes import Door, doors
from tests.support.waiting import SECONDS, wait_for

from kvseek.core.errors import QueueFullError, RequestError
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.server.engine.process import FRAME_BYTES, FrontendConnection
from kvseek.server.requests.engine_client import MAX_FRAME_BYTES, FromEngine
from kvseek.server.requests.unread import OTHER_UNREAD_BYTES, UnreadAnswers, UnreadError
from kvseek.server.settings import ServeSettings

__all__ = ["directory"]  # a fixture
pytestmark = pytest.mark.anyio
SETTINGS = ServeSettings(threads=1, max_logits=4096)  # of which this engine knows nothing
CLIENTS = 24
NUMBERS = np.random.default_rng(5).random(800_000, np.float32)
LOGITS = [StepOutput(1, 7, FinishReason.LENGTH, generation_logits=NUMBERS.tobytes())]
TENSORS = {"input_ids": [5, 6], "request_output_len": 4, "end_id": -1, "return_generation_logits": True}
CONTEXT = SamplingConfig(return_context_logits=True)
ASKED = {"generate": TENSORS, "generate_stream": TENSORS | {"streaming": True}}


@pytest.fixture(scope="module")
def running(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, Door]]:
    path = tmp_path_factory.mktemp("unread") / "engine.sock"
    engine = FakeEngine(path, LOGITS)
    with doors(directory, path, SETTINGS) as door:
        wait_for(lambda: 'process="engine"} 1' in door.metrics())
        yield engine, door
        engine.die()


def peak_bytes(door: Door) -> int:
    """The most memory that the doors have had since the last question."""
    folder = Path(f"/proc/{door.process.pid}")
    (peak,) = (line for line in (folder / "status").read_text().splitlines() if line.startswith("VmHWM"))
    (folder / "clear_refs").write_text("5")
    return int(peak.split()[1]) << 10


@pytest.mark.parametrize("name", ["generate", pytest.param("generate_stream", marks=pytest.mark.slow)])
def test_answers_that_nobody_reads_have_a_limit_and_others_are_served(
    name: str, running: tuple[FakeEngine, Door]
) -> None:
    _, door = running
    path, data = f"/v2/models/tensorrt_llm/{name}", json.dumps(ASKED[name]).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: door\r\nContent-Length: {len(data)}\r\n\r\n"

    def ask() -> int:
        return len(requests.post(f"http://127.0.0.1:{door.port}{path}", data=data, timeout=SECONDS).content)

    whole = ask()
    assert CLIENTS * whole > 4 * OTHER_UNREAD_BYTES
    before = (peak_bytes(door), peak_bytes(door))[1]
    with contextlib.ExitStack() as stack:
        for _ in range(CLIENTS):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            client.connect(("127.0.0.1", door.port))
            client.sendall(head.encode() + data)
        for _ in range(3):
            assert ask() == whole
        assert peak_bytes(door) - before < 3 * OTHER_UNREAD_BYTES, "with what writing one takes"


async def _never() -> None:
    await asyncio.Event().wait()


async def test_the_costliest_answer_makes_room() -> None:
    unread = UnreadAnswers(100)
    with contextlib.ExitStack() as stack:
        left, small, gathering, other = (stack.enter_context(unread.answer()) for _ in range(4))
        writing, slow = (asyncio.create_task(each.deliver(size, _never)) for each, size in ((left, 30), (small, 1)))
        gathering.add(60)
        await asyncio.sleep(0.1)
        await other.deliver(39, lambda: asyncio.sleep(0))
        with pytest.raises(UnreadError, match="30 bytes unread"):
            await writing
        assert unread.bytes == 61
        other.add(40)
        with pytest.raises(QueueFullError, match=r"have 101 bytes: must be <= 100; .*this answer has 60 bytes"):
            await gathering.deliver(1, _never)  # it cannot be seen that its client would not read, but it is large
        await gathering.deliver(0, lambda: asyncio.sleep(0))  # the error
        for each in (small, other):
            each.check()
        assert unread.bytes == 41
        slow.cancel()
        await asyncio.wait([slow])
    other.add(7)  # of an engine that does not know yet
    assert unread.bytes == 0


async def test_every_write_has_a_time_limit() -> None:
    unread = UnreadAnswers(100, seconds=0.01)
    with unread.answer() as answer, pytest.raises(UnreadError):
        await answer.deliver(10, _never)
    assert unread.bytes == 0


def test_logits_are_computed_if_there_is_room_for_them_beside_what_clients_have_not_read() -> None:
    unread, largest = UnreadAnswers(1200, max_logits=70, vocabulary=10), Request((5,) * 7, 9, CONTEXT)
    assert [unread.reserve(largest) for _ in range(4)] == [280] * 4
    assert unread.reserve(Request((5,) * 999, 9)) == 0, "asks for none"
    with unread.answer() as answer:
        answer.add(41)
        with pytest.raises(
            QueueFullError, match="1,161 bytes are on their way to clients: must be <= 1,200 with the 40 of"
        ):
            unread.reserve(Request((5,), 9, CONTEXT))
        answer.remove(1)
        assert unread.reserve(Request((5,), 9, CONTEXT)) == 40
    unread.release(40)
    unread.release(280)
    assert unread.reserve(largest) == 280


@pytest.mark.parametrize("most", [70, 0])
def test_a_request_for_too_many_is_refused(most: int) -> None:
    unread = UnreadAnswers(1 << 20, max_logits=most, vocabulary=10)
    with pytest.raises(RequestError, match=rf"8 tokens × 10 logits are asked for: must be <= --max_logits = {most}"):
        unread.reserve(Request((5,) * 8, 9, CONTEXT))
    both = SamplingConfig(return_context_logits=True, return_generation_logits=True)
    with pytest.raises(RequestError, match=r"12 tokens × 10"):
        unread.reserve(Request((5,) * 3, 9, both))


def test_no_message_is_too_large() -> None:
    """A step's outputs go out in several messages, in their order."""
    sent: list[bytes] = []
    transport = SimpleNamespace(get_write_buffer_size=lambda: 0)
    writer: Any = SimpleNamespace(is_closing=lambda: False, transport=transport, write=sent.append)
    server: Any = SimpleNamespace(most_unread_bytes=ServeSettings(max_logits=70).most_unread_bytes)
    piece = bytes(FRAME_BYTES // 2)
    outputs = [(number, StepOutput(number, context_logits=piece)) for number in range(5)]
    FrontendConnection(server, writer).send_outputs([*outputs, (1, StepOutput(1, 7, FinishReason.LENGTH))])
    assert max(map(len, sent)) < MAX_FRAME_BYTES / 8
    decoder = msgspec.msgpack.Decoder(FromEngine)
    messages: list[Any] = [decoder.decode(frame[4:]) for frame in sent]
    assert [[number for number, _ in message.outputs] for message in messages] == [[0, 1], [2, 3], [4, 1]]
    assert messages[0].outputs[1][1].context_logits == piece

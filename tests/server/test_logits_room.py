"""How many logits may be on their way to one door, and how they are divided among messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvseek.core.errors import QueueFullError, RequestError
from kvseek.core.request import FinishReason, Request, SamplingParams, StepOutput
from kvseek.server.engine.logits_room import LogitsRoom
from kvseek.server.engine.process import FRAME_BYTES, Door
from kvseek.server.requests.messages import MAX_FRAME_BYTES, FromEngine
from kvseek.server.settings import ServeSettings

CONTEXT = SamplingParams(return_context_logits=True)


def test_four_of_the_largest_requests_have_room() -> None:
    room, largest = LogitsRoom(vocabulary=10, limit=70), Request((5,) * 7, 9, CONTEXT)
    for number in range(4):
        room.reserve(number, largest, 0)
    room.reserve(4, Request((5,) * 999, 9), 0)  # asks for none
    with pytest.raises(QueueFullError, match="1,120 bytes are on their way to clients: must be <= 1,120"):
        room.reserve(5, Request((5,), 9, CONTEXT), 0)
    room.free(2)
    room.free(2)
    room.reserve(5, Request((5,), 9, CONTEXT), 0)
    with pytest.raises(QueueFullError):
        room.reserve(6, Request((5,), 9, CONTEXT), unread=240)


def test_a_request_for_too_many_is_refused() -> None:
    with pytest.raises(RequestError, match=r"8 tokens × 10 logits are asked for: must be <= --max_logits = 70"):
        LogitsRoom(10, 70).reserve(1, Request((5,) * 8, 9, CONTEXT), 0)
    both = SamplingParams(return_context_logits=True, return_generation_logits=True)
    with pytest.raises(RequestError, match=r"12 tokens × 10"):
        LogitsRoom(10, 70).reserve(1, Request((5,) * 3, 9, both), 0)
    with pytest.raises(RequestError, match=r"must be <= --max_logits = 0"):
        LogitsRoom(10, 0).reserve(1, Request((5,), 9, CONTEXT), 0)


def test_no_message_is_too_large() -> None:
    """A step's outputs go out in several messages, in their order."""
    sent: list[bytes] = []
    transport = SimpleNamespace(get_write_buffer_size=lambda: 0)
    writer: Any = SimpleNamespace(is_closing=lambda: False, transport=transport, write=sent.append)
    config = SimpleNamespace(model=SimpleNamespace(vocab_size=10))
    server: Any = SimpleNamespace(service=SimpleNamespace(config=config), settings=ServeSettings(max_logits=70))
    piece = bytes(FRAME_BYTES // 2)
    outputs = [(number, StepOutput(number, context_logits=piece)) for number in range(5)]
    Door(server, writer).send_outputs([*outputs, (1, StepOutput(1, 7, FinishReason.LENGTH))])
    assert max(map(len, sent)) < MAX_FRAME_BYTES / 8
    decoder = msgspec.msgpack.Decoder(FromEngine)
    messages: list[Any] = [decoder.decode(frame[4:]) for frame in sent]
    assert [[number for number, _ in message.outputs] for message in messages] == [[0, 1], [2, 3], [4, 1]]
    assert messages[0].outputs[1][1].context_logits == piece

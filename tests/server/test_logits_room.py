"""How many logits may be on their way to the clients of a door, and how they are divided among messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvseek.core.errors import QueueFullError, RequestError
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.server.engine.process import FRAME_BYTES, FrontendConnection
from kvseek.server.requests.messages import MAX_FRAME_BYTES, FromEngine
from kvseek.server.requests.unread import UnreadAnswers
from kvseek.server.settings import ServeSettings

CONTEXT = SamplingConfig(return_context_logits=True)


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
    server: Any = SimpleNamespace(settings=ServeSettings(max_logits=70))
    piece = bytes(FRAME_BYTES // 2)
    outputs = [(number, StepOutput(number, context_logits=piece)) for number in range(5)]
    FrontendConnection(server, writer).send_outputs([*outputs, (1, StepOutput(1, 7, FinishReason.LENGTH))])
    assert max(map(len, sent)) < MAX_FRAME_BYTES / 8
    decoder = msgspec.msgpack.Decoder(FromEngine)
    messages: list[Any] = [decoder.decode(frame[4:]) for frame in sent]
    assert [[number for number, _ in message.outputs] for message in messages] == [[0, 1], [2, 3], [4, 1]]
    assert messages[0].outputs[1][1].context_logits == piece

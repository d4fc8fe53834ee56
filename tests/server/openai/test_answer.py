"""Choices of one answer that end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.waiting import SECONDS

from kvseek.core.errors import ErrorCode
from kvseek.server.errors import CodedError
from kvseek.server.openai.app import _merged


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

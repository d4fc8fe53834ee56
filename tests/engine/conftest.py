"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.forks import start_rank

from kvseek.engine.leading import followers


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks are forks, which need not import PyTorch again."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(followers, "_start", start_rank)
        yield

"""Fixtures that several tests of the builder use."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import RandomModel


@pytest.fixture(scope="session")
def model(random_model: RandomModel) -> Path:
    """A tiny Llama checkpoint. Not to be changed."""
    return random_model("llama")


@pytest.fixture
def text(tmp_path: Path, document: str) -> Path:
    """A text to calibrate with."""
    path = tmp_path / "text.txt"
    path.write_text(document[:2000], encoding="utf-8")
    return path

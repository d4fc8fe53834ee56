"""A model that calls tools and thinks, for the tests of what agents send."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.conftest import RandomModel
from tests.support.tool_models import add_tags, template


@pytest.fixture(scope="session")
def hermes(random_model: RandomModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose template and tokenizer are those of the format hermes. Not to be changed."""
    folder = tmp_path_factory.mktemp("model") / "hermes"
    shutil.copytree(random_model("llama", vocab_size=400, max_position_embeddings=8000), folder)
    add_tags(folder, template("hermes"))
    return folder

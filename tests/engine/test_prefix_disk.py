"""Prefixes that outlive their engine on disk: what is found again, what is refused, and that answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.engine.test_prefix_reuse import DOCUMENT, LIMITS, REUSING, SINK, WINDOW, ask
from tests.plugins.cases import CASES, method_flags

from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.engine.loading.prefixes import DiskSettings

Directory = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Directory:
    """An engine directory of a method that attends to everything."""
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    model = random_model("llama", num_attention_heads=2, num_key_value_heads=1, **shape)

    def make(method: str) -> Path:
        return build_engine(model, method, *WINDOW, *LIMITS, *method_flags(method, CASES[method].everything))

    return make


@pytest.mark.parametrize("method", REUSING)
def test_a_prompt_is_not_read_again_after_a_restart(method: str, directory: Directory, tmp_path: Path) -> None:
    plain = Engine.load(directory(method))
    for number, (prompt, reused) in enumerate(
        (
            (DOCUMENT, 0),
            (DOCUMENT + (5,) * 40, len(DOCUMENT)),
            (DOCUMENT + (5,) * 40, len(DOCUMENT) + 39),
            (DOCUMENT[:1500] + (7,) * 40, 1500),  # in the middle of an extent
            (DOCUMENT[: 1024 + SINK] + (9,) * 70, 1024 + SINK),  # at the end of one
        )
    ):
        engine = Engine.load(directory(method), disk=DiskSettings(tmp_path))
        ((tokens, statistics),) = ask(engine, request := Request(prompt, 12))
        assert (tokens, statistics.reused_tokens) == (plain.generate([request])[0], reused), number
        engine.close()

"""Rows that change places, at a prompt and by updates: what a request leaves is in token order (PRKV)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine
from tests.engine.test_prefix_reuse import DOCUMENT, LIMITS, WINDOW, ask, model
from tests.plugins.cases import CASES, method_flags

from kvseek.core.request import Request
from kvseek.engine.cache.prefix_tree import pack_tokens
from kvseek.engine.engine import Engine

__all__ = ["model"]  # a fixture
UPDATES = method_flags("prkv", {"window_queries": 8, "update_interval": 16})  # several in an answer


def kept_rows(engine: Engine, prompt: tuple[int, ...]) -> torch.Tensor:
    """Keys and values of a prompt's beginning as the engine keeps them, [layers, 2, G, n, D]; the end is not looked for."""
    prefix, model = engine._prefixes.find(pack_tokens(prompt), None), engine.config.model
    assert prefix is not None
    place = engine._cache.window.device
    rows = torch.empty(model.num_layers, 2, model.num_kv_heads, prefix.tokens, model.head_dim, device=place)
    for layer, (keys, values) in enumerate(rows):
        prefix.read(engine._cache.rows, layer, keys, values)
    return rows


def check_rows_are_kept_in_order(engine: Engine, other: Engine) -> None:
    """Two requests go through prompts and updates; each leaves the rows that another engine does, whose rows stay in place."""
    document = DOCUMENT[:1300]
    for prompt in (document, document + (7,) * 1000):  # the second leaves what follows the first one's whole extents
        for one in (engine, other):
            ask(one, Request(prompt, 50))
        found, expected = (kept_rows(one, prompt)[:, :, :, : len(prompt) - 64] for one in (engine, other))
        assert found.shape[3] > len(prompt) - 70
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_rows_that_have_changed_places_are_kept_in_token_order(
    kernels: str, model: Path, build_engine: BuildEngine
) -> None:
    few = method_flags("prkv", CASES["prkv"].sparse)
    engine, other = (
        Engine.load(build_engine(model, method, *WINDOW, *LIMITS, *flags, "--kernels", kernels))
        for method, flags in (("prkv", (*few, *UPDATES)), ("full", ()))
    )
    check_rows_are_kept_in_order(engine, other)

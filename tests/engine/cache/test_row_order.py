"""Rows in an order that an index asks for (Built.order): other places, the same attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine
from tests.engine.model.test_logits import engine_logits
from tests.support.cache_runs import KV_HEADS, LAYERS, make_cache, make_config, read_rows, rows_of
from tests.support.random_models import save_random_model
from torch import Tensor

from kvseek.engine.engine import Engine
from kvseek.plugins.contract import Built
from kvseek.plugins.flat.method import FlatIndex

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
PROMPT = torch.arange(230).mul(13).remainder(101).tolist()


def shuffled(n: int, seed: int) -> Tensor:
    """A permutation for each KV head, int64 [G, n]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(n, generator=generator) for _ in range(KV_HEADS)])


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_selection_by_place_attends_to_the_same_tokens(
    kernels: str, tmp_path: Path, build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    directory = build_engine(model, "flat", *WINDOW, "--flat.top_k", "20", "--kernels", kernels)
    forced = torch.arange(40).mul(17).remainder(101).tolist()
    expected = engine_logits(Engine.load(directory), PROMPT, forced)
    asked = []

    token_order = FlatIndex.build

    def build(index: FlatIndex, slot: int, keys: Tensor, queries: Tensor) -> Built:
        asked.append((index.context.layer, keys.shape[1], queries.shape[1]))
        order = shuffled(keys.shape[1], index.context.layer)
        token_order(index, slot, keys.gather(1, order[..., None].expand_as(keys)), queries)  # it stores keys by place
        return Built(order=order)

    monkeypatch.setattr(FlatIndex, "build", build)
    found = engine_logits(Engine.load(directory), PROMPT, forced)
    assert asked == [(layer, (230 - 1 - 4 - 16) // 8 * 8, 230) for layer in range(3)]
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("device_layers", [0, 1, LAYERS])
def test_the_cache_writes_rows_in_that_order(device_layers: int) -> None:
    cache = make_cache(make_config(3, 5, 4, device_layers=device_layers))
    tokens = 2100
    cache.open(1, tokens)
    cache.begin_prefill(1, tokens)
    n = cache.lengths[1]
    for layer in range(LAYERS):
        keys, order = rows_of(7, layer, torch.arange(tokens)), shuffled(n, layer)
        cache.write_prompt(layer, 1, keys, -keys, order)
        cache.finish_prompt(1)
        rows = read_rows(cache, layer, 1)
        assert torch.equal(rows[:, :, 0, 3].long(), order + 3), "the sink's three tokens stay in the window"
        assert torch.equal(rows[:, :, 1], -rows[:, :, 0])

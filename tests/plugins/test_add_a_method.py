"""The example of docs/add_a_method.md: it is the toy method's own text, selects what it says, and answers in an engine."""

from __future__ import annotations

import re

import pytest
import torch
from tests.conftest import ROOT, BuildEngine, RandomModel
from tests.plugins.retrieval_region import GROUP, KV_HEADS, UPDATE, Region, topical
from tests.plugins.test_methods import PROMPT, WINDOW
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.plugins import registry

TOP_K, CANDIDATES = 20, 4


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.METHODS, "toy", "tests.plugins.toy_method")


def test_the_documents_code_is_the_toy_methods() -> None:
    document = (ROOT / "docs/add_a_method.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
    folder = ROOT / "tests/plugins/toy_method"
    assert shown == [(folder / name).read_text(encoding="utf-8") for name in ("config.py", "method.py")]


def rows_of_best_blocks(keys: Tensor, queries: Tensor, head: int) -> set[int]:
    """The rows of the best blocks of keys [G, n, D], whole ones, for queries [H, D]."""
    means = torch.stack([block.mean(dim=1) for block in keys.split(UPDATE, dim=1)], dim=1)[head]
    best = (queries.view(KV_HEADS, GROUP, -1)[head] @ means.T).amax(dim=0).argsort(descending=True)
    blocks = best[: -(-CANDIDATES * TOP_K // UPDATE)].tolist()
    return {row for block in blocks for row in range(block * UPDATE, (block + 1) * UPDATE)}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("prompt", [0, 8, 320])
def test_the_toy_method_selects_rows_of_the_best_blocks(prompt: int, compiled: bool, library: CpuLibrary) -> None:
    region = Region("toy", {"top_k": TOP_K, "candidates": CANDIDATES}, library=library if compiled else None)
    keys, queries = topical(prompt + 160, 1)
    region.prefill(1, keys[:, :prompt], queries[: max(1, prompt)].transpose(0, 1), room=160)
    for start in range(prompt, prompt + 160, 40):
        region.evict(1, keys[:, start : start + 40])
        (tokens,) = region.step(queries[start : start + 1], [1])
        for head, rows in enumerate(tokens):
            assert len(rows) == TOP_K
            assert set(rows.tolist()) <= rows_of_best_blocks(keys[:, : start + 40], queries[start], head)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_an_engine_serves_the_toy_method(random_model: RandomModel, kernels: str, build_engine: BuildEngine) -> None:
    flags = (*WINDOW, "--toy.top_k", "12", "--kernels", kernels)
    engine = Engine.load(build_engine(random_model("qwen3"), "toy", *flags))
    engine.submit(Request(tuple(PROMPT), 20))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert sum(output.token_id is not None for output in outputs) == 20
    assert not any(output.error for output in outputs)
    assert outputs[-1].attended_tokens < outputs[-1].cached_tokens

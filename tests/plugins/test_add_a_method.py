"""The example of docs/add_a_method.md: it is the toy method's own text, and an index that the contract's checks accept."""

from __future__ import annotations

import re

import pytest
from tests.conftest import ROOT
from tests.plugins.retrieval_region import KV_HEADS, Region, topical

from kvseek.plugins import registry


def test_the_documents_code_is_the_toy_methods() -> None:
    document = (ROOT / "docs/add_a_method.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
    folder = ROOT / "tests/plugins/toy_method"
    assert shown == [(folder / name).read_text(encoding="utf-8") for name in ("config.py", "method.py")]


@pytest.mark.parametrize("prompt", [0, 5, 300])
def test_the_toy_method_selects_the_latest_rows(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.METHODS, "toy", "tests.plugins.toy_method")
    region = Region("toy", {"top_k": 20})
    keys, queries = topical(prompt + 40, 1)
    region.prefill(1, keys[:, :prompt], queries[: max(1, prompt)].transpose(0, 1), room=40)
    for start in range(prompt, prompt + 40, 10):
        region.evict(1, keys[:, start : start + 10])
        (tokens,) = region.step(queries[start : start + 1], [1])
        held = start + 10
        assert [head.tolist() for head in tokens] == [list(range(max(0, held - 20), held))] * KV_HEADS

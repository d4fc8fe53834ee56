"""Each competing system selects what its paper's rule says, computed here directly, row by row and in float64.

A region is read, grows and is asked on the way, with the shapes of the CPU and with those of a step that a GPU captures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.plugins.cases import CASES
from tests.plugins.retrieval_region import GROUP, KV_HEADS, Region, topical
from torch import Tensor

from kvseek.plugins.registry import PEERS

PROMPT, EVICTED, STEPS = 1200, 40, 4


class Head:
    """What a rule knows of a KV head: keys [n, D] of the region, queries [g, D] of the step, all in float64, and the settings."""

    def __init__(self, region: Region, queries: Tensor, prompt: Tensor, number: int) -> None:
        self.keys = region.keys[0][number].double()
        self.queries = queries.view(KV_HEADS, GROUP, -1)[number].double()
        self.prompt = prompt.transpose(0, 1).unflatten(0, (KV_HEADS, GROUP))[number].double()  # its queries [g, n, D]
        self.config: Any = region.context.config
        self.top_k = self.config.top_k


def streamingllm(head: Head) -> set[int]:
    n = len(head.keys)
    return set(range(n - head.top_k, n))


RULES: dict[str, Callable[[Head], set[int]]] = {
    "streamingllm": streamingllm,
}


@pytest.mark.parametrize("one_shape", [False, True])
@pytest.mark.parametrize("peer", PEERS)
def test_the_papers_rule(peer: str, one_shape: bool) -> None:
    region = Region(peer, CASES[peer].index, slots=2)
    region.index.one_shape = one_shape  # type: ignore[attr-defined]
    keys, queries = topical(PROMPT + STEPS * EVICTED, 3)
    region.prefill(0, keys[:, :PROMPT], queries[:PROMPT].transpose(0, 1), STEPS * EVICTED)
    for start in range(PROMPT, PROMPT + STEPS * EVICTED, EVICTED):
        (found,) = region.step(queries[start : start + 1], [0])
        for number, rows in enumerate(found):
            assert set(rows.tolist()) == RULES[peer](Head(region, queries[start], queries[:PROMPT], number))
        region.evict(0, keys[:, start : start + EVICTED])

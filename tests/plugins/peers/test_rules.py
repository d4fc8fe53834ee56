"""Each competing system selects what its paper's rule says, computed here directly, row by row and in float64.

A region is read, grows and is asked on the way, with the shapes of the CPU and with those of a step that a GPU captures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.plugins.cases import CASES
from tests.plugins.retrieval_region import GROUP, KV_HEADS, Region, topical
from torch import Tensor

from kvseek.plugins.registry import PEERS

PROMPT, EVICTED, STEPS = 1200, 40, 4


class Head:
    """What a rule knows of a KV head, in float64: keys [n, D] of the region, queries [g, D] of the step, and the past.

    prompt: queries [PROMPT, g, D] of the prompt; past: those of the steps before, each [g, D], after which EVICTED rows came.
    """

    def __init__(self, region: Region, queries: Tensor, steps: list[int], number: int) -> None:
        own = queries.double().unflatten(1, (KV_HEADS, GROUP))[:, number]
        self.keys = region.keys[0][number].double()
        self.prompt, self.past, self.queries = own[:PROMPT], [own[step] for step in steps[:-1]], own[steps[-1]]
        self.config: Any = region.context.config
        self.top_k = self.config.top_k

    def weights(self, queries: Tensor, rows: list[int]) -> Tensor:
        """Attention of queries [g, D] to some rows, the mean over the heads: [rows]."""
        return (queries @ self.keys[rows].T / self.keys.shape[1] ** 0.5).softmax(dim=-1).mean(dim=0)

    def rows_of_best(self, value: Callable[[Tensor], float], page: int) -> set[int]:
        """The first rows of the pages of the largest values, as many as are kept."""
        values = [value(keys) for keys in self.keys.split(page)]
        order = sorted(range(len(values)), key=lambda number: -values[number])
        rows = [row for number in order for row in range(number * page, min((number + 1) * page, len(self.keys)))]
        return set(rows[: self.top_k])


def streamingllm(head: Head) -> set[int]:
    n = len(head.keys)
    return set(range(n - head.top_k, n))


def quest(head: Head) -> set[int]:
    def bound(page: Tensor) -> float:
        low, high = page.amin(dim=0), page.amax(dim=0)
        return float(torch.stack([torch.maximum(q * low, q * high).sum() for q in head.queries]).mean())

    return head.rows_of_best(bound, head.config.page)


def shadowkv(head: Head) -> set[int]:
    def unlike(chunk: Tensor) -> float:
        mean = chunk.mean(dim=0)
        return -min(float(key @ mean / (key.norm() * mean.norm())) for key in chunk)

    size, count = head.config.chunk, head.config.outliers
    chunks = range(-(-len(head.keys) // size))
    outliers = sorted(chunks, key=lambda c: -unlike(head.keys[c * size : c * size + size]))[:count]
    rest = [c for c in chunks if c not in outliers]
    means = torch.stack([head.keys[c * size : c * size + size].mean(dim=0) for c in rest])
    weights = (head.queries @ means.T / means.shape[1] ** 0.5).softmax(dim=-1).amax(dim=0).tolist()
    best = [c for _, c in sorted(zip(weights, rest, strict=True), key=lambda pair: -pair[0])]
    rows = [row for c in [*outliers, *best] for row in range(c * size, min(c * size + size, len(head.keys)))]
    return set(rows[: head.top_k])


def snapkv(head: Head) -> set[int]:
    reach = head.config.kernel // 2
    scores = torch.stack(list(head.prompt[-head.config.window :])) @ head.keys[:PROMPT].T / head.keys.shape[1] ** 0.5
    votes = scores.softmax(dim=-1).sum(dim=0)  # [g, PROMPT]
    pooled = [votes[:, max(0, row - reach) : row + reach + 1].amax(dim=1).mean().item() for row in range(PROMPT)]
    generated = list(range(len(head.keys) - 1, PROMPT - 1, -1))
    return set((generated + sorted(range(PROMPT), key=lambda row: -pooled[row]))[: head.top_k])


def h2o(head: Head) -> set[int]:
    """Step by step from the prompt on, with a dictionary of what the kept rows have received."""
    received, seen = dict.fromkeys(range(PROMPT), 0.0), list(head.prompt)

    def count(queries: Tensor, rows: list[int], counted: set[int]) -> None:
        for row, weight in zip(rows, head.weights(queries, rows).tolist(), strict=True):
            if row in counted:
                received[row] += weight

    def evict() -> None:
        heavy = sorted(received)[: -head.config.recent]
        for row in sorted(heavy, key=lambda row: -received[row])[head.top_k - head.config.recent :]:
            del received[row]

    for place, queries in enumerate(head.prompt):
        count(queries, list(range(place + 1)), set(range(place + 1)))
    evict()
    for step, queries in enumerate(head.past):
        count(queries, list(received), set(received))
        seen.append(queries)
        new = range(PROMPT + step * EVICTED, PROMPT + (step + 1) * EVICTED)
        received |= dict.fromkeys(new, 0.0)
        for latest in seen[-head.config.recent_queries :]:
            count(latest, list(received), set(new))
        evict()
    return set(received)


RULES: dict[str, Callable[[Head], set[int]]] = {
    "h2o": h2o,
    "quest": quest,
    "shadowkv": shadowkv,
    "snapkv": snapkv,
    "streamingllm": streamingllm,
}


@pytest.mark.parametrize("one_shape", [False, True])
@pytest.mark.parametrize("peer", PEERS)
def test_the_papers_rule(peer: str, one_shape: bool) -> None:
    region = Region(peer, CASES[peer].index, slots=2)
    region.index.one_shape = one_shape  # type: ignore[attr-defined]
    keys, queries = topical(PROMPT + STEPS * EVICTED, 3)
    region.prefill(0, keys[:, :PROMPT], queries[:PROMPT].transpose(0, 1), STEPS * EVICTED)
    steps: list[int] = []
    for start in range(PROMPT, PROMPT + STEPS * EVICTED, EVICTED):
        steps.append(start)
        (found,) = region.step(queries[start : start + 1], [0])
        for number, rows in enumerate(found):
            assert set(rows.tolist()) == RULES[peer](Head(region, queries, steps, number))
        region.evict(0, keys[:, start : start + EVICTED])

"""Each competing system, and exact top-k, selects what its rule says, computed here directly, row by row and in float64.

A region is read, grows and is asked on the way, with the shapes of the CPU and with those of a step that a GPU captures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.plugins.cases import CASES
from tests.plugins.retrieval_region import GROUP, KV_HEADS, Region, topical
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kvseek.plugins.peers.base import kmeans, nearest
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
        self.top_k, self.index, self.number = self.config.top_k, region.index, number

    def weights(self, queries: Tensor, rows: list[int]) -> Tensor:
        """Attention of queries [g, D] to some rows, the mean over the heads: [rows]."""
        return (queries @ self.keys[rows].T / self.keys.shape[1] ** 0.5).softmax(dim=-1).mean(dim=0)

    def best_rows(self, values: list[float]) -> set[int]:
        """The rows of the largest values, the first of equal ones."""
        return set(sorted(range(len(values)), key=lambda row: -values[row])[: self.top_k])

    def kept(self, array: Tensor) -> Tensor:
        """What the index keeps of this slot and KV head, in an array [slots, G, ...]."""
        return array[0, self.number]

    def graph(self, count: int) -> Tensor:
        """The neighbours that the index keeps of the first rows: [count, links]."""
        return self.index.context.extents.read(self.index.neighbours, 0, count)[self.number]

    def rows_of_best(self, value: Callable[[Tensor], float], page: int) -> set[int]:
        """The first rows of the pages of the largest values, as many as are kept."""
        values = [value(keys) for keys in self.keys.split(page)]
        order = sorted(range(len(values)), key=lambda number: -values[number])
        rows = [row for number in order for row in range(number * page, min((number + 1) * page, len(self.keys)))]
        return set(rows[: self.top_k])


def flat(head: Head) -> set[int]:
    return head.best_rows(head.weights(head.queries, list(range(len(head.keys)))).tolist())


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


def arkvale(head: Head) -> set[int]:
    def score(page: Tensor) -> float:
        centre = (page.amin(dim=0) + page.amax(dim=0)) / 2
        width = torch.stack([(key - centre).abs() for key in page]).mean(dim=0)
        low, high = centre - width, centre + width
        return float(torch.stack([torch.maximum(q * low, q * high).sum() for q in head.queries]).mean())

    return head.rows_of_best(score, head.config.page)


def infinigen(head: Head) -> set[int]:
    """By a singular value decomposition, and keys and queries that are turned and cut."""
    queries = head.prompt.flatten(0, 1)
    turn = torch.linalg.svd(queries, full_matrices=False).Vh.T
    count = int(head.config.partial * len(turn))
    loudest = [(part @ turn).abs().sum(dim=0).topk(count).indices for part in (queries, head.keys[:PROMPT])]
    turn = turn[:, sorted(set(torch.cat(loudest).tolist()))]
    scores = (head.queries @ turn) @ (head.keys @ turn).T / head.keys.shape[1] ** 0.5
    return head.best_rows(scores.softmax(dim=-1).mean(dim=0).tolist())


def magicpig(head: Head) -> set[int]:
    planes = head.index.planes.double().T.unflatten(0, (head.config.tables, -1))
    mean, totals = head.keys[:PROMPT].mean(dim=0), [0.0] * len(head.keys)
    for query in head.queries:
        side = planes @ query > 0
        for row, key in enumerate(head.keys):
            shared = int(((planes @ (key - mean) > 0) == side).all(dim=1).sum())
            totals[row] += shared if shared >= 2 else 0
    return head.best_rows(totals)


def pqcache(head: Head) -> set[int]:
    centroids = head.kept(head.index.centroids).double()
    coded = torch.cat(
        [
            part[torch.cdist(own, part).argmin(dim=1)]
            for own, part in zip(head.keys.chunk(len(centroids), dim=1), centroids, strict=True)
        ],
        dim=1,
    )
    scores = head.queries @ coded.T / head.keys.shape[1] ** 0.5
    return head.best_rows(scores.softmax(dim=-1).mean(dim=0).tolist())


def retrievalattention(head: Head) -> set[int]:
    """Draws the graph, and walks through it; which of equally frequent neighbours a row has is taken from the index."""
    links, beam, n = head.config.links, head.config.beam, len(head.keys)
    given: dict[int, Counter[int]] = {row: Counter() for row in range(PROMPT)}
    for query in head.prompt.flatten(0, 1):
        first, *others = (head.keys[:PROMPT] @ query).topk(links).indices.tolist()
        for other in others:
            given[first][other] += 1
            given[other][first] += 1
    graph = head.graph(PROMPT)
    for row, counts in given.items():
        chosen = set(graph[row].tolist()) - {row}
        assert len(chosen) == min(links, len(counts))
        assert min([counts[other] for other in chosen], default=0) >= max(
            [counts[other] for other in counts.keys() - chosen], default=0
        )
    entries = {number * PROMPT // beam for number in range(beam)}
    weights = [0.0] * n
    for query in head.queries:
        scores, seen, left = (head.keys @ query).tolist(), entries | set(range(PROMPT, n)), set(range(n))
        for _ in range(head.config.rounds):
            best = sorted(seen & left, key=lambda row: -scores[row])[:beam]
            left -= set(best)
            seen |= {int(other) for row in best if row < PROMPT for other in graph[row]}
        rows = sorted(seen)
        for row, weight in zip(rows, head.weights(query[None], rows).tolist(), strict=True):
            weights[row] += weight
    return head.best_rows(weights)


def squeezedattention(head: Head) -> set[int]:
    directions = head.kept(head.index.directions).double()[: round(head.config.cluster_share * PROMPT)]
    labels = torch.cdist(head.keys / head.keys.norm(dim=1, keepdim=True), directions).argmin(dim=1).tolist()
    members = {label: [row for row in range(PROMPT) if labels[row] == label] for label in set(labels[:PROMPT])}
    weights = dict.fromkeys(members, 0.0)
    for query in head.queries:
        raised = {
            label: float((query @ head.keys[rows].mean(dim=0) / len(query) ** 0.5).exp())
            for label, rows in members.items()
        }
        total = sum(raised[label] for label in labels)
        for label in members:
            weights[label] += raised[label] / total
    return head.best_rows([weights[label] for label in labels])


RULES: dict[str, Callable[[Head], set[int]]] = {
    "arkvale": arkvale,
    "flat": flat,
    "h2o": h2o,
    "infinigen": infinigen,
    "magicpig": magicpig,
    "pqcache": pqcache,
    "quest": quest,
    "retrievalattention": retrievalattention,
    "shadowkv": shadowkv,
    "snapkv": snapkv,
    "squeezedattention": squeezedattention,
    "streamingllm": streamingllm,
}


@pytest.mark.parametrize("one_shape", [False, True])
@pytest.mark.parametrize("peer", [*PEERS, "flat"])
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


@pytest.mark.parametrize("peer", [*PEERS, "flat"])
def test_a_step_that_a_gpu_captures_reads_nothing_back(peer: str) -> None:
    """Tensors without numbers refuse whatever depends on them: shapes, and what the host would wait for."""
    region = Region(peer, CASES[peer].index)
    region.index.one_shape = True  # type: ignore[attr-defined]
    keys, queries = topical(300, 1)
    region.prefill(0, keys, queries.transpose(0, 1))
    batch = region.batch([0, 1])
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        selection = region.index.select(fake.from_tensor(queries[:2]), batch)
    assert selection is not None
    assert selection.rows.shape == (2, KV_HEADS, CASES[peer].index["top_k"])


def test_kmeans_is_lloyds_algorithm() -> None:
    points = torch.randn(2, 300, 8, generator=torch.Generator().manual_seed(1))
    for found, own in zip(kmeans(points, 6, 4), points.double(), strict=True):
        centroids = own[[round(299 * number / 5) for number in range(6)]]
        for _ in range(4):
            labels = torch.cdist(own, centroids).argmin(dim=1)
            centroids = torch.stack([own[labels == label].mean(dim=0) for label in range(6)])
        torch.testing.assert_close(found.double(), centroids, atol=1e-5, rtol=0)
    assert torch.equal(nearest(points, found[None].expand(2, -1, -1)), torch.cdist(points, found).argmin(dim=2))

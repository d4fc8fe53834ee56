"""Pieces of the four methods that papers leave out or replace, and no field does: docs/papers.md has what came of it.

    python bench/accuracy/ablations.py --model PATH --text FILE --context 8192 --output FILE

On captured keys and queries (recall.py), the last --queries as decode steps; means over every third layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from kvseek.bench.accuracy.capture import CapturedLayer, Replay, cached_capture, membership
from kvseek.bench.accuracy.recall import CAPTURES, masses, measure_layer
from kvseek.bench.machine import describe
from kvseek.bench.output import add_output_flags, command, progress
from kvseek.bench.variants import Variant, parse_variants
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.clusterkv import clustering
from kvseek.plugins.pariskv import reference as pariskv
from kvseek.plugins.pariskv.codebook import pack_bits, split_blocks
from kvseek.plugins.prkv.summaries import Boxes, Codes, box_scores, read_pages
from kvseek.plugins.ranking import best_positions

ROUNDS = 8  # of k-means of learned centroids
RHO, BETA = 0.3, 0.1  # of every length, so that lengths compare
Figures = dict[str, float]
Measure = Callable[[int, CapturedLayer, int], Figures]  # of a layer's number and vectors, and the decode steps


def collision(layer: CapturedLayer, steps: int, form: str) -> Figures:
    """ParisKV: shares of the 100 keys with the largest q·k, q the mean of a group's queries, that are found.

    `coarse`: among the 100 with most votes; `candidates`: among those that are reranked; `recall`: among those that codes keep.
    """
    replay = Replay(layer, 0, steps, parse_variants("pariskv:paper")[0])
    index, keys = replay.index, replay.region.float()
    assert isinstance(index, pariskv.ReferenceIndex)
    queries = layer.queries[:, -steps:].view(len(keys), -1, steps, keys.shape[2]).mean(dim=1)
    exact = queries @ keys.transpose(1, 2)
    best = exact.topk(100, dim=-1).indices
    turned = [part if form == "no rotation" else rotate(part, index.signs) for part in (keys, queries)]
    blocks, asked = (split_blocks(part).transpose(1, 2) for part in turned)  # [G, B, n, 8]
    if form.startswith("learned"):
        if "rotated" in form:
            blocks = split_blocks(rotate(F.normalize(keys, dim=-1), index.signs)).transpose(1, 2)
        else:
            blocks, asked = (split_blocks(part).transpose(1, 2) for part in (keys, queries))
        centroids = learned(blocks[:, :, : int(blocks.shape[2] * float(form.split()[1]))])
        ids, scores = nearest(blocks, centroids), asked @ centroids.transpose(2, 3)
    else:
        ids, scores = (
            pack_bits(blocks < 0).long(),
            pariskv.centroid_scores(asked.transpose(1, 2).flatten(2)).transpose(1, 2),
        )
    counts = counted(ids)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranked = counts[:, :, None].expand_as(order).gather(-1, order)
    before, tiers = ranked.cumsum(dim=-1) - ranked, torch.zeros_like(order)
    for percent, tier in [(100, 1)] if form == "one tier" else reversed(pariskv.TIERS):
        tiers[before * 100 < percent * RHO * keys.shape[1]] = tier
    tiers = torch.zeros_like(tiers).scatter_(-1, order, tiers)
    votes = torch.stack(
        [t.gather(-1, i[:, None].expand(-1, steps, -1)) for t, i in zip(tiers.unbind(1), ids.unbind(1), strict=True)]
    ).sum(dim=0)
    _, codes, weights = index.encode(keys)
    if form == "no alpha":
        weights = pariskv.block_sum(split_blocks(rotate(keys, index.signs)).square()).sqrt()
    estimates = pariskv.estimate_scores(rotate(queries, index.signs), codes, weights, index.levels)
    few, candidates = (best_positions(votes, count) for count in (100, int(BETA * keys.shape[1])))
    kept = candidates.gather(-1, estimates.gather(-1, candidates).topk(100, dim=-1).indices)
    found = (
        torch.zeros_like(exact, dtype=torch.bool).scatter_(-1, rows, True).gather(-1, best)
        for rows in (few, candidates, kept)
    )
    return dict(zip(("coarse", "candidates", "recall"), (one.float().mean().item() for one in found), strict=True))


def learned(blocks: Tensor) -> Tensor:
    """256 centroids of each block by k-means: blocks [G, B, n, 8] to [G, B, 256, 8]."""
    centroids = blocks[:, :, torch.linspace(0, blocks.shape[2] - 1, pariskv.CENTROIDS).long()]
    for _ in range(ROUNDS):
        labels = nearest(blocks, centroids)
        sizes = counted(labels)[..., None]
        sums = torch.zeros_like(centroids).scatter_add_(2, labels[..., None].expand_as(blocks), blocks)
        centroids = torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)
    return centroids


def nearest(blocks: Tensor, centroids: Tensor) -> Tensor:
    return (blocks @ centroids.transpose(2, 3)).sub_(centroids.square().sum(dim=-1)[:, :, None] / 2).argmax(dim=-1)


def counted(ids: Tensor) -> Tensor:
    counts = ids.new_zeros((*ids.shape[:2], pariskv.CENTROIDS))
    return counts.scatter_add_(2, ids, torch.ones_like(ids))


def centroids_at(form: str, variant: Variant) -> Measure:
    """CTkvr with other queries of the prompt as centroids (its table 4)."""

    def measure(number: int, layer: CapturedLayer, steps: int) -> Figures:
        prompt = layer.queries.shape[1] - steps
        count = variant.settings.most_prompt_centroids(prompt - variant.cache.sink - variant.cache.local)
        places = {
            "random": torch.randperm(prompt, generator=torch.Generator().manual_seed(number))[:count].sort().values,
            "first": torch.arange(count),
            "equidistant": torch.linspace(0, prompt - 1, count).long(),
        }[form]
        queries = torch.cat((layer.queries[:, places], layer.queries[:, -steps:]), dim=1)
        return plain(variant)(number, dataclasses.replace(layer, queries=queries), steps)

    return measure


def all_recalled(variant: Variant) -> Measure:
    """CTkvr without its rerank: a step attends to all rows in the probed lists."""

    def measure(number: int, layer: CapturedLayer, steps: int) -> Figures:
        replay, found = Replay(layer, number, steps, variant), []
        for step, query in enumerate(layer.queries[:, -steps:].unbind(dim=1)):
            chosen = membership(replay.index.recall(query, 0), replay.length)  # type: ignore[attr-defined]
            mass, _, _ = masses(replay, query.contiguous(), step, chosen, chosen)
            found.append((mass.item(), chosen.sum(dim=1).float().mean().item()))
            replay.step(query.contiguous())
        return dict(zip(("mass", "rows"), torch.tensor(found).mean(dim=0).tolist(), strict=True))

    return measure


def clusters_by(distance: str) -> Callable[[Tensor, Tensor, int], clustering.Clustering]:
    """K-means of keys as they are, by "L2" or "inner product", in place of clustering.cluster_keys (ClusterKV, figure 11b)."""

    def cluster(keys: Tensor, chosen: Tensor, iterations: int) -> clustering.Clustering:
        keys = keys.float()
        means = keys[:, chosen]
        for _ in range(iterations):
            away = means.square().sum(dim=-1)[:, None] / 2 if distance == "L2" else 0
            labels = (keys @ means.transpose(1, 2) - away).argmax(dim=-1)
            sizes = clustering.cluster_sizes(labels, len(chosen))
            moved, spreads = clustering.cluster_means(keys, labels, sizes)
            means = torch.where(sizes[..., None] > 0, moved, means)
        order, starts = labels.argsort(dim=-1, stable=True), sizes.cumsum(dim=-1) - sizes
        return clustering.Clustering(moved, spreads, sizes.int(), starts.int(), order.int())

    return cluster


class FixedPages(Boxes):
    """Boxes of pages that are the same tokens for ever: PRKV without the order of its algorithm 1, lines 10 to 14."""

    def build(self, slot: int, keys: Tensor, static: Tensor) -> None:
        self._enclose(slot, 0, keys)

    def prepare(self, keys: Tensor, static: Tensor) -> Tensor | None:
        return None

    def renew(self, slot: int, old: Tensor, static: Tensor, prepared: Tensor | None) -> None:
        pass

    def first_page(self, static: int) -> int:
        return 0

    tokens = Codes.tokens

    def scores(self, queries: Tensor, slot: int, static: Tensor, length: int) -> Tensor:
        boxes = read_pages(self.context, self.boxes, slot, -(-length // self.config.page))
        return box_scores(queries, boxes, self.config.box_radius)


def reuse(number: int, layer: CapturedLayer, steps: int) -> Figures:
    """PRKV: mass of the 1,024 best rows of the first step in the last one, without and with a window of 64 (figure 3a); and the
    share of a head's best rows of a prompt's query that are those of the query 63 before (appendix G, for 512 and 1,024 rows)."""
    replay = Replay(layer, number, steps, parse_variants("prkv:paper,cache.sink=0")[0])
    first, last = (replay.region_weights(layer.queries[:, at].contiguous(), at + steps) for at in (-steps, -1))
    chosen = torch.zeros_like(first[:, 0], dtype=torch.bool).scatter_(1, first.mean(dim=1).topk(1024).indices, True)
    alone = (last * chosen[:, None]).sum(dim=-1).mean().item()
    queries = layer.queries[:, [-steps - 64, -steps - 1]]
    weights = (queries.view(len(chosen), -1, queries.shape[-1]) @ replay.region.transpose(1, 2)).view(
        len(queries), 2, -1
    )
    found = {"alone": alone, "with window": alone + 1 - last.sum(dim=-1).mean().item()}
    for rows in (512, 1024):
        marks = [
            torch.zeros_like(one, dtype=torch.bool).scatter_(-1, one.topk(rows).indices, True)
            for one in weights.unbind(1)
        ]
        found[f"static of {rows}"] = ((marks[0] & marks[1]).sum(dim=-1).float().mean() // 32 * 32 / rows).item()
    return found


def cosines(number: int, layer: CapturedLayer, steps: int) -> Figures:
    """CTkvr, figure 2: cosines of queries 1,000 tokens apart, as they are and less their mean; and their common best 512 rows."""
    queries = layer.queries[:, -1501:]
    found = {}
    for name, shift in (("plain", 0), ("centred", queries.mean(dim=1, keepdim=True))):
        away = queries - shift
        found[name] = F.cosine_similarity(away[:, :500], away[:, 1000:1500], dim=-1).mean().item()
    replay = Replay(layer, number, steps, named(CTKVR))
    marks = []
    for at in (-1001, -1):
        grouped = layer.queries[:, at].view(len(layer.keys), -1, layer.keys.shape[2])
        best = (grouped @ replay.region[:, :-1000].transpose(1, 2)).topk(512, dim=-1).indices
        marks.append(torch.zeros((*best.shape[:2], replay.length), dtype=torch.bool).scatter_(-1, best, True))
    return found | {"common of 512": (marks[0] & marks[1]).sum(dim=-1).float().mean().item() / 512}


def plain(variant: Variant) -> Measure:
    def measure(number: int, layer: CapturedLayer, steps: int) -> Figures:
        found = measure_layer(number, layer, steps, variant)
        return {name: getattr(found, name) for name in ("mass", "flat_mass", "recall", "rows")}

    return measure


def hits(variant: Variant) -> Measure:
    """Share of selected rows that the step before, and the two steps before, selected (ClusterKV, section V-C)."""

    def measure(number: int, layer: CapturedLayer, steps: int) -> Figures:
        replay = Replay(layer, number, steps, variant)
        chosen = torch.stack([replay.step(query.contiguous()) for query in layer.queries[:, -steps:].unbind(dim=1)])
        now, one, two = chosen[2:], chosen[1:-1], chosen[:-2]
        return {"R 1": ((now & one).sum() / now.sum()).item(), "R 2": ((now & (one | two)).sum() / now.sum()).item()}

    return measure


def swapped(target: str, piece: Any, method: str) -> Measure:
    """What a method keeps with another piece in place of `target`, a name under kvseek.plugins."""
    return lambda number, layer, steps: patch(f"kvseek.plugins.{target}", piece)(plain(named(method)))(
        number, layer, steps
    )


def named(method: str) -> Variant:
    return parse_variants(method)[0]


FORMS = (
    "paper",
    "one tier",
    "no rotation",
    "no alpha",
    "learned 1",
    "learned 0.25",
    "learned 1 rotated",
    "learned 0.25 rotated",
)
CTKVR, CLUSTERKV, PRKV = "ctkvr:paper,top_k=512", "clusterkv:paper,dense_layers=0", "prkv:paper"
PLACES, DISTANCES = ("random", "first", "equidistant"), ("L2", "inner product")
MEASURES: dict[str, Measure] = {
    **{f"pariskv, {form}": lambda _, layer, steps, form=form: collision(layer, steps, form) for form in FORMS},  # type: ignore[misc]
    **{f"{CTKVR}, {form}": centroids_at(form, named(CTKVR)) for form in PLACES},
    f"{CTKVR}, no rerank": all_recalled(named(CTKVR)),
    **{
        f"{CLUSTERKV}, {form}": swapped("clusterkv.reference.cluster_keys", clusters_by(form), CLUSTERKV)
        for form in DISTANCES
    },
    f"{CLUSTERKV}, hits": hits(named(CLUSTERKV)),
    f"{PRKV}, fixed pages": swapped("prkv.reference.Boxes", FixedPages, PRKV),
    "prkv, reuse": reuse,
    "ctkvr, cosines": cosines,
}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Capture, or read what was captured, cut it to --context tokens, and measure; the JSON-able report."""
    layers = cached_capture(options.model, options.text, options.context, options.context, options.captures)
    results = []
    for name in (name for name in MEASURES if options.only in name):
        found = [MEASURES[name](number, layer, options.queries) for number, layer in list(enumerate(layers))[::3]]
        results.append({"name": name, **{key: fmean(one[key] for one in found) for key in found[0]}})
        progress(str(results[-1]))
    head = {name: getattr(options, name) for name in ("context", "queries")}
    return {
        "evaluation": "ablations",
        "machine": describe(),
        "model": options.model.name,
        "text": options.text.name,
        **head,
        "results": results,
    }


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", type=Path, required=True)
    result.add_argument("--text", type=Path, required=True)
    result.add_argument("--context", type=int, default=8192, help="tokens, the decode steps' included")
    result.add_argument("--queries", type=int, default=32, help="last positions, which stand for decode steps")
    result.add_argument("--only", default="", help="measure what has this in its name")
    result.add_argument("--captures", type=Path, default=CAPTURES, help="folder that keeps what was captured")
    add_output_flags(result)
    return result


def print_report(report: dict[str, Any]) -> None:
    for entry in report["results"]:
        print(entry.pop("name"), *(f"{name} {value:.3f}" for name, value in entry.items()), sep="\t")


main = command(lambda words: parser().parse_args(words), run, print_report)

if __name__ == "__main__":
    sys.exit(main())

"""What PRKV's pages score: the paper's bound, what lies below it, and what codes of their rows estimate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.plugins.index_cases import KV_HEADS, make_context, random_keys, random_queries

from kvseek.kernels.reference.codes.key_codes import round_lanes
from kvseek.kernels.reference.codes.rotation import rotate, rotation_signs
from kvseek.plugins.prkv.config import Config
from kvseek.plugins.prkv.summaries import Codes, box_scores

GROUP, DIM = 3, 32


def test_a_page_scores_at_least_its_best_key() -> None:
    keys, queries = random_keys(64, DIM), random_queries(KV_HEADS, 2, DIM)
    pages = keys.view(KV_HEADS, 8, 8, DIM)
    boxes = torch.stack((pages.amin(dim=2), pages.amax(dim=2)), dim=2)
    bounds = box_scores(queries, boxes)
    exact = (queries @ keys.transpose(1, 2)).view(KV_HEADS, 2, 8, 8).amax(dim=-1)
    assert (bounds >= exact - 1e-4).all()
    by_hand = torch.maximum(queries[:, :, None] * boxes[:, None, :, 0], queries[:, :, None] * boxes[:, None, :, 1])
    torch.testing.assert_close(bounds, by_hand.sum(dim=-1))


@pytest.mark.parametrize("radius", [0.0, 0.3, 1.0])
def test_a_page_scores_by_centre_and_radius(radius: float) -> None:
    low, queries = random_keys(9, DIM)[:, :, None], random_queries(KV_HEADS, 2, DIM)
    boxes = torch.cat((low, low + torch.rand(KV_HEADS, 9, 1, DIM)), dim=2)
    centre, half = boxes.mean(dim=2), (boxes[:, :, 1] - boxes[:, :, 0]) / 2
    want = queries @ centre.transpose(1, 2) + radius * queries.abs() @ half.transpose(1, 2)
    torch.testing.assert_close(box_scores(queries, boxes, radius), want)


def test_what_a_query_counts_has_its_dtype() -> None:
    """What a query counts is rounded to its own 16 bits."""
    queries = random_queries(KV_HEADS * GROUP, 1, DIM)[:, 0].view(KV_HEADS, GROUP, DIM).bfloat16()
    boxes = random_keys(6, DIM).view(KV_HEADS, 3, 2, DIM).sort(dim=2).values
    rough, fine = box_scores(queries, boxes, 0.5), box_scores(queries.float(), boxes, 0.5)
    assert not torch.equal(rough, fine)
    torch.testing.assert_close(rough, fine, rtol=0, atol=0.05)


def test_a_page_scores_by_codes_what_its_rows_weigh() -> None:
    """Row by row: what codes estimate of q·k, and what the rows of a page weigh together. The last has three, of which one is
    static, and a static page weighs nothing.
    """
    page, n = 16, 16 * 5 + 3
    config = Config(top_k=64, page=page, page_score="codes")
    context = replace(make_context(config, DIM, GROUP, [n]), codebooks={"signs": rotation_signs(0, DIM)})
    codes, keys = Codes(context), random_keys(n, DIM)
    codes.store.scales.fill_(torch.nan)
    static = torch.tensor([[*range(16, 32), 81]]).expand(KV_HEADS, -1)
    codes.build(0, keys, static)
    queries = random_queries(KV_HEADS, GROUP, DIM)
    scores = codes.scores(queries, 0, static, n)
    assert scores.shape == (KV_HEADS, GROUP, 6)
    assert (scores[..., 1] == -torch.inf).all()
    for head in range(KV_HEADS):
        mean = rotate(keys[head].mean(dim=0), codes.store.signs)
        for lane, query in enumerate(round_lanes(rotate(queries[head], codes.store.signs)).integers):
            step = float(rotate(queries[head, lane], codes.store.signs).abs().max() / 127)
            for number in (0, 2, 3, 4, 5):
                weight = 0.0
                for place in range(number * page, min(n, number * page + page)):
                    if place == 81:
                        continue
                    rotated = rotate(keys[head, place], codes.store.signs) - mean
                    cells = (rotated * DIM**0.5 / rotated.norm()).floor().clamp(-2, 1) + 0.5
                    scale = float((rotated.square().sum() / (cells * rotated).sum()).half())
                    weight += math.exp(step * float((scale * cells + mean) @ query) * context.scaling)
                assert float(scores[head, lane, number]) == pytest.approx(math.log(weight) / context.scaling, abs=1e-3)

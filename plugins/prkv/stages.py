"""Stages at which PRKV loses rows: whole pages fill the budget, or boxes or codes rank a page too low."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.plugins.contract import Index
from kvseek.plugins.measurements.stages import Stage, Stages, by_place, require_index, stored_keys
from kvseek.plugins.shared.group import best_positions, softmax_mean

from .reference import ReferenceIndex
from .summaries import rows_of_pages

RANKS = {"box": "boxes", "codes": "codes"}


def stages(index: Index, query: Tensor, slot: int) -> Stages:
    """Find the stages of a query [H, D].

    `pages` keeps the static rows, and the rows of the best pages if each page is ranked by its best key; `boxes`, or `codes`,
    ranks pages. In the stage `pages`, a page's score for a lane is the largest score of its keys; these scores are reduced as
    `select` reduces those of boxes or codes.
    """
    prkv = require_index(index, ReferenceIndex)
    config, n = prkv.config, prkv.context.lengths[slot]
    lanes = query.view(prkv.context.num_kv_heads, -1, query.shape[-1]).float()
    scores = lanes @ stored_keys(prkv, slot).transpose(1, 2)
    static = int(prkv.static_rows[slot]) // config.page
    best = rows_of_pages(scores, config.page).amax(dim=-1)[..., static:]
    values = softmax_mean(best, prkv.context.scaling)
    pages = best_positions(values, config.top_k // config.page - static) + static
    places = pages[..., None] * config.page + torch.arange(config.page, device=pages.device)
    kept = by_place(places.flatten(1).masked_fill(places.flatten(1) >= n, -1), n)
    kept[:, : static * config.page] = True
    return Stages((Stage("pages", kept, ideal=True),), last=RANKS[config.page_score])

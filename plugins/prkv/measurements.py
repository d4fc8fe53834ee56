"""Costs of a PRKV decode step (plugins/measurements.py).

Stages at which PRKV loses rows: whole pages fill the budget, or boxes or codes rank a page too low.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.config import ModelConfig
from kvseek.kernels.reference.codes.rotation import padded_dim
from kvseek.kernels.reference.codes.store import code_bytes, mean_bytes
from kvseek.plugins.contract import Index
from kvseek.plugins.measurements import SelectionCosts, Stage, Stages, by_place, require_index, stored_keys
from kvseek.plugins.prkv.config import Config
from kvseek.plugins.prkv.reference import ReferenceIndex
from kvseek.plugins.prkv.summaries import CODE_BITS
from kvseek.plugins.ranking import softmax_mean


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs: a box for each page, or codes of 2 bits a channel for each row; then the static rows and whole pages.

    Updates of the static set are left out, because they run beside the steps; what they delay is measured.
    """
    if length <= config.top_k:  # dense
        return SelectionCosts(float(length))
    if config.page_score == "box":
        index_bytes = (length - config.most_static) * 2 * model.head_dim * itemsize / config.page
    else:
        index_bytes = length * (code_bytes(model.head_dim, CODE_BITS) + mean_bytes(padded_dim(model.head_dim)))
    return SelectionCosts(
        rows=float(config.top_k),
        index_bytes=index_bytes,
        upkeep_steps=config.update_interval,
        upkeep_after=config.update_queries,
    )


RANKS = {"box": "boxes", "codes": "codes"}


def stages(index: Index, query: Tensor, slot: int) -> Stages:
    """Find the stages of a query [H, D].

    `pages` keeps the static rows, and the rows of the best pages if each page is ranked by its best key; `boxes`, or `codes`,
    ranks pages. In the stage `pages`, a page's score for a query head is the largest score of its keys that are not static; these
    scores are reduced as `select` reduces those of boxes or codes.
    """
    prkv = require_index(index, ReferenceIndex)
    n, static = prkv.context.lengths[slot], prkv.static_of(slot)
    lanes = query.view(prkv.context.num_kv_heads, -1, query.shape[-1]).float()
    scores = lanes @ stored_keys(prkv, slot).transpose(1, 2)
    tokens = prkv.summaries.tokens(static, n)
    heads = torch.arange(tokens.shape[0], device=tokens.device)[:, None, None]
    of_pages = scores.transpose(1, 2)[heads, tokens.clamp(min=0)].masked_fill((tokens < 0)[..., None], -torch.inf)
    values = softmax_mean(of_pages.amax(dim=2).transpose(1, 2), prkv.context.scaling)
    taken = prkv.best_pages(values, tokens, static.shape[1])
    places = torch.cat((static, tokens.masked_fill(~taken[..., None], -1).flatten(1)), dim=1)
    return Stages((Stage("pages", by_place(places, n), ideal=True),), last=RANKS[prkv.config.page_score])

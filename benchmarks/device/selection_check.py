"""What random weights leave open: how a selection behaves for queries that look for something.

A decoder of random weights asks random queries. The time of a selection does not depend on them: as many keys are
scanned, as many candidates reranked and as many rows selected. What does depend on them is how many rows two steps in
a row have in common (so what rows kept on the device save) and how good the selection is. Both are measured here for
synthetic queries.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvseek.measurement.index_batch import batch_of

from .observers import shared_rows

if TYPE_CHECKING:
    from kvseek.engine.cache.cache import Cache

    from .contestant import DeviceContestant
    from .filling import Filler

QUERIES = 32  # steps in a row


@torch.inference_mode()
def check_selection(contestant: DeviceContestant, filler: Filler) -> dict[str, Any] | None:
    """Overlap, recall and mass of the index of the last layer and slot 0 for synthetic queries; None if it selects nothing.

    It asks the index out of turn: fill it anew before anything else is timed on it.

    Returns
    -------
    dict
        ``overlap``: share of a step's rows that the step before selected too. ``recall``: share of the top rows by exact
        score (of the same number, plugins/group.py) that were selected. ``mass``: share
        of the retrieval region's softmax mass on the selected rows; ``best_mass``: on the top rows.
    """
    from kvseek.evaluation.selection_quality import measure
    from kvseek.evaluation.selection_tap import TappedSelection

    indexes = contestant.decoder.retrieval.indexes
    index, layer = indexes[-1], len(indexes) - 1
    context, top_k = index.context, getattr(index.context.config, "top_k", None)
    if top_k is None:
        return None
    source = filler.source.queries(context.num_heads, QUERIES, context.dtype)
    queries = filler.layer_queries(layer, source).transpose(0, 1).contiguous()
    batch = batch_of(index)
    selections = [index.select(query[None], batch) for query in queries]
    selected = [one.rows[0] for one in selections if one is not None]
    if not selected:
        return None  # the layer attends to every row
    rows = torch.stack(selected)  # [queries, G, entries]
    if not bool((rows >= 0).any()):
        return None  # attended to elsewhere
    grouped = queries.reshape(QUERIES, context.num_kv_heads, -1, context.head_dim)
    found = []
    for head in range(context.num_kv_heads):  # one at a time: exact scores are in float32
        keys = head_keys(contestant.cache, layer, head).to(queries.device)[None].float()
        for query, chosen in zip(grouped[:, head], rows[:, head : head + 1], strict=True):
            tapped = TappedSelection(query, chosen, keys, context.scaling)
            found.append(measure(tapped, top_k))
    return {
        "queries": QUERIES,
        "overlap": shared_rows(rows[:-1], rows[1:]),
        "recall": statistics.mean(quality.recall for quality in found),
        "mass": statistics.mean(quality.mass for quality in found),
        "best_mass": statistics.mean(quality.exact_mass for quality in found),
    }


def head_keys(cache: Cache, layer: int, head: int) -> Tensor:
    """Keys of one KV head of slot 0 by place, [n, D], where they lie; the device must be done with them."""
    pool = cache.rows.of_layer(layer).pool
    spans = cache.extents.spans(0, 0, cache.lengths[0])
    return torch.cat([pool[extent, head, inside, 0] for extent, inside, _ in spans])

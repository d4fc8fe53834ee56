"""What random weights leave open: how a selection behaves for queries that look for something.

A decoder of random weights asks random queries. The time of a selection does not depend on them: as many keys are
scanned, as many candidates reranked and as many rows selected. What does depend on them is how many rows two steps in
a row have in common (so what hot rows save) and how good the selection is. Both are measured here for synthetic queries.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

from .device_contestants import shared_rows

if TYPE_CHECKING:
    from kvseek.plugins.base import DeviceIndex

    from .device_setup import Filler

QUERIES = 32  # steps in a row


@torch.inference_mode()
def check_retrieval(index: DeviceIndex, filler: Filler) -> dict[str, Any] | None:
    """Overlap, recall and mass of the index of layer 0 and slot 0 for synthetic queries; None if it selects nothing.

    Returns
    -------
    dict
        ``overlap``: share of a step's rows that the step before selected too. ``recall``: share of the top rows by exact
        score (of the same number, heads of a group agreed upon as the method does) that were selected. ``mass``: share
        of the retrieval region's softmax mass on the selected rows; ``best_mass``: on the top rows.
    """
    from kvseek.evaluation.overhear import Heard
    from kvseek.evaluation.selection_quality import measure

    context = index.context
    settings = context.config
    if not (hasattr(settings, "top_k") and hasattr(settings, "group_reduce")):
        return None
    source = filler.source.queries(context.num_heads, QUERIES, context.dtype)
    queries = filler.layer_queries(0, source).transpose(0, 1).contiguous()
    rows = torch.stack([index.select(query[None], [0]).rows[0] for query in queries])  # [queries, G, top_k]
    grouped = queries.reshape(QUERIES, context.num_kv_heads, -1, context.head_dim)
    found = []
    for head in range(context.num_kv_heads):  # one at a time: exact scores are in float32
        own = slice(head, head + 1)
        keys = filler.keys(0, 0, context.lengths[0], own).float()
        for query, chosen in zip(grouped[:, head], rows[:, own], strict=True):
            heard = Heard(query, chosen, keys, context.scaling)
            found.append(measure(heard, settings.top_k, settings.group_reduce))
    return {
        "queries": QUERIES,
        "overlap": shared_rows(rows[:-1], rows[1:]),
        "recall": statistics.mean(quality.recall for quality in found),
        "mass": statistics.mean(quality.mass for quality in found),
        "best_mass": statistics.mean(quality.exact_mass for quality in found),
    }

"""Asks an index outside of a decode step: the batch of one request, as the engine would describe it."""

from __future__ import annotations

from kvseek.core.batch import Batch, RequestState
from kvseek.plugins.contract import Index


def batch_of(index: Index, slot: int = 0, position: int | None = None) -> Batch:
    """Make the batch of the one request that holds a slot, with all of its retrieval tokens and no window.

    Parameters
    ----------
    position : int, optional
        Position of the query's token; the number of retrieval tokens if left out. Successive steps need ascending positions.
    """
    context = index.context
    length = context.lengths[slot]
    state = RequestState(
        slot=slot,
        position=length if position is None else position,
        length=length,
        numbers=index.effort(length).numbers,
    )
    return Batch.of([state], context.extents.device_table)

"""The selection of a method for a batch of queries: the rows of the retrieval region to attend to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """Retrieval rows to attend to, on the engine's device. To attend to every row, a method returns None instead.

    Attributes
    ----------
    rows : Tensor, int32 [batch, G, entries]
        Places of the retrieval region, none of which occurs twice in one [batch, KV head]; -1 is no entry. Neighbouring places
        should be neighbouring entries, because a GPU reads them together. Undefined for requests with `dense` set, and on a GPU
        for those that only fill up a batch.
    """

    rows: Tensor

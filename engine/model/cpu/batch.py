"""A decode step's batch on the CPU, split into requests that attend to every row and requests that retrieve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.batch import Batch, RequestState
from kvseek.engine.retrieval import Retrieval


@dataclass(frozen=True)
class Group:
    """Requests of a batch that attend the same way: to every row (`dense`), or to selected rows."""

    requests: list[int]
    batch: Batch
    dense: bool


class HostBatch:
    """The requests of one step over a retrieval.

    Attributes
    ----------
    batch : Batch
        All requests.
    """

    def __init__(self, retrieval: Retrieval, states: Sequence[RequestState]) -> None:
        self.batch = Batch.of(states, retrieval.cache.extents.table)
        self._retrieval, self._groups = retrieval, _groups(self.batch)

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Attend group by group: queries and outputs [batch, H, D]."""
        if len(self._groups) == 1:
            return self._attend_alike(layer, queries.contiguous(), self._groups[0])
        out = torch.empty_like(queries)
        for group in self._groups:
            out[group.requests] = self._attend_alike(layer, queries[group.requests], group)
        return out

    def _attend_alike(self, layer: int, queries: Tensor, group: Group) -> Tensor:
        """Attend for the requests of a group, whose queries these are."""
        attend = self._retrieval.attend_densely if group.dense else self._retrieval.attend
        return attend(layer, queries, group.batch)


def _groups(batch: Batch) -> list[Group]:
    dense = [bool(number) for number in batch.column("dense").tolist()]
    groups = []
    for wanted in (True, False):
        requests = [request for request, is_dense in enumerate(dense) if is_dense == wanted]
        if requests:
            groups.append(Group(requests, batch if len(requests) == batch.size else batch.subset(requests), wanted))
    return groups

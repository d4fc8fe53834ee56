"""Decode steps on the CPU: the batch is split into requests that attend to every row and requests that retrieve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.engine.retrieval import Retrieval
from kvseek.engine.schedule.sampling import greedy_token
from kvseek.plugins.batch import Batch

from .torch_model import TorchModel


@dataclass(frozen=True)
class Group:
    """Requests of a batch that attend the same way: to every row (`dense`), or to selected rows."""

    requests: list[int]
    batch: Batch
    dense: bool


class HostSteps:
    """Runs the decode steps of a model on the CPU; Steps of engine/decoder.py."""

    def __init__(self, model: TorchModel, retrieval: Retrieval) -> None:
        self._model, self._retrieval = model, retrieval

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        """See Steps.decode."""
        states, attended = self._retrieval.begin_step(tokens, slots)
        batch = Batch.of(states, self._retrieval.cache.extents.table)
        groups = _groups(batch)
        logits = self._model.run_layers(batch, lambda layer, queries: self._attend(layer, queries, groups))
        self._retrieval.end_step(slots)
        return logits, attended

    @torch.inference_mode()
    def decode_tokens(
        self, tokens: Sequence[int], slots: Sequence[int], greedy: Sequence[bool]
    ) -> tuple[list[Tensor | int], list[float]]:
        """See Steps.decode_tokens."""
        logits, attended = self.decode(tokens, slots)
        return [greedy_token(row) if own else row for row, own in zip(logits, greedy, strict=True)], attended

    def prepare(self) -> None:
        """See Steps.prepare. It does nothing: no steps are captured on the CPU."""

    def _attend(self, layer: int, queries: Tensor, groups: Sequence[Group]) -> Tensor:
        """Attend group by group: queries and outputs [batch, H, D]."""
        if len(groups) == 1:
            return self._attend_alike(layer, queries.contiguous(), groups[0])
        out = torch.empty_like(queries)
        for group in groups:
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
            groups.append(Group(requests, batch if len(requests) == batch.size else batch.part(requests), wanted))
    return groups

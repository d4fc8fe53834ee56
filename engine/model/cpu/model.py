"""The model on the CPU: what its decode steps compute. layer.py has all else.

In a decode step, requests that attend to every row and requests that retrieve attend apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.rope import RotaryEmbedding, Rotation
from kvseek.engine.model.layer import WeightsModel
from kvseek.engine.model.reference.attention import CausalAttention
from kvseek.engine.model.reference.operations import LayerOperations
from kvseek.engine.model.reference.products import Products
from kvseek.engine.retrieval import Retrieval

Attend = Callable[[int, Tensor], Tensor]
"""Attention of a decode step: layer, queries [batch, H, D] to outputs [batch, H, D]."""


@dataclass(frozen=True)
class Group:
    """Requests of a batch that attend the same way: to every row (`dense`), or to selected rows."""

    requests: list[int]
    batch: Batch
    dense: bool


class HostBatch:
    """The requests of one step over a retrieval, as Retrieval.begin_step returns them.

    Attributes
    ----------
    batch : Batch
        All requests.
    """

    def __init__(self, retrieval: Retrieval, states: Tensor) -> None:
        self.batch = Batch(states, retrieval.cache.extents.table)
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


class TorchModel(WeightsModel):
    """Runs prompts and decode steps on the CPU; a BlockReader of engine/model/prefill.py. Parameters as WeightsModel."""

    most_tokens = sys.maxsize  # of a block

    def __init__(
        self,
        weights: dict[str, Tensor],
        retrieval: Retrieval,
        ops: LayerOperations,
        attention: CausalAttention,
        products: Products,
    ) -> None:
        super().__init__(weights, retrieval, ops, attention, products)
        self.rope = RotaryEmbedding(self.model, retrieval.cache.window.device)
        self.reader, self.windows = self, retrieval.cache.window.unbind()

    def rotate(self, start: int, stop: int, length: int) -> Rotation:
        return self.rope(start, stop, length)

    def read_block(self, tokens: Sequence[int], slot: int) -> Tensor:
        states, _ = self.retrieval.begin_step(tokens, [slot] * len(tokens))
        requests = HostBatch(self.retrieval, states)
        return self.run_layers(requests.batch, requests.attend, slice(len(tokens) - 1, None))

    def run_layers(self, batch: Batch, attend: Attend, asked: slice = slice(None)) -> Tensor:
        """Run a decode step: write each token's rows to the window, and compute logits of the requests `asked`.

        Returns float32 [requests, vocabulary].
        """
        mark = self.retrieval.observer.op_launched
        x, rotation = self.embed(batch.column("token")), self.rope.at(batch.column("position").tolist())
        mark("begin")
        delta: Tensor | None = None
        for number, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            delta = layer.decode(self.ops, batch, x, delta, rotation, window, partial(attend, number), mark)
        assert delta is not None, "a model has layers"
        logits = self.head((x + delta)[asked])
        mark("head")
        return logits

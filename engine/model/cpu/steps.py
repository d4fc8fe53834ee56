"""Decode steps on the CPU, and the model that they run; engine/model/layer.py has all else of it.

Requests of a step that attend to every row and requests that retrieve attend apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvseek.core.batch import LATEST, Batch
from kvseek.core.rope import RotaryEmbedding, Rotation
from kvseek.engine.draws.sampling import Drawn, Draws, Launched, Sampler, draw_once, greedy_token, sampled
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.model.layer import WeightsModel
from kvseek.engine.model.reference.attention import CausalAttention
from kvseek.engine.model.reference.operations import LayerOperations
from kvseek.engine.model.reference.products import Products
from kvseek.engine.retrieval import Retrieval
from kvseek.engine.row_recorder import NOBODY, RowsBySlot, Wanted

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


class HostDecoder(Decoder):
    """The decoder of an engine on the CPU. No steps are captured there."""

    model: TorchModel

    def __init__(self, model: TorchModel, retrieval: Retrieval, draws: Draws) -> None:
        super().__init__(model, retrieval)
        self._draws = draws
        self._latest = dict[int, int]()  # by slot: the token that its last step has drawn

    @property
    def runs_ahead(self) -> bool:
        """See Decoder. A step has ended here when it has been launched, so one that is launched ahead only delays its tokens."""
        return False

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        logits, attended, _ = self._step(tokens, slots, NOBODY)
        return logits, attended

    @torch.inference_mode()
    def launch(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        samplers: Sequence[Sampler | None],
        wanted: Wanted = NOBODY,
        steps: int = 1,
    ) -> Launched:
        """See Decoder. The step has ended when this returns."""
        assert steps == 1, "it does not run ahead"
        known = [self._latest[slot] if token == LATEST else token for token, slot in zip(tokens, slots, strict=True)]
        logits, attended, selected = self._step(known, slots, wanted)
        rows, drawing = sampled(samplers)
        others = iter(draw_once(self._draws, logits, rows, drawing) if rows else ())
        drawn = [greedy_token(row) if s is None else next(others) for row, s in zip(logits, samplers, strict=True)]
        tokens_drawn = (one if isinstance(one, int) else one.token for one in drawn)
        self._latest.update(zip(slots, (max(0, token) for token in tokens_drawn), strict=True))
        return Launched(attended, lambda: [drawn], selected)

    def _step(
        self, tokens: Sequence[int], slots: Sequence[int], wanted: Wanted
    ) -> tuple[Tensor, list[float], RowsBySlot]:
        """Run a step; see `decode` for logits and attended tokens, and Launched for the selected rows."""
        retrieval = self.retrieval
        states, attended = retrieval.begin_step(tokens, slots)
        requests = HostBatch(retrieval, states)
        recorder = retrieval.recorder_of(states, attended, wanted, together=False)
        with retrieval.recording(recorder):
            logits = self.model.run_layers(requests.batch, requests.attend)
        retrieval.end_step(slots)
        return logits, attended, dict if recorder is None else recorder.begin()

    def draw(self, logits: Tensor, samplers: Sequence[Sampler]) -> list[Drawn | int]:
        return draw_once(self._draws, logits, range(len(samplers)), samplers)

    def prepare(self) -> None:
        """See Decoder."""

    def close(self) -> None:
        """See Decoder."""

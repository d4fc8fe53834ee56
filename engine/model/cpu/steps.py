"""Decode steps on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.core.batch import LATEST
from kvseek.engine.draws.sampling import Drawn, Draws, Launched, Sampler, greedy_token, sampled
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.retrieval import Retrieval
from kvseek.engine.row_recorder import NOBODY, RowsBySlot, Wanted

from .model import HostBatch, TorchModel


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
    ) -> Launched:
        """See Decoder. The step has ended when this returns."""
        known = [self._latest[slot] if token == LATEST else token for token, slot in zip(tokens, slots, strict=True)]
        logits, attended, selected = self._step(known, slots, wanted)
        rows, drawing = sampled(samplers)
        others = iter(self._draws.begin(logits, rows, drawing)() if rows else ())
        drawn = [greedy_token(row) if s is None else next(others) for row, s in zip(logits, samplers, strict=True)]
        tokens_drawn = (one if isinstance(one, int) else one.token for one in drawn)
        self._latest.update(zip(slots, (max(0, token) for token in tokens_drawn), strict=True))
        return Launched(attended, lambda: drawn, selected)

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
        return self._draws.begin(logits, range(len(samplers)), samplers)()

    def prepare(self) -> None:
        """See Decoder."""

    def close(self) -> None:
        """See Decoder."""

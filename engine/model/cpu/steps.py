"""Decode steps on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.engine.draws.sampling import Drawn, Draws, Sampler, greedy_token, sampled
from kvseek.engine.retrieval import Retrieval

from .batch import HostBatch
from .model import TorchModel


class HostSteps:
    """Runs the decode steps of a model on the CPU; Steps of engine/decoder.py."""

    def __init__(self, model: TorchModel, retrieval: Retrieval, draws: Draws) -> None:
        self._model, self._retrieval, self._draws = model, retrieval, draws

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        """See Steps.decode."""
        states, attended = self._retrieval.begin_step(tokens, slots)
        requests = HostBatch(self._retrieval, states)
        logits = self._model.run_layers(requests.batch, requests.attend)
        self._retrieval.end_step(slots)
        self._retrieval.check()
        return logits, attended

    @torch.inference_mode()
    def decode_tokens(
        self, tokens: Sequence[int], slots: Sequence[int], samplers: Sequence[Sampler | None]
    ) -> tuple[list[Drawn | int], list[float]]:
        """See Steps.decode_tokens."""
        logits, attended = self.decode(tokens, slots)
        rows, drawing = sampled(samplers)
        drawn = iter(self._draws.begin(logits, rows, drawing)() if rows else ())
        return [
            greedy_token(row) if s is None else next(drawn) for row, s in zip(logits, samplers, strict=True)
        ], attended

    def draw(self, logits: Tensor, sampler: Sampler) -> Drawn:
        """See Steps.draw."""
        (drawn,) = self._draws.begin(logits[None], [0], [sampler])()
        return drawn

    def prepare(self) -> None:
        """See Steps.prepare. It does nothing: no steps are captured on the CPU."""

    def close(self) -> None:
        """See Steps.close; likewise."""

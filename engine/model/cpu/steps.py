"""Decode steps on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.engine.model.reference.operations import greedy_token
from kvseek.engine.retrieval import Retrieval

from .batch import HostBatch
from .model import TorchModel


class HostSteps:
    """Runs the decode steps of a model on the CPU; Steps of engine/decoder.py."""

    def __init__(self, model: TorchModel, retrieval: Retrieval) -> None:
        self._model, self._retrieval = model, retrieval

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
        self, tokens: Sequence[int], slots: Sequence[int], greedy: Sequence[bool]
    ) -> tuple[list[Tensor | int], list[float]]:
        """See Steps.decode_tokens."""
        logits, attended = self.decode(tokens, slots)
        return [greedy_token(row) if own else row for row, own in zip(logits, greedy, strict=True)], attended

    def prepare(self) -> None:
        """See Steps.prepare. It does nothing: no steps are captured on the CPU."""

    def close(self) -> None:
        """See Steps.close; likewise."""

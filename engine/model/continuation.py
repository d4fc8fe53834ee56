"""Reads the rest of a prompt whose beginning is reused as decode steps would read it: to selected rows (cache.cached_prefill).

The rest's tokens pass the layers in blocks, each token as a request of a decode step, so that the products are those of a
prompt. Nothing is copied for the beginning but what lies in the window: what a token costs does not grow with it, but for the
selection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvseek.engine.retrieval import Retrieval

from .host_batch import HostBatch
from .prefill import Prefill, Prompts

if TYPE_CHECKING:
    from .torch_model import TorchModel

BLOCK_TOKENS = 32  # least tokens of a block: fewer would hardly take less time, as the weights are read for each block


class Continuation(Prefill):
    """Reads what follows the prefix of one prompt, on the CPU. A unit of work is a block of tokens in all layers."""

    def __init__(self, model: TorchModel, retrieval: Retrieval, prompts: Prompts) -> None:
        super().__init__(retrieval, prompts)
        self._model = model
        (self._slot,) = self.slots
        self._first = self._row = retrieval.reused(self._slot)
        self._last: Tensor | None = None  # logits of the last token read

    @property
    def progress(self) -> float:
        """See Prefill.progress."""
        return (self._row - self._first) / (self.tokens - self._first)

    def _begin(self) -> None:
        self.retrieval.resume(self._slot)

    def _advance(self, max_tokens: int) -> int:
        block = max(BLOCK_TOKENS, max_tokens // self._model.model.num_layers)
        count = min(block, self.tokens - self._row, self.retrieval.cache.room_in_ring(self._slot))
        tokens = self.ids[self._row : self._row + count]
        states, _ = self.retrieval.begin_step(tokens, [self._slot] * count)
        requests = HostBatch(self.retrieval, states)
        self._last = self._model.run_layers(requests.batch, requests.attend, slice(count - 1, count))
        self._row += count
        return count * self._model.model.num_layers

    def _logits(self) -> Tensor:
        assert self._last is not None, "at least one token follows a prefix"
        return self._last

"""Reads the rest of a prompt whose beginning is reused as decode steps would read it: to selected rows (cache.cached_prefill).

The rest's tokens pass the layers in blocks, each token as a request of a decode step, so that the products are those of a
prompt. Nothing is copied for the beginning but what lies in the window: what a token costs does not grow with it, but for the
selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvseek.engine.retrieval import Retrieval

from .prefill import Prefill, Prompts

BLOCK_TOKENS = 32  # least tokens of a block: fewer would hardly take less time, as the weights are read for each block


class BlockReader(Protocol):
    """Runs decode steps of several tokens of one slot: a model on the CPU, engine/model/cuda/steps.py on a GPU."""

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest block."""

    def read_block(self, tokens: Sequence[int], slot: int) -> Tensor:
        """Append tokens that follow each other, for which the slot's ring has room (Cache.room_in_ring).

        Returns the logits after the last of them, float32 [1, vocabulary] on the engine's device.
        """


class Continuation(Prefill):
    """Reads what follows the prefix of one prompt. A unit of work is a block of tokens in all layers."""

    def __init__(self, reader: BlockReader, retrieval: Retrieval, prompts: Prompts) -> None:
        super().__init__(retrieval, prompts)
        self._reader, self._layers = reader, retrieval.config.model.num_layers
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
        block = min(max(BLOCK_TOKENS, max_tokens // self._layers), self._reader.most_tokens)
        count = min(block, self.tokens - self._row, self.retrieval.cache.room_in_ring(self._slot))
        self._last = self._reader.read_block(self.ids[self._row : self._row + count], self._slot)
        self._row += count
        return count * self._layers

    def _logits(self) -> Tensor:
        assert self._last is not None, "at least one token follows a prefix"
        return self._last

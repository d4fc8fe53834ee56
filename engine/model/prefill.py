"""Prompts that are being read: one in chunks, or a pack of several short ones at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .decoder import BaseDecoder, LayerwiseDecoder

LAST_QUERIES = 2048  # prompt queries that an index sees at build (plugins/contract.py)

Prompts = Sequence[tuple[int, Sequence[int]]]  # slot and token ids of each


@dataclass(frozen=True)
class Piece:
    """Rows start .. stop - 1 of a pack. They belong to one prompt, whose first token is row `first`.

    The token of row r has position r - first, and attends to rows first .. r.
    """

    first: int
    start: int
    stop: int


def pieces_of(borders: Sequence[int], start: int, stop: int) -> list[Piece]:
    """Cut rows start .. stop - 1 at the borders of prompts: prompt i has rows borders[i] .. borders[i + 1] - 1."""
    return [
        Piece(first, max(first, start), min(end, stop))
        for first, end in pairwise(borders)
        if max(first, start) < min(end, stop)
    ]


def attend_pieces(
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    pieces: Sequence[Piece],
) -> Tensor:
    """Causal attention of a chunk, each prompt to itself: queries [H, chunk, D], keys and values [G, pack, D] to [chunk, H, D].

    `attention` is one of engine/model/attention.py; `pieces` cut the chunk, which begins where the first of them does.
    """
    begin = pieces[0].start
    parts = [
        attention(
            queries[:, piece.start - begin : piece.stop - begin],
            keys[:, piece.first : piece.stop],
            values[:, piece.first : piece.stop],
            scaling,
        )
        for piece in pieces
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Prefill(ABC):
    """Reads prompts in units of work; made by BaseDecoder.prefill. To give it up, let go of it.

    Attributes
    ----------
    slots : tuple of int
    borders : tuple of int
        The tokens of prompt i are rows borders[i] .. borders[i + 1] - 1 of the pack.
    """

    def __init__(self, decoder: BaseDecoder, prompts: Prompts) -> None:
        self.slots = tuple(slot for slot, _ in prompts)
        self.ids = [token for _, ids in prompts for token in ids]
        self.borders = tuple(accumulate((len(ids) for _, ids in prompts), initial=0))
        self._decoder, self._begun = decoder, False
        self.dropped: set[int] = set()

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return len(self.ids)

    @property
    @abstractmethod
    def progress(self) -> float:
        """Share of the work that is done, 0 to 1."""

    def drop(self, slot: int) -> None:
        """Store nothing more for a slot, which is about to be closed; the other prompts of the pack are read on."""
        self.dropped.add(slot)

    @torch.inference_mode()
    def advance(self, max_tokens: int) -> int:
        """Run one unit of work over at most `max_tokens` tokens, unless the decoder has units of a fixed size.

        Returns the work done: tokens, times the layers that they passed. What it raises ends the prefill.
        """
        with self._guard():
            if not self._begun:
                self._begun = True
                for slot, (first, stop) in zip(self.slots, pairwise(self.borders), strict=True):
                    if slot not in self.dropped:
                        self._decoder.expect(slot, stop - first)
            return self._advance(max_tokens)

    @torch.inference_mode()
    def finish(self) -> Tensor:
        """Logits of each prompt's last token, float32 [prompts, vocabulary], once the progress is 1."""
        with self._guard():
            kept = [slot for slot in self.slots if slot not in self.dropped]
            for slot in kept:
                self._decoder.finish_indexes(slot)
            return self._decoder.hand_over(kept, self._logits())

    @abstractmethod
    def _advance(self, max_tokens: int) -> int:
        """`advance`, once cache and indexes expect the prompts."""

    @abstractmethod
    def _logits(self) -> Tensor:
        """Logits of each prompt's last token, float32 [prompts, vocabulary], where they were computed."""

    def _guard(self) -> AbstractContextManager[None]:
        return self._decoder.reading(self.tokens)


class LayerwisePrefill(Prefill):
    """Reads layer by layer, in units of one layer and one chunk of tokens; a pack of several prompts in one chunk."""

    def __init__(self, decoder: LayerwiseDecoder[Any], prompts: Prompts) -> None:
        super().__init__(decoder, prompts)
        self._owner, self._layers = decoder, decoder.model.num_layers
        self._prompt: Any = None  # what the decoder keeps of it from layer to layer
        self._layer, self._row = 0, 0  # the next unit begins here
        self._rows: tuple[Tensor, Tensor] | None = None  # keys and values of the layer
        self._queries: list[Tensor] = []  # of the layer, those that its index will see

    @property
    def progress(self) -> float:
        """See Prefill.progress."""
        return (self._layer * self.tokens + self._row) / (self._layers * self.tokens)

    def _advance(self, max_tokens: int) -> int:
        if self._prompt is None:
            self._prompt = self._owner.begin_prompt(self)
        if self._rows is None:
            self._rows = self._owner.new_rows(self.tokens), self._owner.new_rows(self.tokens)
        start = self._row
        size = max_tokens if self._owner.reads_packs else self._owner.config.prefill_chunk_tokens
        stop = self.tokens if len(self.slots) > 1 else min(start + size, self.tokens)
        queries = self._owner.prefill_chunk(self._layer, self._prompt, start, stop, *self._rows)
        # An index of a single prompt sees its last queries; those of a pack are all in this chunk.
        part = queries if len(self.slots) > 1 else queries[:, max(0, self.tokens - LAST_QUERIES - start) :]
        if part.shape[1] > 0:  # an empty part would keep the queries of its chunk
            self._queries.append(part)
        del queries, part
        self._row = stop
        if stop == self.tokens:
            self._end_layer()
        return stop - start

    def _end_layer(self) -> None:
        assert self._rows is not None, "the layer's chunks have been read"
        keys, values = self._rows
        for slot, (first, stop) in zip(self.slots, pairwise(self.borders), strict=True):
            if slot not in self.dropped:
                own = keys[:, first:stop], values[:, first:stop]
                self._owner.store_layer(self._layer, slot, *own, self._last_queries(first, stop))
        self._layer, self._row = self._layer + 1, 0
        self._rows, self._queries = None, []  # before the next layer allocates its own

    def _last_queries(self, first: int, stop: int) -> Tensor:
        """Of the prompt in rows first .. stop - 1, as an index takes them: contiguous [H, w, D]."""
        if len(self.slots) == 1:
            return torch.cat(self._queries, dim=1)[:, -LAST_QUERIES:]
        return self._queries[0][:, first:stop][:, -LAST_QUERIES:].contiguous()

    def _logits(self) -> Tensor:
        return self._owner.prompt_logits(self._prompt)

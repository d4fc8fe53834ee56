"""What a request finds of its prompt in extents that earlier requests have written."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.extents import Span, cut

from .row_storage import RowStorage
from .states import Snapshot


@dataclass(frozen=True)
class Reuse:
    """What of a prompt need not be read, in numbers that are the same on all ranks.

    Attributes
    ----------
    tokens : int
        How many of the prompt's first tokens, at least 1 and fewer than it has: its last token is always read.
    extents : tuple of int
        The extents that hold their rows behind the sink, in order; at least the first of the kept sequence.
    shared : int
        How many of these extents, from the first on, the request uses as they are. It copies what it needs of the others,
        because it will write to the same places.
    sparse : bool
        Whether the prompt's other tokens attend to what decode steps would attend to, rather than to all tokens before them.
    """

    tokens: int
    extents: tuple[int, ...]
    shared: int
    sparse: bool = False


@dataclass(frozen=True)
class Prefix(Reuse):
    """The first tokens of a prompt, whose rows are there already.

    Attributes
    ----------
    sink_rows : Tensor [layers, G, sink, 2, D], in host memory
        Rows of the sink, which lies in no extent. Pinned, if the engine computes on a GPU.
    state : Snapshot or None
        Of a hybrid: the states after these tokens.
    """

    sink_rows: Tensor = field(kw_only=True)
    state: Snapshot | None = field(default=None, kw_only=True)

    def sink_of(self, layer: int, device: torch.device) -> Tensor:
        """Return a layer's rows of the sink on a device, [G, sink, 2, D]; they must not be written to."""
        return self.sink_rows[layer].to(device, non_blocking=True)

    def read(self, rows: RowStorage, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copy a layer's keys and values of the prefix to the first tokens of `keys` and `values`, [G, n, D]."""
        head = self.sink_of(layer, keys.device)
        sink = head.shape[1]
        targets = keys[:, : self.tokens], values[:, : self.tokens]
        for part, target in enumerate(targets):
            target[:, :sink] = head[:, : self.tokens, part]
        left = [target[:, sink:] for target in targets]
        for run in rows.runs(layer, self.extents):
            whole = min(run.shape[0], left[0].shape[1] // EXTENT_TOKENS)
            places = whole * EXTENT_TOKENS
            for part, target in enumerate(left):
                if whole:
                    taken = target[:, :places].view(len(target), whole, EXTENT_TOKENS, -1)
                    taken.copy_(run[:whole, :, :, part].transpose(0, 1))
                if whole < run.shape[0]:  # the last extent of the prefix, which is not full
                    target[:, places:].copy_(run[whole, :, : target.shape[1] - places, part])
            left = [target[:, run.shape[0] * EXTENT_TOKENS :] for target in left]

    def rows_from(self, rows: RowStorage, layer: int, first: int) -> Tensor:
        """Copy a layer's rows of the prefix from token `first` on, which lies in no sink: [G, tokens - first, 2, D]."""
        sink = self.sink_rows.shape[2]
        spans = self._spans(first - sink, sink)
        blocks = rows.blocks(layer, [one[0] for one in spans])
        return torch.cat([block[:, inside] for block, (_, inside, _) in zip(blocks, spans, strict=True)], dim=1)

    def _spans(self, start: int, sink: int) -> list[Span]:
        """Cut the places from `start` on of the tokens behind a sink at the borders of extents."""
        return cut(self.extents, start, max(0, self.tokens - sink))

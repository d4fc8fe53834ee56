"""The residual stream of prompts, which passes the layers one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvseek.core.rope import Rotation

RotatePrompt = Callable[[int, int, int], Rotation]
"""Rotation of positions start .. stop - 1 of a prompt of so many tokens: takes start, stop and the length."""


@dataclass(frozen=True)
class Stream:
    """State of one prompt, or of a pack of prompts, that is kept from layer to layer.

    Attributes
    ----------
    residual : Tensor [rows, hidden]
        The residual stream, which every layer changes in place.
    rotation : Rotation or None
        That of all rows of a pack, in which positions begin anew with every prompt. None for a single prompt,
        in which a row's number is its position.
    """

    residual: Tensor
    rotation: Rotation | None

    @classmethod
    def begin(cls, residual: Tensor, borders: tuple[int, ...], rotate: RotatePrompt, short_reach: int) -> Stream:
        """Begin with embeddings [rows, hidden]; `borders` are those of Prefill, `short_reach` is that of ModelConfig."""
        lengths = [stop - start for start, stop in pairwise(borders)]
        if len(lengths) == 1:
            return cls(residual, None)
        # Prompts on one side of short_reach are rotated alike: the longest of them has the rotation of all.
        longest = {n > short_reach: n for n in sorted(lengths)}
        tables = {beyond: rotate(0, n, n) for beyond, n in longest.items()}
        cos, sin = ([tables[n > short_reach][part][:n] for n in lengths] for part in (0, 1))
        return cls(residual, (torch.cat(cos), torch.cat(sin)))

    def rows(self, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Return rows start .. stop - 1 of each (start, stop), [rows, hidden]."""
        # Slices rather than an index: a list of rows would be copied to a GPU, and the host would wait for it.
        rows = [self.residual[start:stop] for start, stop in spans]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def rotation_of(self, start: int, stop: int, rotate: RotatePrompt) -> Rotation:
        """Return the rotation of rows start .. stop - 1."""
        if self.rotation is None:
            return rotate(start, stop, self.residual.shape[0])
        cos, sin = self.rotation
        return cos[start:stop], sin[start:stop]

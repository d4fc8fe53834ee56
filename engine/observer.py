"""The one place where measurements look into a decode step; an engine that serves has nobody looking."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvseek.plugins.batch import Batch
from kvseek.plugins.selection import Selection


class Observer:
    """Is told what decode steps do; override what is of interest. Observing: Decoder.observe.

    On a GPU `part_ended` and `selected` are called while a step is captured as a graph: what they launch on the current
    stream becomes part of it, and runs again at every replay.
    """

    def part_ended(self, name: str) -> None:
        """The kernels of a part of the step have been launched: see PARTS of the model that runs it."""

    def selected(self, layer: int, queries: Tensor, batch: Batch, selection: Selection | None) -> None:
        """A layer's index has selected for queries [batch, H, D]. On the CPU requests that attend densely are left out."""

    def step_ended(self, slots: Sequence[int]) -> None:
        """A step of these slots has been launched and its upkeep, which may move rows in the pool, comes next."""

"""The one place where measurements look into decode steps and prompts; an engine that serves requests has no observer."""

from __future__ import annotations

from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.selection import Selection

# Parts of a step, in order: "begin" and "head" once a step, the others once a layer.
PARTS = ("begin", "norm", "qkv", "rope", "select", "attend", "o", "mlp_norm", "gate_up", "down", "head")


class Observer:
    """An object that is told what decode steps and prompts do.

    Subclasses override the methods of interest; Decoder.observe installs one.

    On a GPU `part_ended` and `selected` are called while a step is captured as a graph: work that they launch on the current
    stream becomes part of the graph, and runs again at every replay.
    """

    def part_ended(self, name: str) -> None:
        """Take note that the kernels of a part of the step have been launched; they are listed in PARTS.

        On the CPU the part has run, and a layer in which all requests attend densely has no "select".
        """

    def prompt_part_ended(self, name: str) -> None:
        """Take note that the kernels of a part of a layer have been launched for a chunk of a prompt, on a GPU.

        The parts of a layer in PARTS, without "select".
        """

    def selected(self, layer: int, queries: Tensor, batch: Batch, selection: Selection | None) -> None:
        """Look at a layer's selection for queries [batch, H, D]. On the CPU requests that attend densely are left out."""

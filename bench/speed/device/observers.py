"""What the GPU benchmark observes (engine/observer.py): the time of the parts of a step or a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch

from kvseek.engine.observer import Observer

from .memory_rates import elapsed_seconds, timing_event

if TYPE_CHECKING:
    from kvseek.engine.retrieval import Retrieval


class PartClock(Observer):
    """Events between the parts of a step; in a captured graph they are nodes of it, which every replay passes.

    Parameters
    ----------
    in_graph : bool
        Whether a captured step is observed.
    """

    def __init__(self, in_graph: bool = True) -> None:
        self._events: list[torch.cuda.Event] = []
        self._names: list[str] = []
        self._in_graph = in_graph

    def restart(self) -> None:
        """Begin a step: events of an earlier one are dropped."""
        self._events, self._names = [], []
        self._record()

    def part_ended(self, name: str) -> None:
        """See Observer."""
        self._names.append(name)
        self._record()

    def seconds(self) -> dict[str, float]:
        """Device seconds of each part, summed over its occurrences; the device must have passed all events."""
        totals: dict[str, float] = {}
        for number, name in enumerate(self._names):
            passed = elapsed_seconds(self._events[number], self._events[number + 1])
            totals[name] = totals.get(name, 0.0) + passed
        return totals

    def _record(self) -> None:
        event = timing_event(in_graph=self._in_graph)
        event.record()
        self._events.append(event)


class PromptClock(PartClock):
    """Events between the parts of a prompt's layers; what is done between two layers counts as the next one's norm."""

    def __init__(self) -> None:
        super().__init__(in_graph=False)

    def prompt_part_ended(self, name: str) -> None:
        """See Observer."""
        self.part_ended(name)


@contextmanager
def observing(retrieval: Retrieval, observer: Observer) -> Iterator[None]:
    """Show an observer what is launched or captured while the context lasts; an engine's own steps stay as they are."""
    before, retrieval.observer = retrieval.observer, observer
    try:
        yield
    finally:
        retrieval.observer = before


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where observed steps are captured: one for all, as cuBLAS keeps a work space for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

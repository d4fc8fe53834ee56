"""Notes the rows that the layers of a decode step select, for requests that ask for them (core/selected_rows.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvseek.core.batch import COLUMNS, Selection
from kvseek.core.selected_rows import RowReport, SelectedRows
from kvseek.core.streams import HostCopy

Wanted = Mapping[int, RowReport]
"""By slot: what the slot's request asks for, fitted to it."""
RowsBySlot = Callable[[], dict[int, SelectedRows]]
"""Waits for what a step has selected, and returns the report of each slot that wants one."""
NOBODY: Wanted = {}
SLOT, POSITION, LENGTH, DENSE = (COLUMNS[name] for name in ("slot", "position", "length", "dense"))


class RowRecorder:
    """Takes the selections of one decode step, layer after layer. On a GPU its copies are launches like others of the step.

    Parameters
    ----------
    states, attended
        The step's requests, as Retrieval.begin_step returns them.
    sink : int
        Tokens before the retrieval region.
    together : bool
        Whether the step's selections are those of all requests, as on a GPU. On the CPU requests that are dense are left out.
    """

    def __init__(self, states: Tensor, attended: Sequence[float], wanted: Wanted, sink: int, *, together: bool) -> None:
        self._layers, self._requests, place = list[Tensor | None](), list[_Request](), 0
        for state, read in zip(states.tolist(), attended, strict=True):
            dense = bool(state[DENSE])
            if (asked := wanted.get(state[SLOT])) is not None:
                step = state[POSITION] + 1, read, sink, sink + state[LENGTH]
                self._requests.append(_Request(state[SLOT], asked, None if dense else place, step))
            place += together or not dense

    def note(self, selection: Selection | None) -> None:
        """Take the next layer's selection; its rows may be overwritten afterwards."""
        self._layers.append(None if selection is None else selection.rows.clone())

    def begin(self) -> RowsBySlot:
        """Start to copy what was noted; returns what waits for the copies and writes the report of each slot that wants one."""
        noted = [rows for rows in self._layers if rows is not None]
        copies = HostCopy([torch.stack(noted)] if noted else [])

        def collect() -> dict[int, SelectedRows]:
            given = iter([layer for copy in copies.wait() for layer in copy.numpy()])
            layers = [None if rows is None else next(given) for rows in self._layers]
            return {request.slot: _report(request, layers) for request in self._requests}

        return collect


@dataclass(frozen=True)
class _Request:
    """A request of the step that wants a report; `place` is its row in the selections, None if it attends densely."""

    slot: int
    asked: RowReport
    place: int | None
    step: tuple[int, float, int, int]  # the first fields of SelectedRows


def _report(request: _Request, layers: Sequence[npt.NDArray[np.int32] | None]) -> SelectedRows:
    """Count the rows of each block: `layers` have places [batch, G, entries], -1 where there is none; None: a dense layer."""
    asked, (*_, start, stop) = request.asked, request.step
    assert asked.block is not None, "a fitted report has a block"
    heads, dense, selected = list(asked.kv_heads), list[int](), list[npt.NDArray[np.int32]]()
    for layer in asked.layers:
        rows = None if request.place is None else layers[layer]
        if rows is None:
            dense.append(layer)
        else:
            selected.append(rows[request.place, heads])
    packed = _count(np.concatenate(selected), start, stop, asked.block) if selected else (b"", b"", b"")
    return SelectedRows(*request.step, asked.block, asked.layers, asked.kv_heads, tuple(dense), *packed)


def _count(places: npt.NDArray[np.int32], start: int, stop: int, block: int) -> tuple[bytes, bytes, bytes]:
    """Return ends, blocks and counts as SelectedRows has them, of lists of places [lists, entries] of a region."""
    lists, width = np.arange(len(places)), -(-stop // block)
    keys = (start + places.astype(np.int64)) // block + lists[:, None] * width
    found, counts = np.unique(keys[places >= 0], return_counts=True)
    numbers = np.searchsorted(found, (lists + 1) * width), found % width, counts
    ends, blocks, counted = (array.astype(np.int32).tobytes() for array in numbers)
    return ends, blocks, counted

"""Takes out of a running engine what some of its layers select, and the keys that they selected from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.errors import ConfigError
from kvseek.core.selection import Selection
from kvseek.engine.cache.cache import Cache
from kvseek.engine.engine import Engine
from kvseek.engine.observer import Observer


@dataclass(frozen=True)
class TappedSelection:
    """One request's selection in one layer, and what it was made from.

    Attributes
    ----------
    queries : Tensor [H, D]
    rows : Tensor, int32 [G, entries]
        Places of the retrieval region; -1 is none.
    keys : Tensor [G, n, D]
        The retrieval region's keys by place, as they lay in the row pool when the rows were selected.
    scaling : float
        Softmax scale.
    """

    queries: Tensor
    rows: Tensor
    keys: Tensor
    scaling: float


class SelectionTap(Observer):
    """Keeps the last selections of some layers of an engine that runs one request at a time.

    On a GPU a selection runs inside a captured graph: the copies made here are captured with it, into tensors that this
    object keeps, and every replay refreshes them. Upkeep after a step may move rows in the pool, so the keys of a step that is
    measured are copied before it.

    Attributes
    ----------
    slot : int
        Of the request.
    """

    slot = 0  # the first that a scheduler gives

    def __init__(self, cache: Cache, scaling: float, layers: Sequence[int]) -> None:
        self.cache, self._scaling, self._layers = cache, scaling, tuple(layers)
        self._selected: dict[int, tuple[Tensor, Tensor | None]] = {}  # by layer: queries and rows
        self._keys: dict[int, Tensor] = {}
        self._wanted = False  # the next upkeep follows a step that is measured

    @classmethod
    def into(cls, engine: Engine, layers: Sequence[int]) -> SelectionTap:
        """Observe an engine's steps from now on; on a GPU they are captured anew."""
        tap = cls(engine.decoder.cache, engine.config.model.head_dim**-0.5, layers)
        engine.decoder.observe(tap)
        return tap

    def selected(self, layer: int, queries: Tensor, batch: Batch, selection: Selection | None) -> None:
        """See Observer. Steps of several requests, which a GPU captures too, are left out."""
        if layer in self._layers and batch.size == 1:
            rows = None if selection is None else selection.rows.clone()
            self._selected[layer] = queries.clone(), rows

    def step_ended(self, slots: Sequence[int]) -> None:
        """See Observer."""
        if self._wanted:
            self._keys, self._wanted = {layer: self._read_keys(layer) for layer in self._layers}, False

    def expect(self) -> None:
        """The next decode step is measured: keep the keys that it selects from."""
        self._wanted = True

    def last(self, layer: int) -> TappedSelection:
        """What the layer selected in the step that was measured last (`expect`); waits for the device.

        Raises ConfigError if the layer selected nothing, or keeps what it selects to itself.
        """
        queries, rows = self._selected.get(layer, (None, None))
        if queries is None or rows is None:
            raise ConfigError(
                f"--layers: layer {layer} selected nothing: must be a layer of a method that retrieves; choose another"
            )
        self._synchronize()
        if not bool((rows[0] >= 0).any()):
            raise ConfigError(
                f"--layers: layer {layer} attends to its selection elsewhere: must select on the GPU; build the engine with "
                "rows on the device (--cache.offload never)"
            )
        return TappedSelection(queries[0], rows[0], self._keys[layer], self._scaling)

    def _read_keys(self, layer: int) -> Tensor:
        """A copy of the layer's keys of the request by place, [G, n, D], where its queries are; waits for the device."""
        self._synchronize()
        pool, cache = self.cache.rows.of_layer(layer).pool, self.cache
        rows = cache.extents.read(pool, self.slot, cache.lengths[self.slot])
        return rows[:, :, 0].to(cache.window.device)

    def _synchronize(self) -> None:
        if self.cache.window.is_cuda:
            torch.cuda.synchronize(self.cache.window.device)


def membership(rows: Tensor, n: int) -> Tensor:
    """Which of n positions are among rows [G, entries], where -1 is none: bool [G, n]."""
    found = torch.zeros(rows.shape[0], n + 1, dtype=torch.bool, device=rows.device)
    return found.scatter_(1, torch.where(rows < 0, n, rows).long(), True)[:, :n]

"""Overhears what the index of a running engine selects, to set it against the exact top k over the row pool's keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvseek.core.errors import ConfigError
from kvseek.engine.cache.cache import Cache
from kvseek.engine.engine import Engine
from kvseek.plugins.batch import Batch
from kvseek.plugins.contract import DeviceIndex, Index
from kvseek.plugins.flat.method import exact_top_k
from kvseek.plugins.selection import Selection, Selection


@dataclass(frozen=True)
class Heard:
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


class _Overheard:
    """The last call of one index's selection, and the keys that it chose from.

    On the GPU a selection runs inside a captured graph: the copies made here are captured with it, into tensors that
    this object keeps, and every replay refreshes them. Upkeep after a step may move rows in the pool, so the keys of a
    step that is measured are copied before it.
    """

    def __init__(self, index: Index, keys: Callable[[], Tensor]) -> None:
        self.index, self._read_keys = index, keys
        self.queries: Tensor | None = None
        self.rows: Tensor | None = None
        self.keys: Tensor | None = None
        self.wanted = False  # the next upkeep follows a step that is measured
        self._refresh = index.refresh
        index.refresh = self._before_refresh  # type: ignore[method-assign]  # of this instance alone
        if isinstance(index, DeviceIndex):
            self._launch_select = index.launch_select
            index.launch_select = self._on_device  # type: ignore[method-assign]
        else:
            self._select = index.select
            index.select = self._on_cpu  # type: ignore[method-assign]

    def _on_device(self, queries: Tensor, batch: Batch) -> Selection | None:
        selection = self._launch_select(queries, batch)
        self._keep(queries, None if selection is None else selection.rows)
        return selection

    def _on_cpu(self, queries: Tensor, slots: Sequence[int]) -> Selection:
        selection = self._select(queries, slots)
        self._keep(queries, single_rows(selection, max(self.index.context.lengths[slot] for slot in slots)))
        return selection

    def _keep(self, queries: Tensor, rows: Tensor | None) -> None:
        self.queries = queries.clone()
        self.rows = None if rows is None else rows.clone()

    def _before_refresh(self, slots: Sequence[int]) -> None:
        if self.wanted:
            self.keys, self.wanted = self._read_keys(), False
        self._refresh(slots)


def single_rows(selection: Selection, length: int) -> Tensor:
    """A selection's rows one by one, int32 [batch, G, rows]; -1 for none and for a page's rows behind `length`."""
    entries = selection.rows
    if selection.block == 1:
        return entries
    inside = torch.arange(selection.block, dtype=torch.int32, device=entries.device)
    places = torch.where(entries[..., None] < 0, -1, entries[..., None] * selection.block + inside).flatten(2)
    return torch.where(places < length, places, -1)


class Listener:
    """Listens to some layers of an engine that runs one request at a time.

    Attributes
    ----------
    slot : int
        Of the request.
    """

    slot = 0  # the first that a scheduler gives

    def __init__(self, engine: Engine, layers: Sequence[int]) -> None:
        """Start listening, before the engine's first step."""
        decoder: Any = engine._decoder  # the engine shows it to nobody else
        self.cache: Cache = decoder.cache
        if engine.config.device == "cuda":
            # Graphs captured at load hold no copies: the one that the request needs is captured anew when it first runs.
            # The old ones are kept, as PyTorch takes no further captures into a memory pool that nobody uses any more.
            self._unused = dict(decoder._steps)
            decoder._steps.clear()
        self._layers = {layer: _Overheard(decoder.indexes[layer], self._reader(layer)) for layer in layers}

    def expect(self) -> None:
        """The next decode step is measured: keep the keys that it chooses from."""
        for overheard in self._layers.values():
            overheard.keys, overheard.wanted = None, True

    def heard(self, layer: int) -> Heard:
        """What the layer's index selected in the last step; waits for the device. Call `expect` before the step.

        Raises ConfigError if the index selected nothing, or keeps what it selects to itself.
        """
        overheard = self._layers[layer]
        if overheard.queries is None or overheard.rows is None:
            raise ConfigError(
                f"--layers: layer {layer} selected nothing: must be a layer of a method that retrieves; choose another"
            )
        if overheard.queries.is_cuda:
            torch.cuda.synchronize(overheard.queries.device)
        if not bool((overheard.rows[0] >= 0).any()):
            raise ConfigError(
                f"--layers: layer {layer} attends to its selection elsewhere: must select on the GPU; build the engine with "
                "rows on the device (--cache.offload never)"
            )
        keys = self._reader(layer)() if overheard.keys is None else overheard.keys
        return Heard(overheard.queries[0], overheard.rows[0], keys, overheard.index.context.scaling)

    def _reader(self, layer: int) -> Callable[[], Tensor]:
        """Copies the layer's keys of the request by place, [G, n, D], to where its queries are; waits for the device."""

        def read() -> Tensor:
            window = self.cache.window
            if window.is_cuda:
                torch.cuda.synchronize(window.device)
            rows = self.cache.extents.read(self.cache.layer_rows(layer), self.slot, self.cache.lengths[self.slot])
            return rows[:, :, 0].to(window.device)

        return read


def recall_of(heard: Heard, top_k: int, group_reduce: str) -> float:
    """Share of the exact top k that was selected, mean over the KV heads.

    Parameters
    ----------
    group_reduce : str
        How the heads of a group agree on a score (plugins/shared/group.py); that of the method.
    """
    grouped = heard.queries.reshape(heard.keys.shape[0], -1, heard.keys.shape[2])
    exact = exact_top_k(grouped, heard.keys, top_k, group_reduce, heard.scaling)
    # one column more for the entries that are none
    selected = torch.zeros(heard.keys.shape[0], heard.keys.shape[1] + 1, dtype=torch.bool, device=heard.keys.device)
    chosen = heard.rows.long()
    selected.scatter_(1, torch.where(chosen < 0, heard.keys.shape[1], chosen), True)
    return selected.gather(1, exact).float().mean().item()

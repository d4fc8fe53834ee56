"""Overhears what the index of a running engine selects, to set it against the exact top k over the row pool's keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvseek.engine.cache import Cache
from kvseek.engine.engine import Engine
from kvseek.engine.errors import ConfigError
from kvseek.plugins.base import DeviceIndex, Index, Selection
from kvseek.plugins.batch import DeviceBatch
from kvseek.plugins.flat.method import exact_top_k


@dataclass(frozen=True)
class Heard:
    """One request's selection in one layer, and what it was made from.

    Attributes
    ----------
    queries : Tensor [H, D]
    rows : Tensor, int32 [G, entries]
        Retrieval positions; -1 is none.
    keys : Tensor [G, n, D]
        The retrieval region's keys, as they lie in the row pool.
    scaling : float
        Softmax scale.
    """

    queries: Tensor
    rows: Tensor
    keys: Tensor
    scaling: float


class _Overheard:
    """The last call of one index's selection.

    On the GPU a selection runs inside a captured graph: the copies made here are captured with it, into tensors that
    this object keeps, and every replay refreshes them.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.queries: Tensor | None = None
        self.rows: Tensor | None = None
        if isinstance(index, DeviceIndex):
            self._launch_select = index.launch_select
            index.launch_select = self._on_device  # type: ignore[method-assign]  # of this instance alone
        else:
            self._select = index.select
            index.select = self._on_cpu  # type: ignore[method-assign]

    def _on_device(self, queries: Tensor, batch: DeviceBatch) -> Tensor | None:
        rows = self._launch_select(queries, batch)
        self._keep(queries, rows)
        return rows

    def _on_cpu(self, queries: Tensor, slots: Sequence[int]) -> Selection:
        selection = self._select(queries, slots)
        if selection.block != 1:
            raise ConfigError(
                f"--engine_dir: entries of {selection.block} rows: must be single rows; use another method"
            )
        self._keep(queries, selection.rows)
        return selection

    def _keep(self, queries: Tensor, rows: Tensor | None) -> None:
        self.queries = queries.clone()
        self.rows = None if rows is None else rows.clone()


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
        self._layers = {layer: _Overheard(decoder.indexes[layer]) for layer in layers}

    def heard(self, layer: int) -> Heard:
        """What the layer's index selected in the last step; waits for the device. Raises ConfigError if it never did."""
        overheard = self._layers[layer]
        if overheard.queries is None or overheard.rows is None:
            raise ConfigError("--engine_dir: the method selected nothing: must be one that retrieves; use another")
        if overheard.queries.is_cuda:
            torch.cuda.synchronize(overheard.queries.device)
        rows = self.cache.extents.read(self.cache.layer_rows(layer), self.slot, self.cache.lengths[self.slot])
        keys = rows[:, :, 0].to(overheard.queries.device)
        return Heard(overheard.queries[0], overheard.rows[0], keys, overheard.index.context.scaling)


def recall_of(heard: Heard, top_k: int, group_reduce: str) -> float:
    """Share of the exact top k that was selected, mean over the KV heads.

    Parameters
    ----------
    group_reduce : str
        How the heads of a group agree on a score (plugins/common/group.py); that of the method.
    """
    grouped = heard.queries.reshape(heard.keys.shape[0], -1, heard.keys.shape[2])
    exact = exact_top_k(grouped, heard.keys, top_k, group_reduce, heard.scaling)
    # one column more for the entries that are none
    selected = torch.zeros(heard.keys.shape[0], heard.keys.shape[1] + 1, dtype=torch.bool, device=heard.keys.device)
    chosen = heard.rows.long()
    selected.scatter_(1, torch.where(chosen < 0, heard.keys.shape[1], chosen), True)
    return selected.gather(1, exact).float().mean().item()

"""What the GPU benchmark can hold at a time: which contexts and batches run, where their rows lie, what is skipped and why.

A phase is one row pool (an offload mode) with everything that is timed on it: one method at a time beside the baseline.
The baseline, dense attention at its best, has its rows on the device while they fit, so it joins a phase where a second
pool fits beside the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvseek.bench.speed.shapes import matrix_bytes, row_numbers
from kvseek.bench.variants import PLAIN, WeightForm
from kvseek.core.config import EXTENT_TOKENS, CacheConfig, EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.extents import extents_for
from kvseek.core.model_config import ModelConfig
from kvseek.engine.cache.memory_layout import part_bytes, slot_state_bytes

GIB = 1 << 30
SLOT_STRIDE = 4099  # tokens between the beginnings of two slots' texts: no two requests hold the same keys
CHUNK_TOKENS = 64 * EXTENT_TOKENS  # rows written at a time
OFFLOADS = ("always", "never", "auto")


@dataclass(frozen=True, order=True)
class Cell:
    """One measurement: `batch` requests of `context` cached tokens each."""

    context: int
    batch: int


@dataclass(frozen=True)
class IndexNeeds:
    """Bytes of a method's indexes and attentions of all layers: of each extent of the pool, of each slot, and the rest."""

    extent: int = 0
    slot: int = 0
    fixed: int = 0

    def of(self, extents: int, slots: int) -> int:
        """Bytes for a pool of `extents` extents and `slots` slots."""
        return self.extent * extents + self.slot * slots + self.fixed


@dataclass(frozen=True)
class Needs:
    """Bytes: of the weights in all, of a slot's window, of an extent's rows in all layers, and of the indexes.

    `form` is how the weights are stored.
    """

    weights: int
    window_slot: int
    row_extent: int
    index: IndexNeeds
    form: WeightForm = PLAIN

    @classmethod
    def of(cls, config: EngineConfig, itemsize: int, index: IndexNeeds) -> Needs:
        """What the model, cache and method of a configuration need; the embedding counts beside the output head."""
        model = config.model
        window, form = config.cache.window, WeightForm.of(config)
        apart = not model.tie_word_embeddings or config.quantize_lm_head  # embedding and head
        embedding = model.vocab_size * model.hidden_size * apart * itemsize
        rows, weights = row_numbers(model) * itemsize, matrix_bytes(config) + embedding
        states = slot_state_bytes(model, getattr(torch, config.dtype))
        pairs = len(model.row_layers) * model.num_kv_heads * EXTENT_TOKENS * 2
        extent = pairs * part_bytes(config.cache, model.head_dim, itemsize)
        return cls(weights, rows * window + states, extent, index, form)

    @classmethod
    def most(cls, needs: Sequence[Needs]) -> Needs:
        """Enough for any of several methods of one model, one at a time: the largest of each part.

        Weights of several precisions lie on the device together; of embedding and head, which they share, each counts its own.
        """
        index = IndexNeeds(
            max(one.index.extent for one in needs),
            max(one.index.slot for one in needs),
            max(one.index.fixed for one in needs),
        )
        weights = sum({one.form: one.weights for one in needs}.values())
        return cls(weights, max(one.window_slot for one in needs), needs[0].row_extent, index)


@dataclass(frozen=True)
class Limits:
    """Bytes that may be used: of device memory, of it for activations, graphs and filling, of pinned host memory."""

    device: int
    work_space: int
    host: int

    def __post_init__(self) -> None:
        for name, flag in (("device", "gpu_memory"), ("host", "host_memory")):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{flag}: {getattr(self, name)} bytes: must be > 0; leave it out for all there is")


@dataclass
class Phase:
    """What runs on one row pool.

    Attributes
    ----------
    cells : list of Cell
        Those that the pool holds, in ascending order.
    baseline : list of Cell
        Of those, the ones where the baseline's rows fit on the device too.
    skipped : dict
        The others, with the reason.
    """

    offload: str
    cells: list[Cell] = field(default_factory=list)
    baseline: list[Cell] = field(default_factory=list)
    skipped: dict[Cell, str] = field(default_factory=dict)


def key_tokens(cells: Sequence[Cell]) -> int:
    """Tokens of the text that the slots of all cells begin in."""
    return max(cell.context + (cell.batch - 1) * SLOT_STRIDE for cell in cells)


def fill_bytes(model: ModelConfig, cells: Sequence[Cell], itemsize: int) -> int:
    """What filling these cells holds on the device beside caches and indexes (filling.Filler).

    One layer's keys of the longest text, a chunk's values, and two chunks of rows. What building an index takes, a copy
    of a request's keys in an order of the method's choice among it, comes out of the work space.
    """
    tokens, row = key_tokens(cells), 2 * model.num_kv_heads * model.head_dim * itemsize
    return tokens * row // 2 + min(tokens, CHUNK_TOKENS) * (row // 2 + 2 * row)


def cell_extents(cache: CacheConfig, cell: Cell, room: int) -> int:
    """Extents of a cell whose requests may grow by `room` tokens."""
    return cell.batch * extents_for(max(0, cell.context + room - cache.sink - cache.local))


def plan_phases(
    cache: CacheConfig,
    cells: Sequence[Cell],
    offloads: Sequence[str],
    room: int,
    needs: Needs,
    limits: Limits,
    dense_share: float = 0.0,
) -> list[Phase]:
    """A phase for each offload mode.

    Parameters
    ----------
    cache : CacheConfig
        The one with the largest retrieval regions, of several methods.
    needs : Needs
        Enough for any of the methods, which run one at a time: its index covers the whole pool.
    dense_share : float
        Of the layers, those whose rows lie on the device with "always" too.

    Raises
    ------
    ConfigError
        On an unknown mode, or if the weights alone do not fit.
    """
    for offload in offloads:
        if offload not in OFFLOADS:
            raise ConfigError(f"--offload = {offload!r}: must be a comma list of {', '.join(OFFLOADS)}")
    free = limits.device - limits.work_space - needs.weights
    if free <= 0:
        raise ConfigError(
            f"--shape: {needs.weights:,} bytes of weights and {limits.work_space:,} of work space: must fit into the device's "
            f"{limits.device:,}; choose a smaller shape"
        )
    on_device = {"never": 1.0, "always": dense_share, "auto": dense_share}
    ordered = sorted(set(cells))
    return [_plan(cache, ordered, one, room, needs, limits.host, free, on_device[one]) for one in offloads]


def _plan(
    cache: CacheConfig,
    cells: Sequence[Cell],
    offload: str,
    room: int,
    needs: Needs,
    host: int,
    free: int,
    on_device: float,
) -> Phase:
    phase = Phase(offload)
    most = max(cell.batch for cell in cells) + 1  # and the slot that padding writes to
    for cell in cells:
        extents = cell_extents(cache, cell, room)
        rows = extents * needs.row_extent
        left = free - most * needs.window_slot - needs.index.of(extents, most)
        device_rows = round(rows * on_device)
        if offload == "auto":
            device_rows = max(device_rows, min(rows, max(0, left)))
        if device_rows > left:
            phase.skipped[cell] = _reason("index and rows on the device", device_rows - left)
        elif rows - device_rows > host:
            phase.skipped[cell] = _reason("rows in host memory", rows - device_rows - host)
        else:
            phase.cells.append(cell)
    if offload == "never":
        phase.baseline = list(phase.cells)
    elif offload == "always" and phase.cells:
        index = needs.index.of(max(cell_extents(cache, cell, room) for cell in phase.cells), most)
        left = free - 2 * most * needs.window_slot - index
        fitting = (cell for cell in phase.cells if cell_extents(cache, cell, room) * needs.row_extent <= left)
        phase.baseline = list(fitting)
    return phase


def _reason(what: str, missing: int) -> str:
    return f"does not fit: {what} exceed the limit by {missing / GIB:.1f} GiB"

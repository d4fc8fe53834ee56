"""What the GPU benchmark can hold at a time: which contexts and batches run, where their rows lie, what is skipped and why.

A phase is one row pool (an offload mode) with everything that is timed on it. The baseline, dense attention at its best,
has its rows on the device while they fit, so it joins a phase where a second pool fits beside the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvseek.engine.config import EXTENT_TOKENS, EngineConfig, ModelConfig
from kvseek.engine.errors import ConfigError
from kvseek.engine.memory import ExtentTable, extents_for

from .shapes import matrix_parameters, row_numbers

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
class Needs:
    """Bytes: of the weights in all, of a slot's window, and of an extent's rows and index in all layers."""

    weights: int
    window_slot: int
    row_extent: int
    index_extent: int

    @classmethod
    def of(cls, config: EngineConfig, itemsize: int) -> Needs:
        """What the model, cache and method of a configuration need; the embedding counts beside the output head."""
        model = config.model
        numbers = matrix_parameters(model) + model.vocab_size * model.hidden_size * (not model.tie_word_embeddings)
        rows = row_numbers(model) * itemsize
        index = model.num_layers * index_bytes_per_token(config)
        return cls(numbers * itemsize, rows * config.cache.window, rows * EXTENT_TOKENS, round(index * EXTENT_TOKENS))


@dataclass(frozen=True)
class Limits:
    """Bytes that may be used: of device memory, of it for activations, graphs and filling, of pinned host memory."""

    device: int
    work_space: int
    host: int

    def __post_init__(self) -> None:
        for name in ("device", "host"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"--{name}_gib: {getattr(self, name)} bytes: must be > 0; leave it out for all there is"
                )


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


def index_bytes_per_token(config: EngineConfig) -> float:
    """Index bytes per retrieval token, all KV heads of one layer: asked of an index of one extent on the CPU."""
    import torch

    from kvseek.plugins.base import IndexContext
    from kvseek.plugins.registry import get_method

    method, model, cpu = get_method(config.method), config.model, torch.device("cpu")
    settings = method.configure(config.method_config)
    books = method.codebooks(settings, model.head_dim)
    shape = (0, model.num_heads, model.num_kv_heads, model.head_dim, model.head_dim**-0.5)
    context = IndexContext(*shape, settings, books, ExtentTable(1, 1, 1), [0], torch.bfloat16, cpu, library=None)
    return method.create(context).bytes_per_token


def key_tokens(cells: Sequence[Cell]) -> int:
    """Tokens of the text that the slots of all cells begin in."""
    return max(cell.context + (cell.batch - 1) * SLOT_STRIDE for cell in cells)


def fill_bytes(model: ModelConfig, cells: Sequence[Cell], itemsize: int) -> int:
    """What filling these cells holds on the device beside caches and indexes (device_setup.Filler).

    One layer's keys of the longest text, a chunk's values, two chunks of rows, and, when a selection is checked
    (retrieval_check.py), a KV head's keys: as they are and, of two heads, in float32.
    """
    tokens, row = key_tokens(cells), 2 * model.num_kv_heads * model.head_dim * itemsize
    chunk, longest = min(tokens, CHUNK_TOKENS), max(cell.context for cell in cells)
    return tokens * row // 2 + chunk * (row // 2 + 2 * row) + longest * model.head_dim * (itemsize + 2 * 4)


def cell_extents(config: EngineConfig, cell: Cell, room: int) -> int:
    """Extents of a cell whose requests may grow by `room` tokens."""
    cache = config.cache
    return cell.batch * extents_for(max(0, cell.context + room - cache.sink - cache.local))


def plan_phases(
    config: EngineConfig, cells: Sequence[Cell], offloads: Sequence[str], room: int, needs: Needs, limits: Limits
) -> list[Phase]:
    """A phase for each offload mode.

    Parameters
    ----------
    needs : Needs
        Of the method with the largest index: every index of a phase covers the whole pool.

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
    return [_plan(config, sorted(set(cells)), offload, room, needs, limits.host, free) for offload in offloads]


def _plan(
    config: EngineConfig, cells: Sequence[Cell], offload: str, room: int, needs: Needs, host: int, free: int
) -> Phase:
    phase = Phase(offload)
    most = max(cell.batch for cell in cells) + 1  # and the slot that padding writes to
    for cell in cells:
        extents = cell_extents(config, cell, room)
        rows = extents * needs.row_extent
        left = free - most * needs.window_slot - extents * needs.index_extent
        device_rows = rows if offload == "never" else 0 if offload == "always" else min(rows, max(0, left))
        if device_rows > left:
            phase.skipped[cell] = _reason("index and rows on the device", device_rows - left)
        elif rows - device_rows > host:
            phase.skipped[cell] = _reason("rows in host memory", rows - device_rows - host)
        else:
            phase.cells.append(cell)
    if offload == "never":
        phase.baseline = list(phase.cells)
    elif offload == "always" and phase.cells:
        index = max(cell_extents(config, cell, room) for cell in phase.cells) * needs.index_extent
        left = free - 2 * most * needs.window_slot - index
        fitting = (cell for cell in phase.cells if cell_extents(config, cell, room) * needs.row_extent <= left)
        phase.baseline = list(fitting)
    return phase


def _reason(what: str, missing: int) -> str:
    return f"does not fit: {what} exceed the limit by {missing / GIB:.1f} GiB"

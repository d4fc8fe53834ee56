"""Decides how many extents the row pool gets, and which layers have their rows on the device.

Rows of a layer lie either all on the device or all in host memory: the first `device_layers` layers on the device.
docs/memory.md has the rules and examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvseek.core.config import EXTENT_TOKENS, MOST_DRAFTED, CacheConfig, EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.core.extents import extents_for
from kvseek.core.model_config import ModelConfig
from kvseek.kernels.reference.attention.rounded_rows import SCALE_DTYPE
from kvseek.plugins.registry import method_traits


@dataclass(frozen=True)
class Footprint:
    """Device memory, in bytes, that loading a runtime has taken.

    Attributes
    ----------
    weights : int
        Weights, or the plans that contain them.
    outside : int
        Part of `weights` that PyTorch did not allocate and does not count.
    plan_work : int
        Work space of TensorRT's plans, which PyTorch allocated.
    """

    weights: int
    outside: int = 0
    plan_work: int = 0


@dataclass(frozen=True)
class RowLayout:
    """The size of the row pool, and where its rows lie.

    Attributes
    ----------
    capacity : int
        Extents in the pool.
    device_layers : int
        Layers whose rows lie on the device.
    host_layers : int
        Layers whose rows lie in host memory.
    layer_bytes : int
        Bytes of the rows of one extent in one layer.
    """

    capacity: int
    device_layers: int
    host_layers: int
    layer_bytes: int

    @property
    def device_bytes(self) -> int:
        """Bytes of rows on the device."""
        return self.capacity * self.device_layers * self.layer_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of rows in host memory."""
        return self.capacity * self.host_layers * self.layer_bytes


MTP_SINK, MTP_WINDOW = 16, 496  # rows of a slot that a multi-token-prediction head keeps: the first, and the latest


@dataclass(frozen=True)
class MemoryLayout:
    """Device memory of an engine, in bytes.

    `device_row_bytes` is the most that rows may use; `rows.device_bytes` of them are used. `window_bytes` are those of windows
    and of states.
    """

    rows: RowLayout
    device_row_bytes: int
    weight_bytes: int
    index_bytes: int
    window_bytes: int
    work_bytes: int

    @property
    def device_bytes(self) -> int:
        """Bytes of all parts together."""
        return self.rows.device_bytes + self.weight_bytes + self.index_bytes + self.window_bytes + self.work_bytes


def extents_wanted(config: EngineConfig) -> int:
    """Return the number of extents that max_batch_size requests of max_seq_len tokens occupy."""
    return config.max_batch_size * extents_for(max(0, config.max_seq_len - config.cache.sink))


def layer_extent_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one extent's rows in one layer."""
    return (
        config.model.num_kv_heads * EXTENT_TOKENS * 2 * part_bytes(config.cache, config.model.head_dim, dtype.itemsize)
    )


def part_bytes(cache: CacheConfig, head_dim: int, itemsize: int) -> int:
    """Return the bytes of a key or a value in the row pool, its scale included; of `itemsize` bytes a number in windows."""
    return head_dim + SCALE_DTYPE.itemsize if cache.row_dtype == "int8" else head_dim * itemsize


def slot_count(config: EngineConfig) -> int:
    """Return the number of slots: one a request, and on a GPU the padding slot.

    The CPU fills up no batches: there the window and the index arrays of one slot more would be waste.
    """
    return config.max_batch_size + (config.device == "cuda")


def window_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the windows of all layers and slots, a multi-token-prediction head's included."""
    model = config.model
    each = len(model.row_layers) * config.cache.window + model.mtp * (MTP_SINK + MTP_WINDOW)
    rows = each * slot_count(config) * model.num_kv_heads
    return rows * 2 * model.head_dim * dtype.itemsize


def ring_rows(model: ModelConfig, drafted: int = MOST_DRAFTED) -> int:
    """Return the rows of a slot in a layer with a window: also of a step's tokens behind the first, which may be taken back."""
    return min((model.sliding_window or 0) + drafted, model.max_position_embeddings)


def state_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the states of all layers and slots, of layers that keep no rows."""
    return slot_count(config) * slot_state_bytes(config.model, dtype)


def slot_state_bytes(model: ModelConfig, dtype: torch.dtype, drafted: int = MOST_DRAFTED) -> int:
    """Return the bytes of a slot's states in all layers that keep no rows, with room for so many tokens of a draft."""
    states = model.delta_net
    if states is None:
        rows = len(model.window_layers) * model.num_kv_heads * ring_rows(model, drafted)
        return rows * 2 * model.head_dim * dtype.itemsize
    recurrent = states.values * states.key_head_dim * torch.float32.itemsize
    inputs = states.ring_rows(drafted) * (states.channels + 2 * states.num_value_heads) * dtype.itemsize
    return len(states.layers) * (recurrent + inputs + states.num_value_heads * torch.int32.itemsize)


def host_rows(config: EngineConfig, dtype: torch.dtype) -> RowLayout:
    """Lay out the rows of an engine on the CPU: all of them lie in host memory.

    Raises
    ------
    CapacityError
        If a bound that the configuration states has no room for one extent.
    """
    layout, most = _layout(config, dtype, 0, None), config.cache.reuse_host_bytes
    if layout.capacity == 0 and extents_wanted(config) > 0:
        raise _no_extent(config, layout, None)
    needed = layout.host_layers * layout.layer_bytes
    if most is not None and most < needed:
        raise CapacityError(
            f"cache.reuse_host_bytes = {most:,}: must be >= {needed:,}, the rows of one extent of {EXTENT_TOKENS} tokens; "
            "raise it, or build with --cache.reuse false"
        )
    return layout


def lay_out_rows(config: EngineConfig, dtype: torch.dtype, device_row_bytes: int | None) -> RowLayout:
    """Decide where the rows of an engine on a GPU go.

    With `offload` "always" only the layers that attend densely have their rows on the device, because they would read all of
    their rows over PCIe in every step. "never" puts the rows of all layers on the device. "auto" chooses the number of layers
    that gives the most extents, and the largest such number. The configuration's budgets only lower the number of extents.

    Parameters
    ----------
    device_row_bytes : int or None
        Device memory that rows may use; None: as much as kv_cache_device_memory_bytes allows.

    Raises
    ------
    CapacityError
        If a budget has no room for one extent, or, with "never", the rows exceed `device_row_bytes`.
    """
    layers, cache = len(config.model.row_layers), config.cache
    dense = min(method_traits(config).device_layers, layers)
    choices = {"always": [dense], "never": [layers], "auto": list(range(dense, layers + 1))}[cache.offload]
    layouts = [_layout(config, dtype, device_layers, device_row_bytes) for device_layers in choices]
    best = max(layouts, key=lambda layout: (layout.capacity, layout.device_layers))
    if best.capacity == 0 and extents_wanted(config) > 0:
        raise _no_extent(config, best, device_row_bytes)
    if device_row_bytes is not None and best.device_bytes > device_row_bytes:
        raise CapacityError(
            f"cache.offload = {cache.offload!r} needs {best.device_bytes:,} bytes of rows on the device, "
            f"{device_row_bytes:,} are free; {'' if cache.offload == 'auto' else 'choose offload auto, or '}lower "
            f"{' or '.join((*cache.bounds, 'max_batch_size', 'max_seq_len'))}"
        )
    return best


def _layout(config: EngineConfig, dtype: torch.dtype, device_layers: int, device_row_bytes: int | None) -> RowLayout:
    """Lay out as many extents as the budgets allow, with the rows of `device_layers` layers on the device."""
    cache, layer_bytes = config.cache, layer_extent_bytes(config, dtype)
    host_layers = len(config.model.row_layers) - device_layers
    budgets = [(cache.kv_cache_host_memory_bytes, host_layers), (cache.kv_cache_device_memory_bytes, device_layers)]
    if cache.offload == "auto":  # with "never" too little free memory is an error, not a smaller pool
        budgets.append((device_row_bytes, device_layers))
    capacity = extents_wanted(config)
    for budget, layers in budgets:
        if budget is not None and layers:
            capacity = min(capacity, budget // (layers * layer_bytes))
    return RowLayout(capacity, device_layers, host_layers, layer_bytes)


def divide_memory(
    config: EngineConfig,
    dtype: torch.dtype,
    *,
    device_bytes: int,
    weight_bytes: int,
    work_bytes: int,
    index_bytes_per_token: float,
) -> MemoryLayout:
    """Divide device memory among weights, windows, work space, index and rows.

    Parameters
    ----------
    device_bytes : int
        Device memory that the engine may use, the weights' included.
    work_bytes : int
        Work space: activations of prefill units and decode graphs.
    index_bytes_per_token : float
        Bytes that the index of one layer keeps per token (Index.bytes_per_token).

    Raises
    ------
    CapacityError
        If the parts do not fit; the message has the bytes of each. Also raised as by `lay_out_rows`.
    """
    layers, windows = len(config.model.row_layers), window_bytes(config, dtype) + state_bytes(config, dtype)
    free = device_bytes - weight_bytes - work_bytes - windows
    if free < 0:
        none = RowLayout(0, 0, layers, layer_extent_bytes(config, dtype))
        raise _does_not_fit(MemoryLayout(none, 0, weight_bytes, 0, windows, work_bytes), device_bytes)

    def index_bytes(capacity: int) -> int:
        return round(layers * index_bytes_per_token * EXTENT_TOKENS) * capacity

    # The index grows with the extents and leaves the rest to rows. Fewer bytes never give more extents, so the second
    # layout's index is no larger than the first layout's.
    most = _layout_within(config, dtype, max(0, free))
    left = max(0, free - index_bytes(most.capacity))
    rows = _layout_within(config, dtype, left)
    layout = MemoryLayout(rows, left, weight_bytes, index_bytes(rows.capacity), windows, work_bytes)
    if layout.device_bytes > device_bytes:
        raise _does_not_fit(layout, device_bytes)
    return layout


def _no_extent(config: EngineConfig, layout: RowLayout, device_row_bytes: int | None) -> CapacityError:
    """Make the error for rows of which not one extent fits: into a stated bound, or into what is left of the device."""
    layers, bounds = len(config.model.row_layers), config.cache.bounds
    limits = [f"{name} = {value:,}" for name, value in bounds.items()]
    limits += [] if device_row_bytes is None else [f"{device_row_bytes:,} bytes of device memory are left"]
    remedies = [f"raise {' or '.join(bounds)}"] if bounds else []
    if device_row_bytes is not None:
        remedies.append(
            "stop what else runs on the GPU, or build with a smaller max_batch_size or prefill_chunk_tokens"
        )
    return CapacityError(
        f"{', '.join(limits)}: the rows of one extent of {EXTENT_TOKENS} tokens take {layers * layout.layer_bytes:,} bytes in "
        f"{layers} layers; {', or '.join(remedies)}"
    )


def _layout_within(config: EngineConfig, dtype: torch.dtype, device_row_bytes: int) -> RowLayout:
    """Lay out rows within `device_row_bytes`, but do not refuse rows that do not fit with `offload` "never".

    The caller adds up all parts then, and refuses with the whole sum.
    """
    return lay_out_rows(config, dtype, None if config.cache.offload == "never" else device_row_bytes)


def _does_not_fit(layout: MemoryLayout, device_bytes: int) -> CapacityError:
    tokens = layout.rows.capacity * EXTENT_TOKENS
    remedy = "" if layout.rows.host_layers else "choose offload 'auto', or "
    return CapacityError(
        f"device memory: weights {layout.weight_bytes:,}, windows and states {layout.window_bytes:,}, "
        f"work space {layout.work_bytes:,}, index of {tokens:,} tokens {layout.index_bytes:,} and rows "
        f"{layout.rows.device_bytes:,} are "
        f"{layout.device_bytes:,} bytes, {device_bytes:,} are available; {remedy}lower max_batch_size, max_seq_len, "
        "prefill_chunk_tokens or kv_cache_host_memory_bytes (it limits the tokens that are indexed)"
    )

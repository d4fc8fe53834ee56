"""Makes the index and the attention of every layer, for an engine and for counting the memory that they take."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, RequestState, buckets_for
from kvseek.core.config import EngineConfig
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext, LayerRows
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.reuse import reuses_prefixes, shares_extents
from kvseek.engine.loading.supported import check_device
from kvseek.engine.retrieval import Retrieval
from kvseek.kernels.cpu.attention.attend import HostAttention
from kvseek.kernels.cuda.attention.attend import AttentionScratch, DeviceAttention, LayerAttention
from kvseek.kernels.cuda.attention.hot_rows import HotRows, empty_frames, fitting_steps
from kvseek.plugins.contract import Index
from kvseek.plugins.registry import get_method, method_traits

logger = logging.getLogger(__name__)

if TYPE_CHECKING:  # only engines of the GPU load the CUDA packages
    from kvseek.core.cuda import CudaKernels


@dataclass(frozen=True)
class IndexMaker:
    """Makes the indexes of an engine, for any cache.

    Attributes
    ----------
    codebooks : dict of Tensor
        Codebooks that Traits.codebooks gave when the engine was built.
    library : CpuLibrary or None
        Compiled CPU kernels.
    kernels : CudaKernels or None
        Kernels of the GPU; None on the CPU.
    """

    config: EngineConfig
    codebooks: dict[str, Tensor]
    library: CpuLibrary | None = None
    kernels: CudaKernels | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError if the method does not run on the engine's device."""
        check_device(self.config)

    def make(self, extents: ExtentTable, lengths: list[int], rows: list[LayerRows] | None) -> list[Index]:
        """Make one index per layer, over retrieval regions of `lengths` tokens in `extents`.

        `rows` are the rows of each layer; None: they have not been placed in memory yet.
        """
        method, model, config = get_method(self.config.method), self.config.model, self.config
        settings, shared = method.configure(config.method_config), dict[str, Any]()
        keeps = self._keeps_rows(rows)
        return [
            method.create(
                IndexContext(
                    layer=layer,
                    num_heads=model.num_heads,
                    num_kv_heads=model.num_kv_heads,
                    head_dim=model.head_dim,
                    scaling=model.head_dim**-0.5,
                    config=settings,
                    codebooks=self.codebooks,
                    extents=extents,
                    lengths=lengths,
                    dtype=getattr(torch, config.dtype),
                    device=extents.device,
                    update=config.cache.update,
                    library=self.library,
                    cuda=self.kernels,
                    rows=None if rows is None else rows[layer],
                    frames=empty_frames(extents, model.num_kv_heads) if keeps[layer] else None,
                    shared=shared,
                    shares_extents=shares_extents(config),
                    reuses_prefixes=reuses_prefixes(config),
                )
            )
            for layer in range(len(model.row_layers))
        ]

    def _keeps_rows(self, rows: list[LayerRows] | None) -> list[bool]:
        """Tell for each layer whether the device keeps copies of rows: if the layer selects rows, and they lie in host memory."""
        method, layers = method_traits(self.config), range(len(self.config.model.row_layers))
        if self.kernels is None or not method.kept_steps or self.config.cache.offload == "never":
            return [False for _ in layers]
        return [layer >= method.device_layers and (rows is None or rows[layer].on_host) for layer in layers]

    def over(self, cache: Cache) -> list[Index]:
        """Make the indexes of a cache."""
        layers = range(len(self.config.model.row_layers))
        return self.make(cache.extents, cache.lengths, [cache.rows.of_layer(layer) for layer in layers])


def host_retrieval(config: EngineConfig, cache: Cache, indexes: list[Index], library: CpuLibrary | None) -> Retrieval:
    """Make the retrieval of an engine on the CPU."""
    of_layers = [cache.rows.of_layer(layer) for layer in range(len(config.model.row_layers))]
    attentions = [
        HostAttention(
            cache.window[layer], rows.pool, config.cache.sink, config.model.head_dim**-0.5, library, rows.scales
        )
        for layer, rows in enumerate(of_layers)
    ]
    return Retrieval(config, cache, indexes, attentions)


def device_retrieval(
    config: EngineConfig, cache: Cache, indexes: list[Index], kernels: CudaKernels, *, hot_rows: bool = True
) -> Retrieval:
    """Make the retrieval of an engine on a GPU.

    Parameters
    ----------
    hot_rows : bool
        In layers whose rows lie in host memory, keep the rows that each slot's last steps selected on the device
        (kernels/cuda/attention/hot_rows.py).

    Raises
    ------
    KernelError
        If the attention kernel does not support a shape of the model.
    """
    made = make_attentions(config, kernels, indexes, cache.extents.device_table, cache.window.dtype, hot_rows=hot_rows)
    attentions = [
        LayerAttention(attention, cache.window[layer], cache.rows.of_layer(layer))
        for layer, attention in enumerate(made)
    ]
    _tell_of_steps_not_kept(method_traits(config).kept_steps, indexes, made)
    return Retrieval(config, cache, indexes, attentions, [one.hot for one in made if one.hot is not None])


def _tell_of_steps_not_kept(steps: int, indexes: list[Index], attentions: list[DeviceAttention]) -> None:
    """Log a warning if some layer keeps the rows of fewer steps than the method asks for."""
    for index, attention in zip(indexes, attentions, strict=True):
        kept = fitting_steps(attention.entries, steps)
        if index.context.frames is not None and attention.entries and kept < steps:
            logger.warning(
                "steps whose rows stay on the device = %d: must be <= %d with %d selected rows, as frames have numbers of "
                "16 bits; %d are kept: select fewer rows, or lower cache_steps",
                *(steps, kept, attention.entries, kept),
            )
            return


def make_attentions(
    config: EngineConfig,
    kernels: CudaKernels,
    indexes: list[Index],
    table: Tensor,
    dtype: torch.dtype,
    *,
    hot_rows: bool = True,
) -> list[DeviceAttention]:
    """Make the attention of every layer, with hot rows where its index has frames for them.

    `table` int32 [slots, max_extents] is the cache's table of extents; its last slot is the padding slot, which selects no rows.
    Each index selects once, for a padding request, which shows how many rows it selects.
    """
    model, slots, steps = config.model, table.shape[0] - 1, method_traits(config).kept_steps
    batch = Batch.of([RequestState(slot=slots, sink_rows=1, length=0, dense=True)], table)
    queries = torch.zeros(1, model.num_heads, model.head_dim, dtype=dtype, device=table.device)
    attentions: list[DeviceAttention] = []
    rounded = config.cache.row_dtype == "int8"
    scratch: dict[int, AttentionScratch] = {}  # by number of selected rows: layers that select as many share one
    for index in indexes:
        selection = index.select(queries, batch)
        entries = 0 if selection is None else selection.rows.shape[2]
        hot, frames, kept = None, index.context.frames, fitting_steps(entries, steps)
        if hot_rows and frames is not None and kept:
            sizes = {"slots": slots, "entries": entries, "steps": kept, "head_dim": model.head_dim}
            of_rows = torch.int8 if rounded else dtype
            hot = HotRows.make(frames, **sizes, dtype=of_rows, shared=index.context.shares_extents)
        attentions.append(
            DeviceAttention(
                kernels,
                num_heads=model.num_heads,
                kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                dtype=dtype,
                window_rows=config.cache.window,
                sink=config.cache.sink,
                entries=entries,
                max_batch=buckets_for(config.max_batch_size)[-1],
                scaling=model.head_dim**-0.5,
                device=table.device,
                hot=hot,
                rounded_rows=rounded,
                scratch=scratch.get(entries),
            )
        )
        scratch.setdefault(entries, attentions[-1].scratch)
    return attentions

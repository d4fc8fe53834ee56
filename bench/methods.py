"""What measurements ask of a method outside of an engine: its costs, its kernels, the batch of one request."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvseek.builder.compile.cuda import Specialisation, cached_cubin
from kvseek.core.batch import Batch, RequestState
from kvseek.core.model_config import ModelConfig
from kvseek.plugins.contract import Index
from kvseek.plugins.measurements import SelectionCosts
from kvseek.plugins.registry import get_method

if TYPE_CHECKING:
    from kvseek.core.cuda import CudaKernels

Costs = Callable[[Any, ModelConfig, int, int], SelectionCosts]


def costs_of(method: str) -> Costs | None:
    """Return the function for a decode step's costs (plugins/measurements.py); None if the method has none.

    Raises ConfigError for an unknown method.
    """
    module = f"{get_method(method).package}.measurements"
    return getattr(importlib.import_module(module), "costs", None) if find_spec(module) else None


def load_kernels(
    unit: Specialisation, device: torch.device | None = None, roots: Sequence[Path] | None = None
) -> CudaKernels:
    """Compile a translation unit for a GPU (None: the current one), unless it has been compiled before, and load it.

    `roots` are the folders of the sources, see cached_cubin. Raises KernelError as that and CudaKernels do.
    """
    from kvseek.core.cuda import CudaKernels, cuda_device

    device = cuda_device(device)
    major, minor = torch.cuda.get_device_capability(device)
    return CudaKernels(cached_cubin(unit, 10 * major + minor, roots), device)


def method_kernels(
    method: str,
    config: Any,
    dtype: str,
    head_dim: int,
    group_size: int,
    device: torch.device | None = None,
    rounded_rows: bool = False,
) -> CudaKernels:
    """Load the kernels of a method with one Config of it for one shape; see load_kernels."""
    macros = tuple(sorted(get_method(method).traits(config).cuda_macros(head_dim, group_size).items()))
    return load_kernels(Specialisation(dtype, head_dim, group_size, method, macros, rounded_rows=rounded_rows), device)


def batch_of(index: Index, slot: int = 0, position: int | None = None) -> Batch:
    """Make the batch of the one request that holds a slot, with all of its retrieval tokens and no window.

    Parameters
    ----------
    position : int, optional
        Position of the query's token; the number of retrieval tokens if left out. Successive steps need ascending positions.
    """
    context = index.context
    length = context.lengths[slot]
    state = RequestState(
        slot=slot,
        position=length if position is None else position,
        length=length,
        method_fields=index.budget(length).method_fields,
    )
    return Batch.of([state], context.extents.device_table)

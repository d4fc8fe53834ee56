"""Kernels for a GPU of this machine, compiled when they are asked for: measurements need no engine directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvseek.builder.compile.cuda import Specialisation, cached_cubin
from kvseek.plugins.registry import get_method

if TYPE_CHECKING:
    from kvseek.core.cuda import CudaKernels


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
    method: str, config: Any, dtype: str, head_dim: int, group_size: int, device: torch.device | None = None
) -> CudaKernels:
    """Load the kernels of a method with one Config of it for one shape; see load_kernels."""
    macros = get_method(method).traits(config).cuda_macros(head_dim, group_size)
    return load_kernels(Specialisation(dtype, head_dim, group_size, method, tuple(sorted(macros.items()))), device)

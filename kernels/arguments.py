"""Helpers for the arguments of compiled kernels: addresses of an index's arrays, and checks of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import KernelError
from kvseek.core.index_context import IndexContext

POWER_SUM_BYTES = 24  # of a PowerSum (power_sum.cuh)
MOST_ROWS = 2**32  # places of all extents and KV heads: kernels number them with 32 bits


def pointers(owner: object, *names: str) -> dict[str, int]:
    """Return the addresses of an object's tensors by name, for a structure of arguments whose fields have the same names."""
    return {name: getattr(owner, name).data_ptr() for name in names}


def checked_address(name: str, tensor: Tensor | None, dtype: torch.dtype, device: torch.device) -> int:
    """Return the address of a tensor's data, 0 for None; raises KernelError unless the tensor is contiguous and as given here."""
    if tensor is None:
        return 0
    if tensor.dtype is not dtype or tensor.device != device or not tensor.is_contiguous():
        raise KernelError(
            f"{name}: {tensor.dtype} on {tensor.device}, strides {tensor.stride()}: must be contiguous {dtype} on {device}; "
            "convert it before"
        )
    return tensor.data_ptr()


def aligned_address(name: str, tensor: Tensor | None, dtype: torch.dtype, device: torch.device, alignment: int) -> int:
    """Return what `checked_address` does; raises KernelError, too, unless it is a multiple of `alignment` bytes.

    A kernel's fault would end every request of the process.
    """
    address = checked_address(name, tensor, dtype, device)
    if address % alignment:
        raise KernelError(
            f"{name}: address {address:#x}: must be a multiple of {alignment}; copy the tensor before the launch"
        )
    return address


def require_fit(name: str, tensor: Tensor, context: IndexContext) -> None:
    """Raise KernelError unless a tensor has the dtype, and lies on the kind of device, that an index was made for."""
    wanted = context.device.type
    if tensor.dtype is not context.dtype or tensor.device.type != wanted:
        raise KernelError(
            f"{name}: {tensor.dtype} on {tensor.device}: must be {context.dtype} on {wanted}, as the index was made for"
        )


def require_keys(keys: Tensor, context: IndexContext) -> None:
    """Raise KernelError unless kernels can read keys [G, n, D], as an index is given them, where they are."""
    require_fit("keys", keys, context)
    if keys.stride(-1) != 1:
        raise KernelError(f"keys: strides {keys.stride()}: the numbers of a key must be neighbours in memory")


def require_numbered_rows(kernels: str, context: IndexContext) -> None:
    """Raise KernelError, with the name of the kernels, if an index has more rows than they can number."""
    extents = max(context.extents.capacity, context.scratch_extents)
    rows = extents * context.num_kv_heads * EXTENT_TOKENS
    if rows >= MOST_ROWS:
        raise KernelError(
            f"{kernels}: {extents} extents x {context.num_kv_heads} KV heads = {rows} rows: must be below "
            f"{MOST_ROWS}; lower max_batch_size, max_seq_len or kv_cache_host_memory_bytes"
        )

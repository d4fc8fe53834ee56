"""Device memory that TensorRT owns as PyTorch tensors: nothing is copied, and nothing is freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.core.tensorrt_api import TYPE_NAMES


@dataclass(frozen=True)
class Element:
    """A type of elements: its name in the CUDA array interface, and its dtype in PyTorch."""

    interface: str
    torch: torch.dtype

    @property
    def tensorrt(self) -> str:
        """Name of the type in TensorRT's DataType."""
        return TYPE_NAMES[self.torch]


ELEMENTS = {  # by EngineConfig.dtype
    "float32": Element("<f4", torch.float32),
    "bfloat16": Element("<i2", torch.bfloat16),  # the interface has no bfloat16: read as integers of its width
    "float16": Element("<f2", torch.float16),
}


class _DeviceMemory:
    """Contiguous device memory, described by the CUDA array interface, version 3."""

    def __init__(self, pointer: int, shape: Sequence[int], interface: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),  # not read-only
            "shape": tuple(shape),
            "typestr": interface,
            "strides": None,
            "version": 3,
        }


def device_tensor(pointer: int, shape: Sequence[int], dtype: str) -> Tensor:
    """View contiguous memory of the current device as a tensor.

    Parameters
    ----------
    pointer : int
        Address of the first element. Whoever allocated the memory keeps it while the tensor is used.
    dtype : str
        One of ELEMENTS.

    Raises
    ------
    KernelError
        If the memory belongs to another device.
    """
    element = ELEMENTS[dtype]
    memory = _DeviceMemory(pointer, shape, element.interface)
    tensor = torch.as_tensor(memory, device="cuda")  # without a device, PyTorch's default device could make it a copy
    if tensor.data_ptr() != pointer:  # a copy from another device: data written to it would be lost
        raise KernelError(
            f"memory at {pointer:#x} of an attention layer is not on the current device, {tensor.device}; call "
            "torch.cuda.set_device with the device that the plan was loaded on, in the thread that enqueues it"
        )
    return tensor.view(element.torch)

"""The compiled CPU library of an engine directory, loaded with ctypes. Each caller declares the functions it uses."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from .errors import KernelError

LIBRARY_FILE = "kernels/cpu.so"  # inside an engine directory


class CpuLibrary:
    """A shared library of `extern "C"` functions that return nothing."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(
                f"cannot load the CPU kernels {path}: {error}; build the engine on this machine, or with --kernels reference"
            ) from None

    def function(self, name: str, *argument_types: type) -> ctypes._NamedFuncPointer:
        """Declare and return a function; raises KernelError if the library lacks it."""
        try:
            function: ctypes._NamedFuncPointer = getattr(self._library, name)
        except AttributeError:
            raise KernelError(
                f"the CPU kernels lack {name}; they are of another version: build the engine again"
            ) from None
        function.argtypes = list(argument_types)
        function.restype = None
        return function


def pointer(tensor: Tensor) -> int:
    """Return the address of a contiguous CPU tensor's data; raises KernelError for any other tensor."""
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise KernelError(
            f"kernel argument on {tensor.device}, strides {tensor.stride()}: must be contiguous on the CPU"
        )
    return tensor.data_ptr()

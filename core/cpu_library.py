"""The compiled CPU library of an engine directory, loaded with ctypes. Each caller says what the functions it uses take."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from .errors import KernelError

LIBRARY_FILE = "kernels/cpu.so"  # inside an engine directory


class CpuLibrary:
    """A shared library of `extern "C"` functions that take one address and return nothing."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            self._functions: dict[str, ctypes._NamedFuncPointer] = {}
        except OSError as error:
            raise KernelError(
                f"cannot load the CPU kernels {path}: {error}; build the engine on this machine, or with --kernels reference"
            ) from None

    def function(self, name: str, argument: type) -> ctypes._NamedFuncPointer:
        """Return a function, of which a call is given a struct of the class `argument`, or an address if that is c_void_p.

        Raises KernelError if the library lacks it; a call raises ctypes.ArgumentError for any other argument.
        """
        known = self._functions.get(name)
        if known is not None:
            return known
        try:
            function: ctypes._NamedFuncPointer = getattr(self._library, name)
        except AttributeError:
            raise KernelError(
                f"the CPU kernels lack {name}; they are of another version: build the engine again"
            ) from None
        is_struct = issubclass(argument, ctypes.Structure)
        function.argtypes = [ctypes.POINTER(argument) if is_struct else argument]
        function.restype = None
        self._functions[name] = function
        return function


def pointer(tensor: Tensor) -> int:
    """Return the address of a contiguous CPU tensor's data; raises KernelError for any other tensor."""
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise KernelError(
            f"kernel argument on {tensor.device}, strides {tensor.stride()}: must be contiguous on the CPU"
        )
    return tensor.data_ptr()

"""The part of TensorRT's Python API that sessions use, common to `tensorrt` and `tensorrt_rtx`, and the import of both.

Neither package is imported before a plan is built or run with it: both are large, and most engines need neither.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol, cast

import torch

from .errors import ConfigError, KernelError

PACKAGES = {"tensorrt_rtx": "tensorrt-rtx-cu13", "tensorrt": "tensorrt-cu13"}  # module: package on PyPI

TYPE_NAMES = {  # members of TensorRT's DataType
    torch.float32: "FLOAT",
    torch.bfloat16: "BF16",
    torch.float16: "HALF",
    torch.int32: "INT32",
    torch.int64: "INT64",
}


class ExecutionContext(Protocol):
    """IExecutionContext. Its methods return False if TensorRT refuses; the reason goes to the logger."""

    def set_device_memory(self, memory: int, size: int) -> None: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def get_tensor_shape(self, name: str) -> Sequence[int]: ...

    def set_tensor_address(self, name: str, memory: int) -> bool: ...

    def execute_async_v3(self, stream_handle: int) -> bool: ...


class CudaEngine(Protocol):
    """ICudaEngine: a deserialised plan, its weights in device memory."""

    @property
    def name(self) -> str: ...

    @property
    def num_io_tensors(self) -> int: ...

    @property
    def device_memory_size_v2(self) -> int: ...

    def get_tensor_name(self, index: int) -> str: ...

    def get_tensor_mode(self, name: str) -> Any: ...

    def get_tensor_dtype(self, name: str) -> Any: ...

    def get_tensor_shape(self, name: str) -> Sequence[int]: ...

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> Sequence[Sequence[int]]: ...

    def create_execution_context(self, strategy: Any) -> ExecutionContext | None: ...


class Logging(Protocol):
    """The part of TensorRT's module that the logger needs."""

    __name__: str
    __version__: str
    ILogger: Any

    def __hash__(self) -> int: ...


class SessionApi(Logging, Protocol):
    """The part of the module `tensorrt` or `tensorrt_rtx` that a session needs."""

    Runtime: Any
    ExecutionContextAllocationStrategy: Any


def import_tensorrt(name: str) -> ModuleType:
    """Import `tensorrt` or `tensorrt_rtx`.

    Raises
    ------
    ConfigError
        If `name` is neither.
    KernelError
        If the module cannot be imported; the message names the PyPI package that contains it.
    """
    if name not in PACKAGES:
        raise ConfigError(f"TensorRT module = {name!r}: must be one of {', '.join(PACKAGES)}; choose one of them")
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: its libraries do not load
        raise KernelError(f"cannot import {name}: {error}; pip install {PACKAGES[name]}") from None


def load_session_api(name: str) -> SessionApi:
    """Import TensorRT for running plans; see import_tensorrt."""
    return cast(SessionApi, import_tensorrt(name))

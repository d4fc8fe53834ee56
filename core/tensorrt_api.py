"""The import of `tensorrt` and `tensorrt_rtx`, of which sessions use what both have: neither describes its types.

Neither package is imported before a plan is built or run with it: both are large, and most engines need neither.
"""

from __future__ import annotations

import importlib
from types import ModuleType

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

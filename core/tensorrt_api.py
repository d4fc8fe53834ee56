"""The import of `tensorrt` and `tensorrt_rtx`, of which sessions use what both have, and what they say of failures.

Neither package is imported before a plan is built or run with it: both are large, and most engines need neither. Neither
describes its types. Both report a failure as None, and the reason only to a logger.
"""

from __future__ import annotations

import functools
import importlib
from collections import deque
from types import ModuleType
from typing import Any

import torch

from .errors import ConfigError, KernelError

KEPT_MESSAGES = 5
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


def logger(api: ModuleType) -> Any:
    """Return the logger for a Builder or a Runtime of `api`. A process has one, as TensorRT uses only the first it is given."""
    return _logger(api)[0]


def why(api: ModuleType) -> str:
    """Return TensorRT's name and version, and its last warnings and errors, which are forgotten then."""
    last = _logger(api)[1]
    text = "; ".join(last) or "it gave no reason"
    last.clear()
    return f"{api.__name__} {api.__version__}: {text}"


@functools.cache
def _logger(api: ModuleType) -> tuple[Any, deque[str]]:
    last, levels = deque[str](maxlen=KEPT_MESSAGES), api.ILogger.Severity

    def initialise(self: Any) -> None:
        api.ILogger.__init__(self)

    def log(self: Any, severity: Any, message: str) -> None:
        if severity in (levels.INTERNAL_ERROR, levels.ERROR, levels.WARNING):
            last.append(message)

    return type("Logger", (api.ILogger,), {"__init__": initialise, "log": log})(), last

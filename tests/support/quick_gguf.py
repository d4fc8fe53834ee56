"""Makes transformers read GGUF files in a third of the time, with the same result.

gguf spends most of the time on three things. It slices a numpy.memmap, which costs several times what an array costs. It makes
its table of names for each of a model's modules. It reads the vocabulary for the configuration, the tokenizer and the tensors.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np


def install(unchanged: Path) -> None:
    """Change the package gguf in this process; the header of `unchanged`, a file that no test writes, is read once.

    Without the package nothing is changed: tests of kernels run where it is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        return
    reader: Any = gguf.GGUFReader
    original = reader.__init__
    headers: dict[str, dict[str, Any]] = {}  # attributes of a reader; the one file or none

    def init(self: Any, path: Any, mode: str = "r") -> None:
        shared = type(self) is reader and mode == "r" and Path(path) == unchanged
        if not shared:
            original(self, path, mode)
            return
        if not headers:
            original(self, path, mode)
            headers["attributes"] = vars(self).copy()
        vars(self).update(headers["attributes"])

    reader.data = property(lambda self: self._bytes, lambda self, mapped: setattr(self, "_bytes", np.asarray(mapped)))
    reader.__init__ = init
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)

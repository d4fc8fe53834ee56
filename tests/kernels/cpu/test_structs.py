"""Python mirrors the structs that the CPU's kernels take field by field: nothing else would notice a difference."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
from tests.support.structs import fields_of, mirrors

# Structs of GPU kernels are compared where the kernels are compiled (tests/builder/compile/test_compile_cuda.py).
NATIVE = [
    one
    for one in mirrors()
    if one.__module__.startswith("kvseek.kernels.cpu.") or "native" in one.__module__.rpartition(".")[2]
]


def test_there_are_native_structs() -> None:
    assert len(NATIVE) >= 11


@pytest.mark.parametrize("mirror", NATIVE, ids=lambda mirror: f"{mirror.__module__}.{mirror.__name__}")
def test_python_mirrors_the_struct(mirror: type[ctypes.Structure]) -> None:
    """The struct is defined once in the C++ sources beside its mirror's module."""
    folder = Path(str(sys.modules[mirror.__module__].__file__)).parent
    sources = [path for path in folder.rglob("*") if path.suffix in (".h", ".cpp")]
    assert list(mirror._fields_) == fields_of(mirror.__name__, sources)

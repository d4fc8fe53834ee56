"""Python mirrors the structs that the CPU's kernels take field by field: nothing else would notice a difference."""

from __future__ import annotations

import pytest
from tests.support.structs import fields_of, mirrors

from kvseek.builder.compile_cuda import package_roots

(ROOT,) = package_roots()
# Where each struct is defined, for methods use the same names, and the module of its mirror.
STRUCTS = {
    ("common/rows.h", "AttendArguments"): "kvseek.plugins.common.attend",
    ("pariskv/encode.cpp", "EncodeArguments"): "kvseek.plugins.pariskv.native",
    ("pariskv/select.cpp", "SelectArguments"): "kvseek.plugins.pariskv.native",
    ("ctkvr/host_step.h", "HostStep"): "kvseek.plugins.ctkvr.native",
    ("ctkvr/host_recall.cpp", "HostRecall"): "kvseek.plugins.ctkvr.native",
    ("ctkvr/host_pool.h", "HostPoolArguments"): "kvseek.plugins.ctkvr.native",
}


@pytest.mark.parametrize(("source", "module"), STRUCTS.items(), ids=[name for _, name in STRUCTS])
def test_python_mirrors_the_struct(source: tuple[str, str], module: str) -> None:
    path, name = source
    (mirror,) = {one for one in mirrors() if (one.__module__, one.__name__) == (module, name)}
    assert list(mirror._fields_) == fields_of(name, [ROOT / "plugins" / path])


def test_every_mirror_of_native_code_is_listed() -> None:
    """Those of GPU kernels are compared where the kernels are compiled (test_compile_cuda.py)."""
    native = {one for one in mirrors() if one.__module__.endswith((".native", ".attend"))}
    assert {(one.__module__, one.__name__) for one in native} == {
        (module, name) for (_, name), module in STRUCTS.items()
    }

"""Classes of structs: what Python makes of a source is what the compiler makes of it, and nothing is guessed."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
from tests.support.structs import ROOT, declared_structs, layout_assertions

from kvseek.builder.compile.cpu import find_compiler, include_flags, unit_flags
from kvseek.core.batch import METHOD_FIELDS, RequestState
from kvseek.core.errors import KernelError
from kvseek.kernels.structs import c_struct

STRUCTS = declared_structs()
# Those of GPU kernels are compared where these are compiled (tests/builder/compile/test_compile_cuda.py).
CPU_SOURCES = [source for source in STRUCTS if not source.endswith((".cu", ".cuh"))]

SOURCE = """
// struct Pair { is a comment.
struct Pair {
    int first, second;
};
struct Arguments {
    const kvseek::codes::Row* rows;  // [n] pointers; of any type
    void* outputs[4];

    // A line of its own.
    unsigned long long seed;
    long long stride;
    Pair pair;
    Pair pairs[2];
    int64_t tokens, dim;
    double scaling;
    unsigned bits;
    int32_t numbers[3];
    float near, far;
};
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "arguments.h"
    path.write_text(SOURCE)
    return path


def test_a_struct_of_all_that_is_understood(source: Path, tmp_path: Path) -> None:
    pair = c_struct(str(source), "Pair")
    made = c_struct(str(source), "Arguments", pair)
    names = [name for name, *_ in made._fields_]
    assert names[:4] == ["rows", "outputs", "seed", "stride"]
    assert names[4:] == ["pair", "pairs", "tokens", "dim", "scaling", "bits", "numbers", "near", "far"]
    kinds = dict(made._fields_)  # type: ignore[arg-type]
    assert kinds["rows"] is ctypes.c_void_p
    assert kinds["seed"] is ctypes.c_uint64
    assert kinds["pairs"]._type_ is kinds["pair"] is pair
    checks = layout_assertions("Pair", pair) + layout_assertions("Arguments", made)
    unit = tmp_path / "unit.cpp"
    unit.write_text(f"#include <cstdint>\nnamespace kvseek::codes {{ struct Row; }}\n{SOURCE}{checks}")
    subprocess.run([*find_compiler(), "-std=c++17", "-fsyntax-only", str(unit)], check=True)
    unit.write_text(unit.read_text().replace("int first, second;", "int first, second, third;"))
    failed = subprocess.run([*find_compiler(), "-std=c++17", "-fsyntax-only", str(unit)], check=False, stderr=-1)
    assert b"static assertion failed" in failed.stderr


def test_a_misspelt_field_is_an_error(source: Path) -> None:
    pair = c_struct(str(source), "Pair")
    with pytest.raises(AttributeError, match="third"):
        pair(first=1, third=3)
    with pytest.raises(AttributeError, match="third"):
        pair().third = 3


@pytest.mark.parametrize(
    "line",
    [
        "bool dense;",
        "size_t size;",
        "Request request;",
        "int* first, second;",
        "int first, second[2];",
        "int ids[MOST];",
        "int grid[2][3];",
        "int value = 1;",
        "int bits : 4;",
        "int a; int b;",
        "const unsigned char*",
        "alignas(16) int value;",
        "void** pointers;",
        "std::array<int, 3> three;",
        "static constexpr int MOST = 3;",
        "/* not a line of its own */ int value;",
        "#ifdef OPTION",
        "union {",
    ],
)
def test_other_lines_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.h"
    path.write_text(f"struct Other {{\n}};\n\nstruct Bad {{\n    int fine;\n    {line}  // a comment\n}};\n")
    with pytest.raises(KernelError, match=re.escape(f"{path}, line 6: {line!r}: ")):
        c_struct(str(path), "Bad")


def test_a_struct_must_be_there_once(source: Path) -> None:
    with pytest.raises(KernelError, match=r"arguments\.h: defines struct Triple 0 times: must be once"):
        c_struct(str(source), "Triple")
    source.write_text(SOURCE + SOURCE)
    with pytest.raises(KernelError, match=r"arguments\.h: defines struct Pair 2 times: must be once"):
        c_struct(str(source), "Pair", ctypes.Structure)
    with pytest.raises(KernelError, match=r"nowhere\.h: No such file or directory: .* install it again"):
        c_struct("kernels/nowhere.h", "Pair")


@pytest.mark.parametrize("source", CPU_SOURCES)
def test_the_compiler_lays_structs_of_the_cpu_out_alike(source: str, tmp_path: Path) -> None:
    (tmp_path / "unit.cpp").write_text(
        "#include <cmath>\n#define KVSEEK_DRAW static inline\n" * (source == "kernels/draw.h")
        + f'#include "{ROOT / source}"\n'
        + "".join(layout_assertions(name, made) for name, made in STRUCTS[source].items())
    )
    flags = [*unit_flags(0), *include_flags(), "-w", "-fsyntax-only"]
    subprocess.run([*find_compiler(), *flags, str(tmp_path / "unit.cpp")], check=True)


def test_requests_are_packed_as_kernels_read_them() -> None:
    names = [name for name, *_ in c_struct("kernels/request.h", "Request")._fields_]
    assert names == [*(field.name for field in dataclasses.fields(RequestState)), "companions", "common", "scratch"]
    assert dict(c_struct("kernels/request.h", "Request")._fields_)["method_fields"]._length_ == METHOD_FIELDS  # type: ignore

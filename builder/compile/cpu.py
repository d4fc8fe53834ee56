"""Compile the C++ of the kernels and of the plugins into one shared library that picks its instruction level when it runs."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvseek.core.errors import KernelError
from kvseek.plugins.sources import files_digest, package_roots, sources

from .shared import cache_folder, compiling_threads

COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: softmax relies on infinities, and poisoned rows must show. No -fopenmp: kernels/cpu/parallel.h.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-exceptions",
    "-fno-rtti",
    "-Wall",
    "-Wextra",
)
LEVEL_FLAGS = {
    0: (),
    3: ("-march=x86-64-v3",),
    4: ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
STDERR_LINES = 20
REMEDY = "install one (Debian, Ubuntu: apt-get install g++), set CXX, or build with --kernels reference"


def compile_cpu_library(output: Path) -> None:
    """Compile every ``*.cpp`` below ``kernels/`` and ``plugins/`` into the shared library `output`, replacing it atomically.

    On x86-64 each source is compiled for x86-64-v4, x86-64-v3 and the baseline. The library chooses among these at run time,
    so it runs on every x86-64 processor. On other architectures there is only the baseline.

    Raises
    ------
    KernelError
        If there is no compiler, or the compiler failed (with the last lines of its messages).
    """
    compiler = find_compiler()
    output.parent.mkdir(parents=True, exist_ok=True)
    # Inside the target's folder: a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=output.parent) as name:
        folder = Path(name)
        units = [(source, level) for source in sources("*.cpp") for level in instruction_levels()]
        objects = [folder / f"{number}.o" for number in range(len(units))]
        commands = [
            [*compiler, *unit_flags(level), *include_flags(), "-c", str(source), "-o", str(target)]
            for (source, level), target in zip(units, objects, strict=True)
        ]
        with compiling_threads() as pool:
            list(pool.map(_run, commands))
        library = folder / output.name
        _run([*compiler, "-shared", "-o", str(library), *map(str, objects)])
        library.replace(output)


def cached_cpu_library() -> Path:
    """Compile once per source text, compiler and flags, to ``cpu-<hash>.so`` of the cache folder; raises as the compilation."""
    flags = [(level, unit_flags(level)) for level in instruction_levels()]
    digest = files_digest((*sources("*.h"), *sources("*.cpp")), _run([*find_compiler(), "--version"]), flags)
    library = cache_folder() / f"cpu-{digest[:16]}.so"
    if not library.exists():
        compile_cpu_library(library)
    return library


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler: ``$CXX``, else the first of c++, g++, clang++; raises KernelError without any."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise KernelError(f"CXX = {os.environ['CXX']!r}: must name a C++17 compiler on PATH; {REMEDY}")
        return chosen
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise KernelError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)}); {REMEDY}")


def instruction_levels() -> tuple[int, ...]:
    """Return the instruction levels that the sources are compiled for (kernels/cpu/kernel.h)."""
    return (0, 3, 4) if platform.machine() in ("x86_64", "AMD64") else (0,)


def unit_flags(level: int) -> tuple[str, ...]:
    """Return the compiler flags of one instruction level."""
    return (*FLAGS, *LEVEL_FLAGS[level], f"-DKVSEEK_LEVEL={level}")


def include_flags() -> list[str]:
    """Return the flags by which sources find headers of another folder: ``#include "kernels/cpu/simd.h"``."""
    return [f"-I{root}" for root in package_roots()]


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        last = "\n".join(result.stderr.splitlines()[-STDERR_LINES:])
        raise KernelError(
            f"{shlex.join(command[:1])} exited with {result.returncode}; it must be GCC 11, Clang 12 or newer; "
            f"{REMEDY}. Its last messages:\n{last}"
        )
    return result.stdout

"""Checks what `make` needs from the machine before anything is installed, and says how to get what is missing.

It runs under every Python since 3.6, so that one that is too old gets an answer and not a traceback.
"""

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
SUPPORTED = (3, 11), (3, 12), (3, 13)


def problems() -> "list[str]":
    """What is missing, one line each with its remedy."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if sys.version_info[:2] not in SUPPORTED:  # what follows would be about the wrong version
        return [
            f"Python {version}: must be 3.11, 3.12 or 3.13, the versions that the Triton server of the wheel nvidia-pytriton "
            "runs models with; apt-get install python3.11 python3.11-venv libpython3.11 (Debian 12, Ubuntu 22.04), the same with "
            "3.12 (Ubuntu 24.04) or 3.13 (Debian 13), or pyenv with PYTHON_CONFIGURE_OPTS=--enable-shared; then run make again, "
            "with PYTHON=PATH if it is not on PATH as python3.11, python3.12 or python3.13"
        ]
    found = []
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        found.append(f"Python's venv module is missing: apt-get install python{version}-venv")
    library = Path(sysconfig.get_config_var("LIBDIR") or "/") / (sysconfig.get_config_var("INSTSONAME") or "none")
    shared = sysconfig.get_config_var("Py_ENABLE_SHARED") and (library.exists() or _in_linker_path(library.name))
    if not shared:
        found.append(
            f"libpython{version}.so is missing, and the Triton Python backend loads it: apt-get install libpython{version}, "
            "or build Python with --enable-shared (pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared)"
        )
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", ""), *COMPILERS) if compiler):
        found.append("no C++ compiler, and the CPU kernels are compiled here: apt-get install g++")
    return found


def _in_linker_path(name: str) -> bool:
    folders = ("/usr/lib", "/usr/lib64", f"/usr/lib/{sysconfig.get_config_var('MULTIARCH') or ''}", "/usr/local/lib")
    return any((Path(folder) / name).exists() for folder in folders)


if __name__ == "__main__":
    missing = problems()
    for line in missing:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(1 if missing else 0)

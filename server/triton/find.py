"""Finds a tritonserver: the system's (NGC containers), else the one inside the wheel nvidia-pytriton; and runs it as the command
`kvseek tritonserver`.

The wheel is used as a carrier of the server's binaries. Its Python package is not imported, so it can be installed
without its dependencies.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from kvseek.core.command_line import Parser, tells_errors
from kvseek.server.errors import ServerError
from kvseek.server.processes import UMASK, die_without_core
from kvseek.server.scratch import scratch_folder

from .stub import WHEEL, copy_stub

SYSTEM_SERVER = Path("/opt/tritonserver/bin/tritonserver")  # where the NGC containers have it
LIBRARIES = "nvidia_pytriton.libs"  # the wheel's folder of shared libraries
STUB = "triton_python_backend_stub"
BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class TritonServer:
    """A tritonserver that can be run: its binary, its backend directory and the environment that it needs."""

    binary: Path
    backends: Path
    environment: dict[str, str]


def find_server(scratch: Path) -> TritonServer:
    """Find a server. A server in a wheel gets a backend directory assembled inside `scratch`, which must outlive it.

    Raises
    ------
    ServerError
        If there is no server, or its Python backend cannot run with this Python.
    """
    on_path = shutil.which("tritonserver")
    binary = Path(on_path) if on_path else SYSTEM_SERVER
    if binary.exists():
        backends = binary.resolve().parent.parent / "backends"
        if not (backends / "python").is_dir():
            raise ServerError(
                f"{binary} has no Python backend at {backends / 'python'}; install Triton's Python backend"
            )
        return TritonServer(binary, backends, _environment([]))
    return _embedded_server(scratch)


def _embedded_server(scratch: Path) -> TritonServer:
    try:
        site = Path(str(distribution(WHEEL).locate_file("")))
    except PackageNotFoundError:
        raise ServerError(
            f"no tritonserver on PATH nor at {SYSTEM_SERVER}, and no embedded one; "
            f"run: pip install --no-deps {WHEEL}==0.7.0, or start inside a Triton container"
        ) from None
    root = site / "pytriton" / "tritonserver"
    stub = root / "python_backend_stubs" / VERSION / STUB
    if not stub.exists():
        known = ", ".join(sorted(folder.name for folder in (root / "python_backend_stubs").glob("3.*")))
        raise ServerError(
            f"{WHEEL} has no Python backend stub for Python {VERSION}, only for {known}; use one of these, or a tritonserver "
            "of the system"
        )
    libraries = _libpython_as_named(scratch / "lib", site / LIBRARIES)
    backend = scratch / "backends" / "python"
    backend.mkdir(parents=True)
    for name in BACKEND_FILES:
        (backend / name).symlink_to(root / "backends" / "python" / name)
    copy_stub(stub, backend / STUB)
    binary = root / "bin" / "tritonserver"
    if not os.access(binary, os.X_OK):
        binary = Path(shutil.copy2(binary, scratch / "tritonserver"))
        binary.chmod(0o755)
    return TritonServer(binary, scratch / "backends", _environment([libraries, site / LIBRARIES]))


def _libpython_as_named(folder: Path, libraries: Path) -> Path:
    """Fill `folder` with the running Python's shared library, under its own name and that which the stub may know; returns it.

    The wheel has a libpython of its own for its stub of 3.13, under a name of its own. It fits only Pythons that were built with
    the same modules in their library, which Debian's was not.
    """
    libpython = shared_libpython()
    names = [libpython.name, *(path.name for path in libraries.glob(f"libpython3-*.{sys.version_info.minor}.so*"))]
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).symlink_to(libpython)
    return folder


def shared_libpython() -> Path:
    """Find the shared library of the running Python, which the backend's stub loads; raises ServerError without one."""
    name = sysconfig.get_config_var("INSTSONAME") or f"libpython{VERSION}.so.1.0"
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    folders = (
        sysconfig.get_config_var("LIBDIR") or "/usr/lib",
        f"/usr/lib/{multiarch}",
        "/usr/lib64",
        "/usr/local/lib",
    )
    for folder in map(Path, folders):
        if ".so" in name and (folder / name).exists():
            return folder / name
    raise ServerError(
        f"no shared libpython{VERSION} in {folders[0]}, and Triton's Python backend loads it; "
        f"install it (Debian, Ubuntu: apt-get install libpython{VERSION}), or use a Python built with --enable-shared "
        "(pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared)"
    )


def _environment(libraries: list[Path]) -> dict[str, str]:
    """Make an environment from this process's, with the libraries first and this Python's packages for the backend's stub.

    The stub is a program of its own that starts the `python3` of PATH's first folder: that of the virtual environment.
    """
    environment = dict(os.environ)
    paths = [str(folder) for folder in libraries]
    if inherited := environment.get("LD_LIBRARY_PATH"):
        paths.append(inherited)
    if paths:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    environment["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), environment.get("PATH", os.defpath)])
    return environment


DESCRIPTION = (
    "Run tritonserver; all arguments are its own, such as --model-repository DIR (kvseek repository writes such folders). "
    "It is the tritonserver on PATH or of an NGC container, else the one of the wheel nvidia-pytriton, for which this "
    "command sets up the libraries and the backend directory."
)


def make_parser() -> Parser:
    """Make the parser of `kvseek tritonserver`, which has no flags of its own."""
    return Parser(prog="kvseek tritonserver", usage="%(prog)s [ARGUMENT ...]", description=DESCRIPTION)


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run a tritonserver until it ends; returns its exit status."""
    _, arguments = make_parser().parse_known_args(argv)
    with scratch_folder() as scratch:
        server = find_server(scratch)
        command = [str(server.binary), f"--backend-directory={server.backends}", *arguments]
        process = subprocess.Popen(command, env=server.environment, preexec_fn=die_without_core, umask=UMASK)
        signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server itself, which this process waits for
        return process.wait()

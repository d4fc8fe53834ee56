"""A server's folder in the system's folder of temporary files: sockets, logs, Triton's repository.

It goes with its server. A server that was killed leaves it behind, with shared memory of Triton's. So the next one that starts
removes what nobody uses: a folder in use holds a locked file, and the kernel lets go of the lock however its owner ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ServerError

SHARED_MEMORY_PREFIX = "triton_python_backend_shm_region_"  # Triton keeps clients away from memory with such names
PREFIX = "kvseek-"
LOCK = "in_use"
SHARED_MEMORY = Path("/dev/shm")
MAX_SOCKET_BYTES = 107  # of a path: unix(7)
LONGEST_NAME = 24  # characters of a socket's name in such a folder


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder that only this user can enter, and remove it with the context; first remove those of killed servers.

    Raises
    ------
    ServerError
        If there is no folder for temporary files, or its path is too long for sockets.
    """
    try:
        place = Path(tempfile.gettempdir())
        _sweep(place)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise ServerError(
            f"no folder for temporary files can be made ({error.strerror}): set TMPDIR to one that can be written"
        ) from None
    try:
        size = len(os.fsencode(folder)) + 1 + LONGEST_NAME
        if size > MAX_SOCKET_BYTES:
            raise ServerError(
                f"TMPDIR = {str(place)!r}: sockets there have {size} bytes: must be <= {MAX_SOCKET_BYTES}; name a shorter one"
            )
        part = folder / f"{LOCK}.part"
        with part.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            part.rename(folder / LOCK)  # others look at it only now that it is locked
            yield folder
    finally:
        _remove(folder)


def alive_socket(folder: Path, name: str) -> Path:
    """Return the socket in a server's folder at which a process answers whether it works (core/liveness.py)."""
    return folder / f"{name}.alive"


def memory_prefix(folder: Path) -> str:
    """Return the prefix of a server's shared memory: Triton's, which keeps clients away, and the name of the server's folder."""
    return f"{SHARED_MEMORY_PREFIX}{folder.name}-"


def close_shared_memory(folder: Path, models: int) -> bool:
    """Let nobody else read Triton's shared memory; returns whether there is that of all models, which it makes one by one.

    Its Python backend gives it the mode 0644, whatever the umask is, long before a model takes its first request.
    """
    regions = list(SHARED_MEMORY.glob(f"{memory_prefix(folder)}*"))
    for region in regions:
        with contextlib.suppress(FileNotFoundError):  # Triton has just ended
            region.chmod(0o600)
    return len(regions) >= models


def free_shared_memory(folder: Path) -> None:
    """Remove shared memory that a killed Triton has left behind: it would take up memory until the machine restarts."""
    for region in SHARED_MEMORY.glob(f"{memory_prefix(folder)}*"):
        region.unlink(missing_ok=True)


def _sweep(place: Path) -> None:
    """Remove folders of servers that have been killed, and their shared memory."""
    for path in place.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), path.open() as lock:  # another user's, or just removed
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            _remove(path.parent)


def _remove(folder: Path) -> None:
    free_shared_memory(folder)
    shutil.rmtree(folder, ignore_errors=True)

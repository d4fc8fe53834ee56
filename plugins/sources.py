"""The sources of kernels: where they are, and which of them an engine directory's compiled kernels were made from.

Python takes the structs of kernels' arguments from the sources (kernels/structs.py), so compiled kernels fit the sources that
they were made from and no others: with other structs they would read and write anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import kvseek.kernels
import kvseek.plugins
from kvseek.core.errors import EngineDirectoryError

SOURCES_FILE = "kernels/sources.sha256"  # inside an engine directory
PATTERNS = ("*.h", "*.cpp", "*.cuh", "*.cu")


def package_roots() -> list[Path]:
    """Return the folders of this installation that hold kernels/ and plugins/; the kernels' includes are relative to them."""
    return sorted({Path(path).parent for package in (kvseek.kernels, kvseek.plugins) for path in package.__path__})


def sources(pattern: str) -> list[Path]:
    """List the files of the packages kernels and plugins that match `pattern`, in a fixed order."""
    folders = [root / name for root in package_roots() for name in ("kernels", "plugins")]
    return sorted(path for folder in folders for path in folder.rglob(pattern))


def files_digest(files: Iterable[Path], *others: object) -> str:
    """Return the SHA-256, in hexadecimal, of files, with the names of their folders, and of what else counts, by its `repr`."""
    digest = hashlib.sha256(repr(others).encode())
    for path in files:
        digest.update(f"{path.parent.name}/{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def sources_digest() -> str:
    """Return the digest of all sources of kernels."""
    return files_digest(path for pattern in PATTERNS for path in sources(pattern))


def write_sources_digest(directory: Path) -> None:
    """State in an engine directory that its kernels were compiled from the sources of this installation."""
    (directory / SOURCES_FILE).write_text(f"{sources_digest()}\n", encoding="utf-8")


def check_sources(directory: Path) -> None:
    """Raise EngineDirectoryError unless an engine directory's kernels were compiled from the sources of this installation."""
    path = directory / SOURCES_FILE
    found = path.read_text(encoding="utf-8").strip() if path.is_file() else "missing"
    if found != (own := sources_digest()):
        raise EngineDirectoryError(
            f"{path}: {found}: must be {own}, as compiled kernels run only with the sources that they were compiled from; "
            "build the engine again with this version of kvseek"
        )

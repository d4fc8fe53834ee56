"""The manifest of an engine directory: every other file with its size and SHA-256, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .config import check_format
from .errors import ConfigError, EngineDirectoryError, from_dict

MANIFEST_FILE = "manifest.json"
CODEBOOKS_FILE = "codebooks.safetensors"
READ_BYTES = 4 << 20  # bytes that are read and hashed at a time
HASH_THREADS = 4  # hashing and reading release the interpreter lock; more threads only contend for the disk


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 in hexadecimal of a file, as the builder wrote it."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json.

    Attributes
    ----------
    kvseek_version : str
        Version of kvseek that built the engine.
    source_model : str
        Name of the checkpoint's folder or file.
    fingerprint : str
        Digest of everything that the build depended on (builder/fingerprint.py).
    files : dict of str to FileRecord
        Every file of the directory but the manifest, by its path inside the directory, with forward slashes.
    """

    kvseek_version: str
    source_model: str
    fingerprint: str
    files: dict[str, FileRecord]


def sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal; `progress` is called with the number of bytes just read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
            if progress is not None:
                progress(len(part))
    return digest.hexdigest()


def write_manifest(directory: Path, source_model: str, fingerprint: str) -> None:
    """Record size and SHA-256 of every file below `directory` in its manifest.json."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = list(pool.map(sha256, paths))
    files = {
        path.relative_to(directory).as_posix(): FileRecord(path.stat().st_size, digest)
        for path, digest in zip(paths, digests, strict=True)
    }
    manifest = Manifest(version("kvseek"), source_model, fingerprint, files)
    text = json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"
    (directory / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Read manifest.json of an engine directory; raises EngineDirectoryError if it is missing or malformed."""
    path = directory / MANIFEST_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        manifest = from_dict(Manifest, document, MANIFEST_FILE)
        records: dict[str, Any] = dict(manifest.files)  # from_dict leaves the values of a dictionary as JSON
        files = {name: from_dict(FileRecord, record, name) for name, record in records.items()}
    except (FileNotFoundError, NotADirectoryError):
        raise EngineDirectoryError(f"{path} is missing: {directory} is no engine directory; run kvseek build") from None
    except (json.JSONDecodeError, UnicodeDecodeError, ConfigError, TypeError) as error:
        raise EngineDirectoryError(f"{path} is corrupt ({error}); build the engine again") from None
    return Manifest(manifest.kvseek_version, manifest.source_model, manifest.fingerprint, files)


@dataclass(frozen=True)
class Fault:
    """A file that is not what the builder wrote; `kind` is "missing", "damaged" or "foreign"."""

    name: str
    kind: str
    detail: str = ""


def find_faults(
    directory: Path, files: Mapping[str, FileRecord], progress: Callable[[int], None] = lambda amount: None
) -> Iterator[Fault]:
    """Yield the faults of a manifest's files; the cheap checks of all files come before the first digest.

    `progress` is called with the bytes just checked.
    """
    whole = []
    for name, record in files.items():
        path = directory / name
        if not path.is_file():
            yield Fault(name, "missing")
        elif (size := path.stat().st_size) != record.size:
            yield Fault(name, "damaged", f"expected {record.size:,} bytes, found {size:,}")
        else:
            whole.append(name)
            continue
        progress(record.size)
    check = functools.partial(_digest_fault, directory, files, progress)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        for name, fault in zip(whole, pool.map(check, whole), strict=True):
            if fault:
                yield Fault(name, "damaged", fault)


def _digest_fault(directory: Path, files: Mapping[str, FileRecord], progress: Callable[[int], None], name: str) -> str:
    try:
        found = sha256(directory / name, progress)
    except OSError as error:
        return f"cannot be read ({error})"
    return "" if found == files[name].sha256 else f"expected SHA-256 {files[name].sha256}, found {found}"


def verify(directory: Path) -> None:
    """Compare every file of an engine directory with its manifest.

    Raises
    ------
    EngineDirectoryError
        If the engine is of another format version, or a file is missing or differs in size or SHA-256. The message names
        the first such file, with the expected and the found value.
    """
    check_format(directory)
    for fault in find_faults(directory, read_manifest(directory).files):
        path = directory / fault.name
        if fault.kind == "missing":
            raise EngineDirectoryError(f"{path} is missing; build the engine again, or copy all of its files")
        remedy = "build the engine again, or copy it again from where it was built"
        raise EngineDirectoryError(f"{path} is corrupt: {fault.detail}; {remedy}")

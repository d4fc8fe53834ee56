"""`kvseek build --verify`: every file of an engine directory against its manifest, and what does not belong there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvseek.builder.printing import Advance
from kvseek.core.config_file import check_format
from kvseek.core.manifest import HASH_THREADS, MANIFEST_FILE, FileRecord, Manifest, read_manifest, sha256
from kvseek.core.sizes import readable


@dataclass(frozen=True)
class Fault:
    """A file that is not what the builder wrote; `kind` is "missing", "damaged" or "foreign"."""

    name: str
    kind: str
    detail: str = ""


def print_faults(directory: Path, console: Console) -> int:
    """Check a directory with a progress bar, list its faults; returns 0 if there are none, else 1.

    Raises
    ------
    EngineDirectoryError
        The engine is of another format version, or the manifest itself is missing or malformed.
    """
    check_format(directory)
    manifest = read_manifest(directory)
    total = sum(record.size for record in manifest.files.values())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    bar = Console(stderr=True)
    with Progress(*columns, console=bar, transient=True, disable=not bar.is_terminal) as progress:
        task = progress.add_task("check files", total=total)
        faults = find_faults(directory, manifest, lambda amount: progress.advance(task, amount))
    for fault in faults:
        console.print(f"{fault.kind:8} {fault.name}{fault.detail}", soft_wrap=True)
    if not faults:
        console.print(f"{directory}: {len(manifest.files)} files, {readable(total)}, as kvseek build wrote them")
        return 0
    remedy = "build the engine again, or copy it again from where it was built, and delete what is foreign"
    console.print(
        f"{directory}: {len(faults)} of its files are not as kvseek build wrote them; {remedy}", soft_wrap=True
    )
    return 1


def find_faults(directory: Path, manifest: Manifest, advance: Advance) -> list[Fault]:
    """Find all faults, those of the manifest's files first, then foreign files; `advance` gets the bytes just checked."""
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        checked = pool.map(lambda name: _check(directory, name, manifest.files[name], advance), manifest.files)
        faults = [fault for fault in checked if fault is not None]
    present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
    foreign = sorted(present - set(manifest.files) - {MANIFEST_FILE})
    return faults + [Fault(name, "foreign") for name in foreign]


def _check(directory: Path, name: str, record: FileRecord, advance: Advance) -> Fault | None:
    path = directory / name
    try:
        if not path.is_file():
            advance(record.size)
            return Fault(name, "missing")
        if (size := path.stat().st_size) != record.size:
            advance(record.size)
            return Fault(name, "damaged", f": expected {record.size:,} bytes, found {size:,}")
        digest = sha256(path, advance)
    except OSError as error:
        return Fault(name, "damaged", f": cannot be read ({error})")
    if digest != record.sha256:
        return Fault(name, "damaged", f": expected SHA-256 {record.sha256}, found {digest}")
    return None

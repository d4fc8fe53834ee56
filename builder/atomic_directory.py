"""The directory that an engine is built in: it lies beside the output directory and takes its place at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvseek.core.command_line import readable
from kvseek.core.errors import ConfigError
from kvseek.core.manifest import MANIFEST_FILE

PARTIAL, REPLACED = "partial", "replaced"
NO_ROOM = {  # errors of a file that cannot grow, and what helps
    errno.ENOSPC: "free space there, or name a directory on another disk",
    errno.EDQUOT: "free space within the quota, or name a directory on another disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or name a directory on another disk",
}


def refuse_foreign(output_dir: Path) -> None:
    """Raise ConfigError if `output_dir` holds something that the builder did not write."""
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"output_dir = {str(output_dir)!r}: is a file; name a directory")
    if output_dir.is_dir() and any(output_dir.iterdir()) and not (output_dir / MANIFEST_FILE).is_file():
        remedy = "name another directory, or empty it"
        raise ConfigError(f"output_dir = {str(output_dir)!r}: holds files but no engine; {remedy}")


def remove_leftovers(output_dir: Path) -> None:
    """Remove the directories that killed builds of `output_dir` left, and put back an engine that such a build moved away.

    Directories of other processes that are alive are not touched. In containers builds often have the same process id, so a
    directory with our own process id was left by an earlier build.
    """
    if not output_dir.parent.is_dir():
        return
    named = re.compile(rf"\.{re.escape(output_dir.name)}\.(\d+)\.({PARTIAL}|{REPLACED})")
    for path in sorted(output_dir.parent.iterdir()):
        match = named.fullmatch(path.name)
        if match is None or _is_alive(int(match[1])):
            continue
        if match[2] == REPLACED and not output_dir.exists():
            path.rename(output_dir)  # the build was killed between its two renames: this is the engine that it replaced
        else:
            shutil.rmtree(path)


def _is_alive(process_id: int) -> bool:
    if process_id == os.getpid():
        return False
    try:
        os.kill(process_id, 0)  # signal 0 only tests whether the process exists
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process; no process has this number
        return True
    return True


@contextlib.contextmanager
def atomic_directory(output_dir: Path) -> Iterator[Path]:
    """Make a directory beside `output_dir` to build in. It takes that one's place at the end; it is removed if the body raises.

    Remove the leftovers of killed builds first.

    Raises
    ------
    ConfigError
        Instead of an error of the body that says that a file cannot grow; the message names the file.
    """
    partial, replaced = (
        output_dir.with_name(f".{output_dir.name}.{os.getpid()}.{kind}") for kind in (PARTIAL, REPLACED)
    )
    with _parents(output_dir):
        partial.mkdir()
        try:
            try:
                yield partial
            except Exception as error:
                _raise_if_full(error, partial, output_dir)
                raise
            if output_dir.exists():
                output_dir.rename(replaced)
            partial.rename(output_dir)
        finally:
            if replaced.exists() and not output_dir.exists():  # the second rename failed, or a signal came before it
                replaced.rename(output_dir)
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)


def _raise_if_full(error: Exception, partial: Path, output_dir: Path) -> None:
    """Raise ConfigError if `error` says that a file cannot grow.

    An error of a write to an open file has no file name; the file is the one below `partial` that was written last.
    """
    number = _error_number(error)
    files = [path for path in partial.rglob("*") if path.is_file()]
    if number not in NO_ROOM or not files:
        return
    last = max(files, key=lambda path: path.stat().st_mtime_ns).relative_to(partial)
    size = readable(sum(path.stat().st_size for path in files))
    raise ConfigError(
        f"output_dir = {str(output_dir)!r}: {os.strerror(number)} while {last} was written, after {size} in all; "
        f"{NO_ROOM[number]}. Nothing of the build is left"
    ) from None


def _error_number(error: Exception) -> int:
    """Return the system's number of an error, 0 without any. Libraries in Rust, as tokenizers, put it into the message."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else (error.errno or 0) if isinstance(error, OSError) else 0


@contextlib.contextmanager
def _parents(output_dir: Path) -> Iterator[None]:
    """Create the folders above `output_dir`; if the body raises, the folders that did not exist before are removed."""
    created = [path for path in output_dir.parents if not path.exists()]  # the deepest first
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # a folder into which another process has put something stays
            for path in created:
                path.rmdir()
        raise

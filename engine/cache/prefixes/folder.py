"""The folder of an engine's prefixes on disk: which nodes it has, which of them a prompt begins with, and which go first.

There is a folder for each engine below the directory that a user names, so that several may share that. A process that uses
a folder has locked it. What is in it is found out when it is opened, from the files alone; when each was last used is its
time of modification. Any thread may call any method; none but `open_folder` and those that say so touches a file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvseek.core.errors import ConfigError
from kvseek.core.private_files import PrivateFileError, open_private_folder

from .file import DamagedFileError, Entry, ForeignFileError, Origin, RowShape, file_name, read_entry
from .tree import TOKEN_BYTES, chained_key, common_tokens, root_key, span_bytes

DEFAULT_DISK_BYTES = 16 << 30
LOCK_SECONDS = 1.0  # `kvseek cache` has a folder locked for less
NEW_FILES = ".*.new"  # what a process that was killed had not finished

logger = logging.getLogger(__name__)


class BusyFolderError(ConfigError):
    """Another process uses the folder."""


@dataclass(frozen=True)
class Match:
    """A file that a prompt goes on with, and the number of the prompt's first tokens up to the last that both have."""

    entry: Entry
    stop: int


def lock(folder: Path, seconds: float = 0.0, make: bool = False) -> int:
    """Lock a folder, for which others have so many seconds to leave it, and which is made first if `make` says so.

    Returns the file descriptor whose end ends the lock. Raises BusyFolderError, PrivateFileError, OSError.
    """
    descriptor, deadline = open_private_folder(folder, make), time.monotonic() + seconds
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BusyFolderError(
                        f"{folder} is in use by another process; stop that, or name another directory"
                    ) from None
                time.sleep(0.05)
    except BaseException:
        os.close(descriptor)
        raise


def scan(folder: Path) -> Iterator[tuple[Path, Entry | Exception]]:
    """Read the entries of a folder's files, last used first; in the place of an entry why a file has none."""
    times = list[tuple[int, Path]]()
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a process that uses the folder has just removed it
            times.append((path.lstat().st_mtime_ns, path))
    for _, path in sorted(times, reverse=True):
        try:
            yield path, read_entry(path)
        except FileNotFoundError:
            continue
        except (ForeignFileError, DamagedFileError, OSError) as error:
            yield path, error


class PrefixFolder:
    """The files of one engine, within a bound of bytes; made by `open_folder`.

    A file is removed only when no other one goes on behind it, so of two sequences that begin alike the common part goes last.

    Attributes
    ----------
    bytes : int
        Of all files.
    damaged : int
        Files that were removed because they were not what had been written.
    removed : int
        Files that made room for others.
    """

    def __init__(self, path: Path, most_bytes: int, origin: Origin, shape: RowShape, descriptor: int) -> None:
        self.path, self.origin, self.shape = path, origin, shape
        self.bytes = self.damaged = self.removed = 0
        self._most, self._descriptor = most_bytes, descriptor
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first
        self._behind: dict[bytes, set[bytes]] = {}  # keys of the nodes behind a key that have files
        self._touched: dict[bytes, int] = {}  # times of use that the files do not have yet
        self._foreign: set[str] = set()  # names that are taken

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, salt: str | None, tokens: bytes, skip: int) -> list[Match]:
        """Find the files that `tokens` go on with behind their first `skip` whole extents, the last perhaps in part."""
        before, found, position, depth = root_key(salt), list[Match](), 0, 0
        with self._lock:
            while position < len(tokens):
                span = tokens[position : position + self._span_bytes(depth)]
                key, whole = chained_key(before, span), len(span) == self._span_bytes(depth)
                position += len(span)
                if depth < skip:
                    if not whole:
                        break
                elif whole and key in self._entries:
                    found.append(Match(self._entries[key], position // TOKEN_BYTES))
                else:
                    found += self._best(before, span, position - len(span))
                    break
                before, depth = key, depth + 1
        return found

    def has(self, key: bytes) -> bool:
        """Whether a node has a file."""
        return key in self._entries

    def covers(self, key: bytes, before: bytes, tokens: bytes) -> bytes | None:
        """Return the key of a node's own file, or of one behind the same node that begins like it; None: there is none."""
        with self._lock:
            if key in self._entries:
                return key
            return next(
                (other for other in self._behind.get(before, ()) if self._tokens(other).startswith(tokens)), None
            )

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that the first nodes of a sequence, given in order, are used now; those without files are left out."""
        now = time.time_ns()
        with self._lock:
            for number, key in enumerate(reversed(keys)):
                if key in self._entries:
                    self._entries.move_to_end(key)
                    self._touched[key] = now + number

    def save_times(self) -> None:
        """Write the times of use into the files."""
        with self._lock:
            touched, self._touched = self._touched, {}
        for key, when in touched.items():
            with contextlib.suppress(OSError):  # then the order is not quite right after a restart
                os.utime(self.path / file_name(key), ns=(when, when), follow_symlinks=False)

    def make_room(self, size: int, before: bytes) -> bool:
        """Remove files until `size` bytes fit, but none of those that the node `before` follows; whether they fit."""
        with self._lock:
            line, key = set[bytes](), before
            while key in self._entries:
                line.add(key)
                key = self._entries[key].before
        while self.bytes + size > self._most:
            # A node counts as used after those that follow it, so the first file is nearly always one that nothing follows.
            with self._lock:
                ends = (one for key, one in self._entries.items() if key not in self._behind and key not in line)
                oldest = next(ends, None)
            if oldest is None:
                return False
            self.remove(oldest)
            self.removed += 1
        return True

    def add(self, entry: Entry) -> None:
        """Take in a file that was written, and remove shorter ones that it makes superfluous."""
        with self._lock:
            self._insert(entry)
            self._touched[entry.key] = time.time_ns()  # the system's own time of a file is some milliseconds coarse
            siblings = [self._entries[key] for key in self._behind[entry.before] if key != entry.key]
        for other in siblings:
            if entry.tokens.startswith(other.tokens):
                self.remove(other)

    def remove(self, entry: Entry) -> None:
        """Forget a file, and remove it if it is there."""
        if self.forget(entry):
            try:
                entry.path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot remove %s: %s", entry.path, error)

    def erase(self, keys: Sequence[bytes], continued: bool) -> None:
        """Remove the files of nodes: with all that continue them if `continued`, else but for those that others continue.

        Keys of nodes that continue another one are given before its own.
        """
        with self._lock:
            line, known = [*reversed(keys)], set(keys)
            for key in line if continued else ():  # the line grows meanwhile
                behind = self._behind.get(key, set()) - known
                line += behind
                known |= behind
        for key in reversed(line):
            with self._lock:
                entry = self._entries.get(key) if continued or key not in self._behind else None
            if entry is not None:
                self.remove(entry)

    def forget(self, entry: Entry) -> bool:
        """Look for a file no longer; whether it was known."""
        with self._lock:
            if self._entries.pop(entry.key, None) is None:
                return False
            self.bytes -= entry.size
            self._touched.pop(entry.key, None)
            self._behind[entry.before].discard(entry.key)
            if not self._behind[entry.before]:
                del self._behind[entry.before]
            return True

    def refuse(self, entry: Entry, error: Exception) -> None:
        """Forget a file that is damaged, and remove it."""
        logger.warning("%s; it is removed, and prompts that begin with it are read", error)
        self.damaged += 1
        self.remove(entry)

    def is_foreign(self, key: bytes) -> bool:
        """Whether a file of somebody else has the name that a node's would have."""
        return file_name(key) in self._foreign

    def close(self) -> None:
        """Let other processes use the folder."""
        os.close(self._descriptor)

    def _load(self) -> None:
        """Find out what there is; remove what is damaged and leave what is not this engine's."""
        for path in self.path.glob(NEW_FILES):
            path.unlink(missing_ok=True)
        for path, found in scan(self.path):
            if isinstance(found, Entry):
                found = self._fault(found) or found
            if isinstance(found, Entry):
                self._insert(found)
                self._entries.move_to_end(found.key, last=False)
            elif isinstance(found, DamagedFileError):
                logger.warning("%s; it is removed", found)
                self.damaged += 1
                path.unlink(missing_ok=True)
            else:
                logger.warning("%s; it is left alone", found)
                self._foreign.add(path.name)
        self.make_room(0, b"")

    def _fault(self, entry: Entry) -> Exception | None:
        if entry.origin.engine != self.origin.engine:
            return ForeignFileError(f"{entry.path} belongs to another engine, {entry.origin.engine}")
        expected = self.shape.data_bytes(entry.token_count, entry.first)
        whole = self._span_bytes(not entry.first)
        if entry.size - entry.data_start != expected or not 0 < len(entry.tokens) <= whole:
            return DamagedFileError(
                f"{entry.path} is damaged: {entry.token_count} tokens have {expected} bytes of tensors"
            )
        return None

    def _insert(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._behind.setdefault(entry.before, set()).add(entry.key)
        self.bytes += entry.size

    def _best(self, before: bytes, span: bytes, position: int) -> list[Match]:
        """Find the file behind a key that has the longest beginning with `span` in common; of several the shortest."""
        siblings = self._behind.get(before, ())
        common = {key: common_tokens(self._tokens(key), span) for key in siblings}
        best = max(siblings, key=lambda key: (common[key], -len(self._tokens(key)), key), default=None)
        return [Match(self._entries[best], position // TOKEN_BYTES + common[best])] if best and common[best] else []

    def _tokens(self, key: bytes) -> bytes:
        return self._entries[key].tokens

    def _span_bytes(self, depth: int) -> int:
        return span_bytes(self.shape.sink, depth)


def check_directory(directory: Path, most_bytes: int, shape: RowShape) -> None:
    """Make the directory of `open_folder` if it is not there; raises ConfigError if files of that shape cannot be kept there."""
    if most_bytes < shape.most_file_bytes:
        raise ConfigError(
            f"disk_bytes = {most_bytes}: must be at least {shape.most_file_bytes}, the rows of one extent; raise it"
        )
    try:
        os.close(open_private_folder(directory, own=False))
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written to")
    except PrivateFileError as error:
        raise ConfigError(f"disk_dir = {str(directory)!r}: {error}") from None
    except OSError as error:
        raise _unusable(directory, error) from None


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"disk_dir = {str(directory)!r}: cannot be used ({error.strerror}); name a directory that this user may write to, or "
        "leave it out"
    )


def open_folder(directory: Path, most_bytes: int, origin: Origin, shape: RowShape) -> PrefixFolder:
    """Open the folder of an engine below `directory`, made if it is not there, and lock it.

    Raises
    ------
    ConfigError
        As `check_directory`, or if another process uses the engine's folder.
    """
    check_directory(directory, most_bytes, shape)
    path = directory / origin.engine
    try:
        descriptor = lock(path, LOCK_SECONDS, make=True)
        folder = PrefixFolder(path, most_bytes, origin, shape, descriptor)
        try:
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it cannot be written to")
            folder._load()
        except BaseException:
            folder.close()
            raise
    except BusyFolderError as error:
        raise BusyFolderError(f"disk_dir = {str(directory)!r}: {error}") from None
    except PrivateFileError as error:
        raise ConfigError(f"disk_dir = {str(directory)!r}: {error}") from None
    except OSError as error:
        raise _unusable(directory, error) from None
    return folder

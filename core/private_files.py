"""Files and folders that nobody but this user may read or change: keys, and what clients have written.

A server may run as root, and a folder that it is told to use may lie where others can write. So no symbolic link is followed
there, and what another user owns or may replace is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from .errors import KvseekError

LEAST_KEY_CHARACTERS = 16  # of any key: what `openssl rand -hex 16` draws has 32
FOLDER_MODE = 0o700


class PrivateFileError(KvseekError):
    """Others may read a file, or change a folder, that is to be this user's alone."""


def read_key_file(path: Path) -> str:
    """Read a text file of keys, which may be a symbolic link, as in Kubernetes' volumes of secrets.

    Raises PrivateFileError, whose message has nothing of the file, if it cannot be read, or others than its owner may read or
    change it. The group of a file of root's may read it: so a server that is not root's gets its secrets in containers.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise PrivateFileError("is no file; give a text file of keys")
            if found.st_uid not in (0, os.geteuid()):
                raise PrivateFileError(f"belongs to user {found.st_uid}: must be this user's or root's; chown it")
            allowed = 0o640 if found.st_uid == 0 else 0o600
            if mode := stat.S_IMODE(found.st_mode) & 0o077 & ~allowed:
                raise PrivateFileError(
                    f"has the mode {stat.S_IMODE(found.st_mode):04o}, so others may {'read' if mode & 0o044 else 'change'} it: "
                    "must be 0600; chmod 600 it"
                )
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise PrivateFileError(f"cannot be read ({reason}); give a text file of keys") from None


def open_private_folder(path: Path, make: bool = True, own: bool = True) -> int:
    """Open a folder of this user's that nobody else can enter, and return its file descriptor.

    Parameters
    ----------
    make : bool
        Whether to make the folder, and those above it, where they are missing.
    own : bool
        False: the folder may be root's, and others may enter it, as it is for private ones to be in.

    Raises
    ------
    PrivateFileError
        If a component of the path is a symbolic link, or another user could put something else in its place.
    OSError
    """
    path = Path(os.path.abspath(path))
    descriptor = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in [*reversed(path.parents), path][1:]:
            inner = _open_component(parent, descriptor, make)
            os.close(descriptor)
            descriptor = inner
            _check_component(parent, os.fstat(descriptor), last=own and parent == path)
        opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    if make and own:
        os.fchmod(opened, FOLDER_MODE)
    return opened


def open_own_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file with these flags, and return its descriptor.

    Raises PrivateFileError if it is a symbolic link or no file of this user's, OSError. What is written may go to a device of
    root's instead, such as /dev/null.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise PrivateFileError(f"{path} is a symbolic link; name the file that it leads to") from None
        raise
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return descriptor
    if stat.S_ISCHR(found.st_mode) and found.st_uid == 0 and flags != os.O_RDONLY:
        os.set_blocking(descriptor, True)
        return descriptor
    os.close(descriptor)
    raise PrivateFileError(
        f"{path} is no file, or belongs to user {found.st_uid}: must be a file of this user's; remove it"
    )


def _open_component(path: Path, parent: int, make: bool) -> int:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path.name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
        os.mkdir(path.name, FOLDER_MODE, dir_fd=parent)
        return os.open(path.name, flags, dir_fd=parent)
    except NotADirectoryError:
        if path.is_symlink():
            raise PrivateFileError(f"{path} is a symbolic link; name the folder that it leads to") from None
        raise


def _check_component(path: Path, found: os.stat_result, last: bool) -> None:
    own, mode = os.geteuid(), found.st_mode
    owners = (own,) if last else (0, own)
    if found.st_uid not in owners:
        whose = "this user's" if last else "this user's or root's"
        raise PrivateFileError(f"{path} belongs to user {found.st_uid}: must be {whose}; choose another place")
    by_group = mode & stat.S_IWGRP and found.st_gid not in (os.getegid(), *os.getgroups())
    if (by_group or mode & stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise PrivateFileError(
            f"{path} has the mode {stat.S_IMODE(mode):04o}, so other users may replace what is in it; chmod go-w it, or choose "
            "another place"
        )

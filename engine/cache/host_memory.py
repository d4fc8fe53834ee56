"""Finds how much host memory can be allocated now: as much as the system and the process's control groups leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Hierarchy:
    """A version of control groups: its mount point, and the files that state a group's limit and usage."""

    mount: str
    limit_file: str
    usage_file: str


VERSION_1 = Hierarchy("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
VERSION_2 = Hierarchy("sys/fs/cgroup", "memory.max", "memory.current")


def available_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that can be allocated now, in bytes.

    This is the smallest of MemAvailable and of the room that each of the process's control groups and of their ancestors has
    left below its limit.

    Parameters
    ----------
    root : Path
        Folder that holds proc and sys.
    """
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    system = int(fields["MemAvailable"].split()[0]) * 1024
    return min([system, *_left_by_groups(root)])


def _left_by_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each group with a limit has left; cached files do not count as used."""
    for group, hierarchy in _groups(root):
        if not (group / hierarchy.limit_file).is_file():
            continue  # the root of a hierarchy has no limit, and a container does not see the groups above its own
        limit = (group / hierarchy.limit_file).read_text(encoding="ascii").strip()
        if limit != "max":
            usage = int((group / hierarchy.usage_file).read_text(encoding="ascii"))
            yield max(0, int(limit) - usage + _file_cache(group / "memory.stat"))


def _groups(root: Path) -> Iterator[tuple[Path, Hierarchy]]:
    """Yield the folders of the process's memory groups and of their ancestors."""
    listing = root / "proc/self/cgroup"
    if not listing.is_file():
        return  # a kernel without control groups
    for line in listing.read_text(encoding="utf-8").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = VERSION_1 if controllers else VERSION_2
        path = PurePosixPath(name.lstrip("/"))
        for group in (path, *path.parents):
            yield root / hierarchy.mount / group, hierarchy


def _file_cache(statistics: Path) -> int:
    """Return the bytes of cached files that a group is charged with; the system drops them when memory is asked for.

    Version 1 counts a group without its descendants under the plain names, and with its descendants under total_<name>.
    """
    counts = dict(line.split() for line in statistics.read_text(encoding="ascii").splitlines())
    return sum(int(counts.get(f"total_{name}", counts[name])) for name in ("active_file", "inactive_file"))

"""Finds how many cores a process can keep busy, from its affinity mask and the limits of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")  # control groups of version 2; version 1 has a folder for each resource there
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Count the cores of the calling thread's affinity mask; fewer if a control group grants less processor time, at least 1.

    Threads that wait for work on more cores use up the group's time, and then all threads of the group stand still for the
    rest of the period. A fraction of a core is not counted.
    """
    cores = len(os.sched_getaffinity(0))
    for folder in _groups():
        cores = min(cores, _granted(folder, cores))
    return max(1, cores)


def _groups() -> list[Path]:
    """List the process's control group of version 2 and its parents, the outermost last, and a container's of version 1."""
    names = MEMBERSHIP.read_text(encoding="utf-8").splitlines() if MEMBERSHIP.is_file() else []
    inside = [name.split(":", 2)[2].strip("/") for name in names if name.startswith("0::")]
    groups = [GROUPS / name for name in inside if ".." not in Path(name).parts]
    around = [folder for group in groups for folder in group.parents if folder.is_relative_to(GROUPS)]
    return [*groups, *around, GROUPS, GROUPS / "cpu"]


def _granted(folder: Path, unlimited: int) -> int:
    """Return the whole cores that a control group grants; `unlimited` if it sets no limit."""
    if (folder / "cpu.max").is_file():
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    elif (folder / "cpu.cfs_quota_us").is_file():
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
    else:
        return unlimited
    limited = quota.strip() not in ("max", "-1")
    return int(quota) // int(period) if limited else unlimited

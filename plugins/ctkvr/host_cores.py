"""How many cores a process can keep busy: those it may run on, or what its control group pays for."""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")  # of version 2; version 1 has a folder for each resource there
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores of the calling thread's affinity mask, fewer if a control group grants less processor time; at least 1.

    Threads that wait for work on more cores than that use the group's time up, and then all its threads stand still for
    the rest of the period. A part of a core counts for nothing.
    """
    cores = len(os.sched_getaffinity(0))
    for folder in _groups():
        cores = min(cores, _granted(folder, cores))
    return max(1, cores)


def _groups() -> list[Path]:
    """The process's control group of version 2 and those around it, the outermost last, and version 1's of a container."""
    names = MEMBERSHIP.read_text(encoding="utf-8").splitlines() if MEMBERSHIP.is_file() else []
    inside = [name.split(":", 2)[2].strip("/") for name in names if name.startswith("0::")]
    groups = [GROUPS / name for name in inside if ".." not in Path(name).parts]
    around = [folder for group in groups for folder in group.parents if folder.is_relative_to(GROUPS)]
    return [*groups, *around, GROUPS, GROUPS / "cpu"]


def _granted(folder: Path, unlimited: int) -> int:
    """Whole cores that a control group grants; `unlimited` if it sets no limit."""
    if (folder / "cpu.max").is_file():
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    elif (folder / "cpu.cfs_quota_us").is_file():
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
    else:
        return unlimited
    limited = quota.strip() not in ("max", "-1")
    return int(quota) // int(period) if limited else unlimited

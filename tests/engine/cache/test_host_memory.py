"""Available host memory, from listings of systems and control groups that are written here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvseek.engine.cache.host_memory import available_bytes

SYSTEM = 8_000_000 * 1024
STATISTICS = "anon 5\nactive_file 40000\ninactive_file 10000\n"
FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
MOUNTS = {1: "sys/fs/cgroup/memory", 2: "sys/fs/cgroup"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A system with 8 GB available, whose process is in group /job/step of either version."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemFree: 5 kB\nMemAvailable: 8000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/other\n4:memory:/job/step\n0::/job/step\n")
    return tmp_path


def limit(root: Path, version: int, group: str, most: str, used: int, statistics: str = STATISTICS) -> None:
    folder = root / MOUNTS[version] / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(FILES[version], (most, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(statistics)


def test_no_limit(root: Path) -> None:
    assert available_bytes(root) == SYSTEM
    limit(root, 2, "job/step", "max", 700_000)
    limit(root, 1, "job/step", str(0x7FFFFFFFFFFFF000), 700_000)
    assert available_bytes(root) == SYSTEM
    (root / "proc/self/cgroup").unlink()
    limit(root, 2, "job/step", "1000000", 700_000)
    assert available_bytes(root) == SYSTEM, "a kernel without control groups"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", ["job/step", "job", ""])
def test_the_limit_of_a_group_or_of_one_above_it(root: Path, version: int, group: str) -> None:
    limit(root, version, group, "1000000", 700_000)
    assert available_bytes(root) == 1_000_000 - 700_000 + 50_000, "cached files can be dropped"
    limit(root, version, group, "1000000", 1_200_000)
    assert available_bytes(root) == 0


def test_the_tightest_group_counts(root: Path) -> None:
    limit(root, 2, "job/step", "9000000", 0)
    limit(root, 2, "job", "3000000", 0)
    limit(root, 2, "other", "1", 0)
    limit(root, 1, "other", "1", 0)  # a group of another controller
    assert available_bytes(root) == 3_050_000


def test_version_1_counts_descendants_apart(root: Path) -> None:
    statistics = "active_file 1\ninactive_file 2\ntotal_active_file 30000\ntotal_inactive_file 4000\n"
    limit(root, 1, "job", "1000000", 700_000, statistics)
    assert available_bytes(root) == 334_000


def test_this_machine() -> None:
    assert available_bytes() > 1 << 20

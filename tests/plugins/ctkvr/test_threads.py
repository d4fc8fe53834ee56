"""How many threads CTkvr's host steps may have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvseek.plugins.ctkvr import host_cores
from kvseek.plugins.ctkvr.host_cores import usable_cores


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty control group /outer/inner of a process that may run on 48 cores; its folder."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)))
    monkeypatch.setattr(host_cores, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_cores, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text("12:cpu:/other\n0::/outer/inner\n", encoding="ascii")
    inner = tmp_path / "cgroup" / "outer" / "inner"
    inner.mkdir(parents=True)
    return inner


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 48), ("1600000 100000", 16), ("50000 100000", 1), ("250000 100000", 2)]
)
def test_a_control_groups_quota_counts(group: Path, limit: str, cores: int) -> None:
    assert usable_cores() == 48
    for folder in (group, group.parent, group.parent.parent):  # its own, one around it, a container's
        (folder / "cpu.max").write_text(f"{limit}\n", encoding="ascii")
        assert usable_cores() == cores
        (folder / "cpu.max").unlink()


def test_the_narrowest_limit_counts(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (group / "cpu.max").write_text("900000 100000", encoding="ascii")
    (group.parent / "cpu.max").write_text("700000 100000", encoding="ascii")
    assert usable_cores() == 7
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert usable_cores() == 2


@pytest.mark.parametrize(("quota", "cores"), [(-1, 48), (350_000, 3)])
def test_control_groups_of_version_1(group: Path, quota: int, cores: int) -> None:
    host_cores.MEMBERSHIP.write_text("4:cpu,cpuacct:/docker/x\n", encoding="ascii")
    folder = host_cores.GROUPS / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n", encoding="ascii")
    (folder / "cpu.cfs_period_us").write_text("100000\n", encoding="ascii")
    assert usable_cores() == cores

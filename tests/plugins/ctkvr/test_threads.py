"""Threads of CTkvr's host steps: how many there are, that they take part, and steps without work."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.plugins.ctkvr.host_steps import Case
from tests.support.instruction_levels import limited

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.plugins.ctkvr import host_cores
from kvseek.plugins.ctkvr.host_cores import usable_cores
from kvseek.plugins.ctkvr.native import ERRORS, HostPool, host_step

WATCHING = 2e-3  # seconds that a thread may be busy around a step without taking part: 1 ms, and as much again


def busy_seconds(thread: str) -> float:
    """Processor time of a thread of this process."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def test_threads_of_a_pool_wake_up_and_take_part(library: CpuLibrary) -> None:
    case = Case([[2900, 2900]] * 16, 16, 256, torch.float32, top_k=1000, rho=2000)
    before = set(os.listdir("/proc/self/task"))
    with (
        closing(HostPool(library, 2, pinned=False)) as pool,
        limited(library, 0),
    ):  # the slowest instructions: a long step
        (worker,) = set(os.listdir("/proc/self/task")) - before
        shares = []
        for _ in range(40):  # others may need the cores
            time.sleep(0.005)  # it falls asleep
            start = busy_seconds(worker)
            assert case.run(library, pool.pointer) == 0
            time.sleep(0.003)
            shares.append(busy_seconds(worker) - start)
            if shares[-1] > 2 * WATCHING:
                return
    pytest.fail(f"a step on two threads, seconds that the pool's own was busy: {shares}")


@pytest.mark.parametrize("pooled", [False, True])
def test_an_empty_batch_is_no_error(library: CpuLibrary, pooled: bool) -> None:
    found: list[int] = []

    def call() -> None:  # in a thread that has run no step before
        case = Case([[30, 20]], 2, 64, torch.float32, 5, 8)
        with closing(HostPool(library, 2, pinned=False)) as pool:
            step = case.step(pool.pointer if pooled else 0)
            step.batch = 0
            host_step(library)(step)
        assert case.out.isnan().all(), "nothing is written"
        found.append(case.error.value)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert found == [0]


@pytest.mark.parametrize("threads", [0, 1025])
def test_what_cannot_be_names_the_remedy(library: CpuLibrary, threads: int) -> None:
    message = rf"host threads = {threads}: must be from 1 to 1024, .*Invalid argument.*execution to 'codes'"
    with pytest.raises(KernelError, match=message):
        HostPool(library, threads, pinned=False)
    assert all("; " in text for text in ERRORS.values()), "each says what to do"


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


def test_this_machine_has_cores() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))

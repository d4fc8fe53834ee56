"""NUMA nodes in a folder that looks like sysfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvseek.core.numa import bind, bound_meanwhile, cores_for, cores_of_node, node_of_gpu, parse_cores, share_of_cores


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two nodes of four cores with two threads each; three GPUs, of one of which the firmware says nothing."""
    for gpu, node in (("0000:3b:00.0", "0"), ("0000:d8:00.0", "1"), ("0000:5e:00.0", "-1")):
        folder = tmp_path / "bus/pci/devices" / gpu
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for number, cores in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    return tmp_path


def test_nodes_of_gpus(system: Path) -> None:
    assert [node_of_gpu(gpu, system) for gpu in ("0000:3B:00.0", "0000:d8:00.0")] == [0, 1]
    assert node_of_gpu("0000:5e:00.0", system) is None
    assert node_of_gpu("0000:ff:00.0", system) is None


def test_lists_of_cores(system: Path) -> None:
    assert parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cores("\n") == frozenset()
    assert cores_of_node(1, system) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cores_of_node(2, system) == frozenset()


def test_a_thread_gets_its_cores_back() -> None:
    before = os.sched_getaffinity(0)
    with bound_meanwhile():
        bind({min(before)})
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_shares_of_cores() -> None:
    cores = frozenset(range(16))
    shares = [share_of_cores(cores, 2, number) for number in range(2)]
    assert shares == [frozenset(range(0, 16, 2)), frozenset(range(1, 16, 2))]
    assert share_of_cores({5}, 2, 1) == {5}


def test_ranks_get_cores_near_their_gpus(system: Path) -> None:
    everything = frozenset(range(16))
    assert cores_for([0, 1], 1, everything, system) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cores_for([0, 0], 1, everything, system) == {1, 3, 9, 11}
    assert cores_for([0, 1, 0, 1], 2, everything, system) == {1, 3, 9, 11}
    assert cores_for([0, 1], 0, {2, 3, 4}, system) == {2, 3}  # of those that the process may use


@pytest.mark.parametrize("nodes", [[0, None], [0, 2]])
def test_without_nodes_ranks_divide_all_cores(nodes: list[int | None], system: Path) -> None:
    assert cores_for(nodes, 0, {0, 1, 2, 3}, system) == {0, 2}
    assert cores_for([0, 1], 0, {0, 1, 2, 3}, system) == {0, 2}, "no core of node 1 may be used"

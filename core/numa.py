"""Binds a process to the cores near its GPU, so that host memory that it touches first lies near the GPU too.

Linux allocates a page on the NUMA node of the core that first writes to it, unless a process asks for another policy
(numa(7)). Threads inherit the cores of the thread that starts them. So it is enough to bind the thread that loads an engine
before it starts others and before the row pool is allocated: the threads that touch pinned memory then run near the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Set
from contextlib import contextmanager
from pathlib import Path

SYSTEM = Path("/sys")


def node_of_gpu(bus_id: str, system: Path = SYSTEM) -> int | None:
    """Return the NUMA node of a PCI device such as "0000:3b:00.0"; None where the system knows none.

    Parameters
    ----------
    system : Path
        Where sysfs is mounted.
    """
    path = system / "bus/pci/devices" / bus_id.lower() / "numa_node"
    try:
        node = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware says nothing, or the machine has one node


def cores_of_node(node: int, system: Path = SYSTEM) -> frozenset[int]:
    """Return the cores of a NUMA node; none if the system does not list them."""
    path = system / f"devices/system/node/node{node}/cpulist"
    return parse_cores(path.read_text(encoding="ascii")) if path.is_file() else frozenset()


def parse_cores(text: str) -> frozenset[int]:
    """Parse a list of cores as the kernel writes it, such as "0-3,8,10-11"."""
    cores = set[int]()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def share_of_cores(cores: Set[int], sharers: int, number: int) -> frozenset[int]:
    """Return the cores of one of `sharers` processes; all cores if there are fewer of them than processes.

    Every n-th core: Linux often gives the second thread of core i of n the number i + n, so for an even number of cores both
    threads of one go to the same process.
    """
    if len(cores) < sharers:
        return frozenset(cores)
    return frozenset(sorted(cores)[number::sharers])


def cores_for(nodes: list[int | None], number: int, allowed: Set[int], system: Path = SYSTEM) -> frozenset[int]:
    """Choose the cores of one of a host's processes: its share of those near its GPU, else its share of all allowed ones.

    Parameters
    ----------
    nodes : list of int or None
        NUMA node of the GPU of each process of this host.
    number : int
        Which process this is.
    allowed : set of int
        Cores that the processes may use.
    """
    near = {node: cores_of_node(node, system) & allowed for node in nodes if node is not None}
    if any(node is None or not near[node] for node in nodes):
        return share_of_cores(allowed, len(nodes), number)
    node = nodes[number]
    assert node is not None, "every GPU has a node here"
    return share_of_cores(near[node], nodes.count(node), nodes[:number].count(node))


@contextmanager
def bound_meanwhile() -> Generator[None]:
    """Give the calling thread its cores back at the end; threads that it has started meanwhile keep those of `bind`."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        bind(before)


def bind(cores: Set[int]) -> None:
    """Let the calling thread, and those that it starts from now on, run on these cores alone."""
    os.sched_setaffinity(0, cores)

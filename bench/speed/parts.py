"""Parts of a decode step (engine/retrieval.py): how the tables of all benchmarks group them, and their times on the CPU."""

from __future__ import annotations

import time

from kvseek.bench.timing import Clock
from kvseek.engine.retrieval import Observer

GROUPS = {
    "GEMMs": ("qkv", "o", "gate_up", "down", "head"),
    "select": ("select",),
    "attend": ("attend",),
    "others": ("begin", "norm", "rope", "mlp_norm"),
}


def part_groups(parts: dict[str, float]) -> dict[str, float]:
    """Seconds of the groups that a table shows; a part of the step that no group names counts as others."""
    named = {part for group in GROUPS.values() for part in group}
    groups = {name: sum(parts.get(part, 0.0) for part in group) for name, group in GROUPS.items()}
    groups["others"] += sum(seconds for part, seconds in parts.items() if part not in named)
    return groups


class HostClock(Observer):
    """Time of the parts of a step on the CPU, where a part has run when an observer is told of it.

    Parameters
    ----------
    clock : callable
        Tells the time in seconds.

    Attributes
    ----------
    seconds : dict of float
        Of each part, summed over its occurrences since `restart`.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self.seconds: dict[str, float] = {}
        self._last = self._clock()

    def op_launched(self, name: str) -> None:
        """See Observer."""
        now = self._clock()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

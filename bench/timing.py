"""The one timer of all benchmarks: samples of contestants that take turns, in wall-clock time unless told otherwise."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Clock = Callable[[], float]
Timer = Callable[[Callable[[], object]], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "process": time.process_time}


@dataclass
class Samples:
    """Seconds of repeated calls."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median, which a few disturbed calls do not move."""
        return statistics.median(self.seconds)

    def summary(self) -> dict[str, float | int]:
        """Median, extremes and count, in seconds."""
        return {
            "median": self.median,
            "min": min(self.seconds),
            "max": max(self.seconds),
            "count": len(self.seconds),
        }


def turns(samples: Samples, block: int) -> Samples:
    """Means of a contestant's turns of `block` calls: what only some calls have to do counts with its share."""
    seconds = samples.seconds
    return Samples([statistics.mean(seconds[start : start + block]) for start in range(0, len(seconds), block)])


def measure(call: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Seconds that one call takes."""
    start = clock()
    call()
    return clock() - start


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    calls: int,
    block: int,
    warmup: int,
    clock: Clock = time.perf_counter,
    timer: Timer | None = None,
) -> dict[str, Samples]:
    """Time `calls` calls of each contestant, in turns of `block` calls, so that drift of the machine hits all alike.

    Parameters
    ----------
    warmup : int
        Calls of each contestant that go before and are not counted.
    timer : callable, optional
        Makes a call and returns its seconds, where the clock of the host is not what counts; the clock then stands idle.

    Returns
    -------
    dict
        Contestant → its samples, `calls` of them.
    """
    for call in contestants.values():
        for _ in range(warmup):
            call()
    timed = timer or (lambda call: measure(call, clock))
    samples = {name: Samples() for name in contestants}
    items = list(contestants.items())
    gc.collect()
    for start in range(0, calls, block):
        first = start // block % len(contestants)  # nobody always runs after the same neighbour started cold
        for name, call in (*items[first:], *items[:first]):
            for _ in range(min(block, calls - start)):
                samples[name].seconds.append(timed(call))
    return samples

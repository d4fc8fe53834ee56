"""What a server holds, before and after the soak test: extents, memory, descriptors, threads, shared memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.support.live_server import Footprint, LiveServer
from tests.support.metrics import metrics

QUIET_SECONDS = 60.0
SETTLE_SECONDS = 3.0  # for connections that close late, and threads that end late
TOLERANCE = 0.02
SPARE_BYTES = 4 << 20  # an allocator's steps
SPARE_COUNT = 6  # descriptors and threads of connections that are kept open, gRPC's own among them
PROCESSES = ("serve", "engine", "doors", "triton", "tensorrt_llm", "tensorrt_llm_bls")


@dataclass(frozen=True)
class State:
    """A server that has nothing to do: each process by its name, and what they share."""

    process_ids: dict[str, int]
    processes: dict[str, Footprint]
    shared_regions: int
    shared_bytes: int
    extents: dict[str, float]


def quiet_state(server: LiveServer) -> State:
    """Wait until no request waits or runs, then measure; raises AssertionError if that does not come."""
    deadline = time.monotonic() + QUIET_SECONDS
    while server.metric("kvseek:num_requests_running") or server.metric("kvseek:num_requests_waiting"):
        assert time.monotonic() < deadline, f"requests still run or wait after {QUIET_SECONDS:g} s: some were lost"
        time.sleep(0.1)
    time.sleep(SETTLE_SECONDS)
    regions = server.shared_memory()
    return State(
        server.process_ids(),
        server.footprints(),
        len(regions),
        sum(regions.values()),
        _extents(server),
    )


def _extents(server: LiveServer) -> dict[str, float]:
    """What requests use of the cache, and what they do not use: free extents, and those that are kept for later prompts."""
    gauges = {name.partition("{")[0]: value for name, value in metrics(server.metrics_url).items()}
    unused = gauges["kvseek:extents_free"] + gauges["kvseek:extents_kept"]
    return {name: gauges[f"kvseek:{name}"] for name in ("kv_cache_usage_perc", "extents_used")} | {"unused": unused}


def warm(before: State, later: State) -> State:
    """`before`, but processes that were started again since then as `later` saw them."""
    processes = {
        name: own if before.process_ids.get(name) == later.process_ids[name] else later.processes[name]
        for name, own in {**later.processes, **before.processes}.items()
        if name in later.processes
    }
    return State(later.process_ids, processes, before.shared_regions, before.shared_bytes, before.extents)


def grown(before: State, after: State) -> list[str]:
    """What has not come back to where it was, in words; empty if all has."""
    found = []
    total = sum(own.resident for own in before.processes.values())
    now = sum(own.resident for own in after.processes.values())
    if now > total * (1 + TOLERANCE) + SPARE_BYTES:
        found.append(f"resident memory {total / 1e6:.1f} → {now / 1e6:.1f} MB, {now / total - 1:+.1%}")
    for name, own in after.processes.items():
        start = before.processes.get(name, own)
        for kind in ("descriptors", "threads"):
            then, count = getattr(start, kind), getattr(own, kind)
            if count > then + SPARE_COUNT:
                found.append(f"{name}: {kind} {then} → {count}")
    if after.shared_regions > before.shared_regions or after.shared_bytes > before.shared_bytes * 1.5:
        then = f"{before.shared_regions} regions of {before.shared_bytes} bytes"
        found.append(f"shared memory {then} → {after.shared_regions} of {after.shared_bytes}")
    if after.extents != before.extents:
        found.append(f"extents {before.extents} → {after.extents}")
    return found


def table(before: State, after: State) -> list[str]:
    """Lines that show both."""
    lines = [f"{'process':18}{'resident MB':>20}{'private MB':>20}{'descriptors':>14}{'threads':>12}"]
    for name in PROCESSES:
        then, now = before.processes.get(name), after.processes.get(name)
        if then is None or now is None:
            lines.append(f"{name:18} does not run")
            continue
        resident = f"{then.resident / 1e6:.1f} → {now.resident / 1e6:.1f}"
        private = f"{then.private / 1e6:.1f} → {now.private / 1e6:.1f}"
        descriptors, threads = f"{then.descriptors} → {now.descriptors}", f"{then.threads} → {now.threads}"
        lines.append(f"{name:18}{resident:>20}{private:>20}{descriptors:>14}{threads:>12}")
    total, later = (sum(own.resident for own in state.processes.values()) for state in (before, after))
    lines.append(f"{'all':18}{f'{total / 1e6:.1f} → {later / 1e6:.1f}':>20}  {later / total - 1:+.2%}")
    lines.append(f"shared memory: {before.shared_bytes} → {after.shared_bytes} bytes in {after.shared_regions} regions")
    return lines

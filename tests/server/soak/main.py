"""Soak test: many clients of every kind at once against a real `kvseek serve`, one of whose processes is paused and killed.

    python -m tests.server.soak.main --requests 1000 --clients 32 --kill engine --kills 3

Every request must end with the tokens that it gets alone, as cancelled by its client, refused as malformed, or, if it ran
when the process was killed, with an error that says so; such a request is sent again and must then be served. At the end the
server must hold what it held after the warm-up. Exit status 0 if all that is so.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.server.soak.engine import build_soak_engine
from tests.server.soak.jobs import Job, make_cases, make_jobs
from tests.server.soak.runner import Outcome, Runner
from tests.server.soak.state import grown, quiet_state, table, warm
from tests.support.live_server import LiveServer, live_server

QUEUE_SIZE = 16  # fewer than the clients: some meet a full queue and come again
KILLS = {"engine": "engine", "triton": "triton", "doors": "doors", "model": "tensorrt_llm_bls"}
PAUSE_SECONDS = 0.5  # of the engine, before a kill: too short for the supervisor to take it for hung
SHOWN = 20


def soak(
    server: LiveServer, jobs: Sequence[Job], clients: int, kill: str, kills: int, warm_up: int
) -> tuple[list[Outcome], list[str]]:
    """Run the test; returns the outcomes and what has not come back to where it was, and prints the table."""
    runner, kills = Runner(server.urls), 0 if kill == "none" else kills
    outcomes = runner.run(jobs[:warm_up], clients)
    start = quiet_state(server)
    size = -(-(len(jobs) - warm_up) // (kills + 1))
    for first in range(warm_up, len(jobs), size):
        part = jobs[first : first + size]
        if first + size >= len(jobs):
            outcomes += runner.run(part, clients)
            break
        killer = threading.Thread(target=_kill, args=(server, runner, kill, runner.done + len(part) // 3))
        killer.start()
        outcomes += runner.run(part, clients)
        killer.join()
        if runner.kills.failure:
            return outcomes, [f"{kill} was not killed and started again: {runner.kills.failure}"]
        outcomes += runner.run(jobs[:warm_up], clients)  # what was started again warms up too
        start = warm(start, quiet_state(server))
    end = quiet_state(server)
    print("\n".join(table(start, end)))
    for at, ready in runner.kills.times:
        print(f"{kill} killed; ready again after {ready - at:.1f} s")
    return outcomes, [*_again(runner, outcomes), *grown(start, end), *_log_faults(server)]


def _kill(server: LiveServer, runner: Runner, kill: str, after: int) -> None:
    """Stop the engine for a moment, and kill one process once so many jobs are done; note when the server is ready again."""
    engine = server.kill("engine", signal.SIGSTOP)
    time.sleep(PAUSE_SECONDS)
    os.kill(engine, signal.SIGCONT)
    while runner.done < after:
        time.sleep(0.01)
    try:
        runner.kills.times.append(
            [time.monotonic(), 0.0]
        )  # before it: a request may hear of it before this thread goes on
        pid = server.kill(KILLS[kill])
        server.wait_replaced(KILLS[kill], pid)
        server.wait_ready()
        runner.kills.times[-1][1] = time.monotonic()
    except Exception as error:  # nobody would see it in this thread
        runner.kills.failure = f"{type(error).__name__}: {error}"


def _again(runner: Runner, outcomes: Sequence[Outcome]) -> list[str]:
    """Jobs that went wrong, and how they end when they are alone: what the batch does is told from what a request does."""
    wrong = [outcome for outcome in outcomes if outcome.verdict == "WRONG"]
    found = [f"{len(wrong)} requests ended wrongly"] if wrong else []
    for outcome in wrong[:SHOWN]:
        (alone,) = runner.run([outcome.job], 1)
        job = outcome.job
        found.append(f"job {job.number} ({job.fate}, {job.route}, {job.model}): {outcome.detail[:500]}")
        found.append(f"    sent again alone: {alone.verdict} {alone.detail[:200]}")
    return found


def _log_faults(server: LiveServer) -> list[str]:
    """Tracebacks in the server's log: a process that was killed excuses none in the others."""
    return [f"{count} tracebacks in {server.log}: {line}" for line, count in server.tracebacks().items()]


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """How many requests ended how."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    lines = [f"{count:6} {verdict}" for verdict, count in verdicts.most_common()]
    refusals, interruptions = (sum(getattr(o, name) for o in outcomes) for name in ("refusals", "interruptions"))
    slowest = max((outcome.seconds for outcome in outcomes), default=0.0)
    return [
        *lines,
        f"{refusals:6} attempts met a full queue, {interruptions} the kill; slowest request {slowest:.1f} s",
    ]


def run(
    engine_dir: Path,
    folder: Path,
    requests: int,
    clients: int,
    kill: str,
    kills: int,
    seed: int,
    distinct: int,
    queue_size: int = QUEUE_SIZE,
) -> tuple[list[Outcome], list[str]]:
    """Serve an engine directory and run the test; returns how requests ended, and what went wrong."""
    cases = make_cases(engine_dir, distinct, seed)
    warm_up = min(100, requests // 3)
    jobs = make_jobs(cases, requests, seed)
    began = time.monotonic()
    flags = ("--max_queue_size", f"{queue_size}", "--restarts", f"{kills + 1}", "--disk_dir", f"{folder / 'prefixes'}")
    with live_server(engine_dir, folder / "server.log", *flags) as server:
        outcomes, faults = soak(server, jobs, clients, kill, kills, warm_up)
        print("\n".join(summary(outcomes)), f"in {time.monotonic() - began:.0f} s")
        status = server.stop()
        return outcomes, faults if status == 0 else [*faults, f"kvseek serve ended with status {status}"]


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description="Soak test of a real server.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=32, help="requests on their way at a time")
    parser.add_argument("--engine_dir", type=Path, help="default: a tiny random one is built")
    parser.add_argument("--method", default="pariskv", help="of the engine that is built (default: %(default)s)")
    parser.add_argument("--kill", choices=("none", *KILLS), default="engine", help="process that is killed")
    parser.add_argument("--kills", type=int, default=1, help="how often (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--distinct", type=int, default=150, help="different requests (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="for the server's log (default: a temporary one)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kvseek-soak-") as temporary:
        folder = arguments.folder or Path(temporary)
        engine = arguments.engine_dir or build_soak_engine(Path(temporary), arguments.method)
        _, faults = run(
            *(engine, folder, arguments.requests, arguments.clients),
            *(arguments.kill, arguments.kills, arguments.seed, arguments.distinct),
        )
    print("\n".join(faults) or "all well")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

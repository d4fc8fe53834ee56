"""Soak test: many clients of every kind at once against a real `kvseek serve`, one of whose processes is killed.

    python -m tests.server.soak.main --requests 1000 --clients 32 --kill engine

Every request must end with the tokens that it gets alone, as cancelled by its client, refused as malformed, or, if it ran
when the process was killed, with an error that says so; such a request is sent again and must then be served. At the end the
server must hold what it held after the warm-up. Exit status 0 if all that is so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.server.soak.cases import is_rounding, make_cases
from tests.server.soak.engine import build_soak_engine
from tests.server.soak.jobs import Job, make_jobs
from tests.server.soak.runner import Outcome, Runner
from tests.server.soak.state import grown, quiet_state, table, warm
from tests.support.live_server import LiveServer, live_server

QUEUE_SIZE = 16  # fewer than the clients: some meet a full queue and come again
KILLS = {"engine": "engine", "triton": "triton", "doors": "doors", "model": "tensorrt_llm_bls"}
MOST_ROUNDED = 0.03  # of the served requests: what is_rounding excuses must stay rare
ROUNDED = "served, one number rounded otherwise"
SHOWN = 20


def soak(
    server: LiveServer, engine_dir: Path, jobs: Sequence[Job], clients: int, kill: str, warm_up: int
) -> tuple[list[Outcome], list[str]]:
    """Run the test; returns the outcomes and what has not come back to where it was, and prints the table."""
    runner = Runner(server.urls)
    outcomes = runner.run(jobs[:warm_up], clients)
    start = quiet_state(server)
    middle = warm_up + (len(jobs) - warm_up) // 2
    killer = threading.Thread(target=_kill, args=(server, runner, kill, warm_up + (middle - warm_up) // 3))
    if kill != "none":
        killer.start()
    outcomes += runner.run(jobs[warm_up:middle], clients)
    if kill != "none":
        killer.join()
        if not runner.kill.ready_at:
            return outcomes, [f"{kill} was not killed and started again: {runner.kill.failure}"]
        outcomes += runner.run(jobs[:warm_up], clients)  # what was started again warms up too
        start = warm(start, quiet_state(server))
    outcomes += runner.run(jobs[middle:], clients)
    end = quiet_state(server)
    print("\n".join(table(start, end)))
    if runner.kill.ready_at:
        print(f"{kill} killed; ready again after {runner.kill.ready_at - runner.kill.at:.1f} s")
    return outcomes, [*_again(runner, engine_dir, outcomes), *grown(start, end), *_log_faults(server)]


def _kill(server: LiveServer, runner: Runner, kill: str, after: int) -> None:
    """Kill one process once so many jobs are done, and note when the server is ready again, or why it is not."""
    while runner.done < after:
        time.sleep(0.01)
    try:
        runner.kill.at = time.monotonic()  # before it: a request may hear of it before this thread goes on
        pid = server.kill(KILLS[kill])
        server.wait_replaced(KILLS[kill], pid)
        server.wait_ready()
        runner.kill.ready_at = time.monotonic()
    except Exception as error:  # nobody would see it in this thread
        runner.kill.failure = f"{type(error).__name__}: {error}"


def _again(runner: Runner, engine_dir: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Jobs that went wrong, and how they end when they are alone: what the batch does is told from what a request does."""
    for outcome in outcomes:
        case = outcome.job.case
        if outcome.got and case is not None and is_rounding(engine_dir, case, outcome.got):
            outcome.verdict = ROUNDED
    wrong = [outcome for outcome in outcomes if outcome.verdict == "WRONG"]
    found = [f"{len(wrong)} requests ended wrongly"] if wrong else []
    rounded, served = (sum(outcome.verdict == verdict for outcome in outcomes) for verdict in (ROUNDED, "served"))
    if rounded > MOST_ROUNDED * (served + rounded):
        found.append(
            f"{rounded} of {served + rounded} served requests had a number rounded otherwise: too many for chance"
        )
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
    seed: int,
    distinct: int,
    queue_size: int = QUEUE_SIZE,
) -> tuple[list[Outcome], list[str]]:
    """Serve an engine directory and run the test; returns how requests ended, and what went wrong."""
    cases = make_cases(engine_dir, distinct, seed)
    warm_up = min(100, requests // 3)
    jobs = make_jobs(cases, requests, seed)
    began = time.monotonic()
    with live_server(engine_dir, folder / "server.log", "--max_queue_size", f"{queue_size}") as server:
        outcomes, faults = soak(server, engine_dir, jobs, clients, kill, warm_up)
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
    parser.add_argument("--kill", choices=("none", *KILLS), default="engine", help="process that is killed once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--distinct", type=int, default=150, help="different requests (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="for the server's log (default: a temporary one)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kvseek-soak-") as temporary:
        folder = arguments.folder or Path(temporary)
        engine = arguments.engine_dir or build_soak_engine(Path(temporary), arguments.method)
        _, faults = run(
            *(engine, folder, arguments.requests, arguments.clients),
            *(arguments.kill, arguments.seed, arguments.distinct),
        )
    print("\n".join(faults) or "all well")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

"""Random schedules of requests, cancellations, dropped connections and an engine process that is killed or stopped.

A real `kvseek serve` serves them. Each request ends once, with the tokens of an undisturbed engine or with an error that a kill
explains, and when all have ended nothing of them is left. As a command this tries other schedules each time:
python -m tests.server.test_random_faults --examples 60
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tests.server.soak.engine import build_soak_engine
from tests.server.soak.runner import ENDED
from tests.support.live_server import LiveServer, live_server
from tests.support.server_streams import Stream, tokens
from tests.support.waiting import wait_for

from kvseek.core.request import Request
from kvseek.engine.engine import Engine

pytestmark = [pytest.mark.server, pytest.mark.slow]

DOCUMENT = tuple((7 * i) % 380 for i in range(1400))
PROMPTS = [DOCUMENT + (own,) * 9 for own in (3, 4)] + [DOCUMENT[:1100] + (5,) * 40, tuple(range(5, 45)), (9, 8, 7)]
COUNTS = (1, 40, 1200)
MOST_RUNNING = 8
ROUTES = ("grpc", "http_stream", "http_generate")


@dataclass
class Asked:
    """A request on its way."""

    stream: Stream
    prompt: int
    count: int
    left: bool = False


class FaultMachine(RuleBasedStateMachine):
    """One server for all examples. Extents, requests and processes are counted at the end of each."""

    server: ClassVar[LiveServer]
    answers: ClassVar[list[list[int]]]  # of an undisturbed engine, by prompt
    ended: ClassVar[Counter[str]]  # requests of all examples, by how they ended

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self.kills: list[tuple[float, float]] = []  # from when until when errors are theirs
        self.server.wait_ready()

    @rule(
        route=st.sampled_from(ROUTES),
        prompt=st.integers(0, len(PROMPTS) - 1),
        count=st.sampled_from(COUNTS),
        wait=st.sampled_from([0.0, 0.0, 0.3]),
    )
    def submit(self, route: str, prompt: int, count: int, wait: float) -> None:
        # Not a precondition: hypothesis must be able to choose the same rules again, and this depends on the server's speed.
        wait_for(lambda: sum(not one.stream.ended_at for one in self.asked) < MOST_RUNNING, "few requests run")
        self.asked.append(Asked(tokens(self.server, route, PROMPTS[prompt], count), prompt, count))
        time.sleep(wait)

    @rule(
        route=st.sampled_from(ROUTES),
        prompt=st.integers(0, len(PROMPTS) - 1),
        wait=st.sampled_from([0.0, 0.1, 0.3]),
    )
    def drop(self, route: str, prompt: int, wait: float) -> None:
        """A client cancels (gRPC) or closes its connection (HTTP) while its request waits, is read or generates."""
        self.submit(route, prompt, max(COUNTS), wait)
        self.asked[-1].left = True
        self.asked[-1].stream.leave()
        self.ended["left"] += 1

    @precondition(lambda self: not self.kills)
    @rule(route=st.sampled_from(ROUTES), prompt=st.integers(0, len(PROMPTS) - 1), wait=st.sampled_from([0.1, 0.3, 0.5]))
    def kill(self, route: str, prompt: int, wait: float) -> None:
        """While at least one request waits, is read or generates."""
        self.submit(route, prompt, max(COUNTS), wait)
        began, pid = time.monotonic(), self.server.kill("engine")
        self.server.wait_replaced("engine", pid)
        self.server.wait_ready()
        self.kills.append((began, time.monotonic()))

    @rule(seconds=st.sampled_from([0.05, 0.5]))
    def pause(self, seconds: float) -> None:
        pid = self.server.kill("engine", signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def teardown(self) -> None:
        for one in self.asked:
            if not one.left:
                self.check(one, one.stream.join())
        server = self.server
        wait_for(lambda: not server.metric("kvseek:num_requests_running"), "no request runs")
        wait_for(lambda: not server.metric("kvseek:num_requests_waiting"), "no request waits")
        assert server.metric("kvseek:extents_used") == 0
        unused = server.metric("kvseek:extents_free") + server.metric("kvseek:extents_kept")
        assert unused == 12, "no extent is lost"
        assert server.metric("kvseek:unsound_requests_total") == 0

    def check(self, one: Asked, stream: Stream) -> None:
        expected, reasons = self.answers[one.prompt][: one.count], [piece.reason for piece in stream.pieces]
        assert not any(reasons[:-1]), "one end, and nothing after it"
        if stream.error:
            assert ENDED.search(stream.error), stream.error
            assert any(stream.began < stop and stream.ended_at > begin for begin, stop in self.kills), stream.error
            assert stream.ids == expected[: len(stream.ids)]
            self.ended["killed"] += 1
        else:
            assert (stream.ids, stream.reason) == (expected, "length")
            self.ended["served"] += 1


@contextmanager
def machine(folder: Path) -> Iterator[type[FaultMachine]]:
    directory = build_soak_engine(folder, "full", extents=12)
    engine = Engine.load(directory)
    answers = [engine.generate([Request(prompt, max(COUNTS))])[0] for prompt in PROMPTS]
    flags = ("--restarts", "1000", "--disk_dir", str(folder / "prefixes"))
    with live_server(directory, folder / "server.log", *flags) as server:
        served = {"server": server, "answers": answers, "ended": Counter()}
        yield type("ServedFaultMachine", (FaultMachine,), served)
        assert server.stop() == 0
        assert not server.tracebacks()


def run(folder: Path, examples: int, steps: int, derandomize: bool) -> Counter[str]:
    """Run schedules; returns how many requests ended in which way. A failure prints its schedule."""
    with machine(folder) as served:
        run_state_machine_as_test(
            served,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                derandomize=derandomize,
                database=None,
                deadline=None,
                phases=[Phase.generate],  # shrinking would run the failing schedule again and again
                suppress_health_check=list(HealthCheck),
            ),
        )
        return served.ended


def test_every_request_ends_once_whatever_happens(tmp_path: Path) -> None:
    ended = run(tmp_path, examples=3, steps=12, derandomize=True)
    assert set(ended) == {"served", "killed", "left"}, f"the schedules try nothing else: {ended}"


def main() -> None:
    """Run schedules that no run before has tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=60, help="schedules, a few seconds each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(run(Path(folder), options.examples, steps=30, derandomize=False))


if __name__ == "__main__":
    main()

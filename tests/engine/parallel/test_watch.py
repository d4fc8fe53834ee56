"""The thread that watches other ranks for rank 0, over reports of a test; and how the process of another rank ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from typing import Any

import pytest
from tests.support.waiting import SECONDS, wait_for

from kvseek.engine.parallel import reports, watch
from kvseek.engine.parallel.channel import Channel
from kvseek.engine.parallel.reports import Reporter, Reports
from kvseek.engine.parallel.watch import Watch

# A rank whose part takes longer to give back than GRACE_SECONDS: nobody is to wait for that.
SLOW_TO_END = """
import atexit, sys, time
from kvseek.engine.leading import follower
from kvseek.engine.parallel import watch

class Part:
    def __del__(self):
        time.sleep(60)

def serve(channel, load, up=None):
    part = Part()
    watch.end_with_rank_0(channel)
    channel.send(follower.READY)
    channel.receive()
    raise RuntimeError("it cannot do what rank 0 says")

watch.GRACE_SECONDS = 0.5
atexit.register(time.sleep, 60)
follower.serve = serve
follower.decode = lambda message: follower.Load("", None, 1, "", 0, 1, 1.0, 1.0)
follower.main(sys.argv[1:])
"""

# Rank 0, in whose GPU's driver both the call and what would release it wait. Its argument says what it does once rank 1 fails.
STUCK = """
import sys, threading, time
from multiprocessing import Pipe
from kvseek.engine.parallel import watch
from kvseek.engine.parallel.channel import Channel

own, theirs = Pipe()
stuck = threading.Event()
reports = type("Reports", (), {"look": lambda self: None, "loading_fault": lambda self: ""})()
watch.PERIOD_SECONDS, watch.RELEASED_SECONDS = 0.01, 0.5
one = watch.Watch({1: Channel(own)}, stuck.wait if sys.argv[1] != "idle" else lambda: None, 600.0, reports)
if sys.argv[1] == "closing":
    one.free()
    one.begin()
else:
    one.begin()
    theirs.close()
    while not one.failure:
        time.sleep(0.01)
if sys.argv[1] == "idle":
    one.end()
    time.sleep(2)
    one.close()
    print("closed", threading.active_count())
else:
    stuck.wait()
"""


class Scripted(Reports):
    """Reports of ranks that only a test knows: what it looks for is called instead."""

    def __init__(self, look: Callable[[], None], missing: Callable[[], list[int]]) -> None:
        store: Any = None
        super().__init__(store, Reporter(), (1,))
        self.look, self.missing = look, missing  # type: ignore[method-assign]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Reports], Watch]]:
    """Makes a Watch of rank 1, which lives, with a limit of 0.1 s for a call."""
    monkeypatch.setattr(watch, "PERIOD_SECONDS", 0.01)
    own, theirs = Pipe()
    made = list[Watch]()

    def make(looked: Reports) -> Watch:
        made.append(Watch({1: Channel(own)}, lambda: None, 0.1, looked))
        return made[-1]

    yield make
    for one in made:
        one.close()
    own.close()
    theirs.close()


@pytest.mark.parametrize("again", [False, True])
def test_a_call_that_ends_while_reports_are_read_has_not_failed(
    again: bool, watched: Callable[[Reports], Watch]
) -> None:
    """Nor has the next one, which may have begun by then."""
    looks = list[float]()

    def missing() -> list[int]:
        looks.append(time.monotonic())
        if len(looks) == 1:
            own.end()
            if again:
                own.begin()
        return [1]

    own = watched(Scripted(lambda: None, missing))
    own.loaded()
    own.begin()
    wait_for(lambda: looks, "the time limit")
    if not again:
        time.sleep(0.3)
        assert (own.failure, len(looks)) == ("", 1)
        return
    assert wait_for(lambda: own.failure, "the end of the second call").startswith("rank 1: no answer within 0 s")
    assert len(looks) == 2, "the second call had its own time"


def test_a_watch_that_cannot_look_says_so(
    watched: Callable[[Reports], Watch], caplog: pytest.LogCaptureFixture
) -> None:
    def look() -> None:
        raise ConnectionError("the store is closed")

    own = watched(Scripted(look, list))
    message = "rank 0: cannot watch the others: ConnectionError: the store is closed"
    assert wait_for(lambda: own.failure, "the failure") == message
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("does", "reason"), [("waiting", "rank 1: it has ended or failed"), ("closing", "the engine is being closed")]
)
def test_a_process_that_cannot_be_released_ends_by_name(does: str, reason: str) -> None:
    command = [sys.executable, "-c", STUCK, does]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1
    assert (
        f"{reason}, and what waits for it on rank 0 could not be released within 0.5 s: this process ends"
        in done.stderr
    )
    assert 'File "<string>", line' in done.stderr, "where each thread waits"


def test_a_process_of_which_nothing_waits_goes_on_until_it_closes_the_engine() -> None:
    command = [sys.executable, "-c", STUCK, "idle"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == "closed 1\n"


def test_threads_read_reports_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        most = now = 0

        def check(self, _: list[str]) -> bool:
            self.now += 1
            self.most = max(self.most, self.now)
            time.sleep(0.02)
            self.now -= 1
            return False

    monkeypatch.setattr(reports, "SILENT_SECONDS", 0.1)
    store: Any = Store()
    own = Reports(store, Reporter(), (1, 2))
    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(call) for call in (own.missing, own.look, own.look, own.loading_fault, lambda: own.absent)]
    assert [one.result() for one in done] == [[1, 2], None, None, "", [1, 2]]
    assert store.most == 1


@pytest.mark.parametrize(("told", "status"), [(False, 0), (True, 1)])
def test_a_rank_ends_at_once(told: bool, status: int) -> None:
    """When rank 0 has closed the connection, or after an error that it is told."""
    own, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-c", SLOW_TO_END, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    killing = threading.Timer(SECONDS, process.kill)
    killing.start()
    with own, process:
        own.send_bytes(b"load")
        assert own.recv_bytes() == b""
        if told:
            own.send_bytes(b"do")
            assert own.recv_bytes() == b"RuntimeError: it cannot do what rank 0 says"
        else:
            own.close()
        _, errors = process.communicate()
    killing.cancel()
    assert process.returncode == status
    assert "did not end" not in errors
    assert ("rank 0 is told of an error" in errors) == told

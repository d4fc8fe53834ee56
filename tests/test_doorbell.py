"""The doorbell between the models' processes: rings are counted, per request, and responses wait for them."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from kvseek.server import doorbell
from kvseek.server.doorbell import Doorbell, Ringer, Rings, is_name, paced

SECONDS = 10.0


def test_rings_are_counted_for_each_request() -> None:
    bell, ringer = Doorbell(), Ringer()
    with bell.expecting("a") as first, bell.expecting("b") as second:
        for request, sent in (("a", 1), ("b", 1), ("gone", 1), ("a", 3), ("a", 2)):
            ringer.ring(bell.name, request, sent)
        assert first.wait_for(3), "a ring may be lost or late: the largest number counts"
        assert second.wait_for(1)
        assert not wait(second, 2)
    ringer.ring(bell.name, "a", 4)
    with bell.expecting("c") as third:
        ringer.ring(bell.name, "c", 1)
        assert third.wait_for(1), "a late ring for another request does no harm"


def wait(rings: Rings, sent: int) -> bool:
    """Whether so many have been sent by now; `wait_for` would go on while this process, which rang, lives."""
    return rings._sent >= sent


def test_names() -> None:
    """What no doorbell is called is a client's own parameter, and refused as others are."""
    assert is_name(Doorbell().name)
    assert not any(map(is_name, (None, True, 5, "", "bell", "0" * 31, "0" * 33, "0" * 32 + "\n", "G" * 32)))


def test_a_doorbell_that_is_gone_is_not_missed() -> None:
    Ringer().ring("0" * 32, "a", 1)


def test_a_doorbell_that_is_not_listened_to_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """Its rings wait in threads of their own, and come in when it listens again."""
    name = "f" * 32
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(doorbell.PREFIX + name)
        ringer, sent = Ringer(), 0
        while "not listened to" not in caplog.text:
            sent += 1
            started = time.monotonic()
            ringer.ring(name, "a", sent)
        assert doorbell.RING_SECONDS <= time.monotonic() - started < SECONDS
        deaf.settimeout(SECONDS)
        heard = {int(deaf.recv(doorbell.RING_BYTES).split()[0]) for _ in range(sent)}
        assert heard == set(range(1, sent + 1))


def test_responses_are_asked_for_when_they_were_rung_for() -> None:
    """The first one is there before; nothing is rung for after the last."""
    events: list[str] = []

    class Expected(Rings):
        def wait_for(self, sent: int) -> bool:
            events.append(f"wait {sent}")
            return True

    def responses() -> Iterator[str]:
        for number in "1234":
            events.append(number)
            yield number

    assert "".join(paced(responses(), Expected(), lambda number: number == "4")) == "1234"
    assert events == ["1", "wait 2", "2", "wait 3", "3", "wait 4", "4"]


def test_a_slow_process_is_waited_for_and_a_dead_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "CHECK_SECONDS", 0.01)
    process = subprocess.Popen(["sleep", "60"])
    rings, answers = Rings(), []
    rings.add(1, process.pid)
    waiting = threading.Thread(target=lambda: answers.append(rings.wait_for(2)))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive(), "twenty checks found the process alive"
    process.kill()
    waiting.join(SECONDS)  # before it is reaped: a zombie is dead
    assert answers == [False]
    process.wait()
    assert not doorbell.is_running(process.pid)


def test_a_process_that_never_rang_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(doorbell, "FIRST_SECONDS", 0.05)
    assert list(paced(iter([1, 2]), Rings(), lambda _: False)) == [1, 2]

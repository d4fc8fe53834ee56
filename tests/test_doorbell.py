"""The doorbell between the models' processes: rings are counted, per request, and responses wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvseek.server import doorbell
from kvseek.server.doorbell import Doorbell, Ringer, is_name, paced

SECONDS = 10.0


def test_rings_are_counted_for_each_request() -> None:
    bell, ringer = Doorbell(), Ringer()
    with bell.expecting("a") as first, bell.expecting("b") as second:
        for request in ("a", "b", "gone", "a"):
            ringer.ring(bell.name, request)
        assert first.acquire(timeout=SECONDS)
        assert first.acquire(timeout=SECONDS)
        assert second.acquire(timeout=SECONDS)
        assert not second.acquire(blocking=False)
    ringer.ring(bell.name, "a")
    with bell.expecting("c") as third:
        ringer.ring(bell.name, "c")
        assert third.acquire(timeout=SECONDS), "a late ring for another request does no harm"


def test_names() -> None:
    """What no doorbell is called is a client's own parameter, and refused as others are."""
    assert is_name(Doorbell().name)
    assert not any(map(is_name, (None, True, 5, "", "bell", "0" * 31, "0" * 33, "0" * 32 + "\n", "G" * 32)))


def test_a_doorbell_that_is_gone_is_not_missed() -> None:
    Ringer().ring("0" * 32, "a")


def test_responses_are_asked_for_when_they_were_rung_for() -> None:
    """The first one is there before; its ring counts, and nothing is rung for after the last."""
    events: list[str] = []

    class Arrived(threading.Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            events.append("wait")
            return True

    def responses() -> Iterator[str]:
        for number in "1234":
            events.append(number)
            yield number

    assert "".join(paced(responses(), Arrived(), lambda number: number == "4")) == "1234"
    assert events == ["1", "wait", "wait", "2", "wait", "3", "wait", "4"]


def test_an_end_that_nobody_rings_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "WAIT_SECONDS", 0.01)
    assert list(paced(iter([1, 2]), threading.Semaphore(0), lambda _: False)) == [1, 2]

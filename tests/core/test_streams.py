"""Side work: at once on the CPU, and waited for oldest first."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from kvseek.core import streams
from kvseek.core.streams import BoundedLaunches, InFlight, SideStream, SideWork

CPU = torch.device("cpu")


class Work(SideWork):
    """Notes in `waits` when it is waited for."""

    def __init__(self, name: str, waits: list[str]) -> None:
        super().__init__(CPU, None)
        self.name, self.waits, self.ended = name, waits, False

    @property
    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.waits.append(self.name)


def begin(most: int, *works: tuple[int, str]) -> tuple[InFlight, list[str], dict[str, Work]]:
    """Works of (slot, name), each after `make_room`."""
    flight, waits, made = InFlight(most), list[str](), dict[str, Work]()
    for slot, name in works:
        flight.make_room()
        made[name] = Work(name, waits)
        flight.add(slot, made[name])
    return flight, waits, made


def test_no_more_than_the_most_are_in_flight() -> None:
    _, waits, _ = begin(2, (0, "a"), (0, "b"))
    assert waits == []
    _, waits, _ = begin(2, (0, "a"), (0, "b"), (1, "c"), (1, "d"))
    assert waits == ["a", "b"], "oldest first"
    _, waits, _ = begin(1, (0, "a"), (0, "b"), (0, "c"))
    assert waits == ["a", "b"]


def test_a_slot_is_finished_with_all_before_it() -> None:
    flight, waits, _ = begin(4, (0, "a"), (1, "b"), (0, "c"))
    flight.finish(2)
    assert waits == [], "a slot without works waits for nothing"
    flight.finish(1)
    assert waits == ["a", "b", "c"], "one stream: works end in order"
    flight.finish(0)
    assert waits == ["a", "b", "c"], "each is waited for once"


def test_works_that_have_ended_are_let_go() -> None:
    """They keep memory. Later works that have ended stay behind those that have not."""
    flight, waits, made = begin(4, (0, "a"), (0, "b"), (0, "c"))
    made["a"].ended = made["c"].ended = True
    flight.make_room()
    assert waits == ["a"]


def test_a_work_that_has_ended_keeps_nothing() -> None:
    """On the CPU every work has: a layer's rows must not stay until the next layer's are copied."""
    flight, rows = InFlight(2), torch.zeros(4)
    alive = weakref.ref(rows)
    flight.make_room()
    flight.add(0, SideStream(CPU).run(lambda: None, read=(rows,)))
    del rows
    assert alive() is None


def test_the_cpu_works_at_once_and_tells_of_errors() -> None:
    done: list[int] = []
    work = SideStream(CPU).run(lambda: done.append(1))
    assert (done, work.done) == ([1], True)
    work.wait()

    def fail() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        SideStream(CPU).run(fail)


def test_the_host_waits_for_the_oldest_piece_once_the_most_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    events, pieces = list[str](), iter("abcd")

    def launched(device: torch.device) -> Callable[[], None]:
        piece = next(pieces)
        events.append(f"launch {piece}")
        return lambda: events.append(f"wait {piece}")

    monkeypatch.setattr(streams, "everything_launched", launched)
    launches = BoundedLaunches(CPU, 2)
    for _ in range(4):
        launches.wait()
        launches.add()
    assert events == ["launch a", "launch b", "wait a", "launch c", "wait b", "launch d"]

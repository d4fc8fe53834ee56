"""Faults while an engine of several ranks is loaded, real processes over gloo: rank 0 ends within seconds, by name."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.conftest import BuildEngine, RandomModel
from tests.engine.leading.failing_rank import REASON, join
from tests.support.forks import start_rank
from tests.support.waiting import is_running, wait_for

from kvseek.core.config import read_config
from kvseek.core.errors import CapacityError
from kvseek.engine.leading import followers, leader
from kvseek.engine.leading.followers import Followers, Member, RankError
from kvseek.engine.leading.leader import lead
from kvseek.engine.model.layer import Products
from kvseek.engine.parallel import reports
from kvseek.engine.parallel.cuda.ranks import DeviceRanks
from kvseek.engine.parallel.nodes import ONE_NODE
from kvseek.engine.parallel.ranks import RankProducts, Ranks, create_store, find_store
from kvseek.engine.parallel.reports import Reporter, Reports

pytestmark = pytest.mark.usefixtures("forked_ranks")

START = followers._start  # of a program of its own
# That a fault may take to be told on a busy machine; the limits of the code are minutes and an hour
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    model = random_model("llama", num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    return build_engine(model, "full", "--max_batch_size", "1", "--max_seq_len", "100", "--tp_size", "2")


@pytest.fixture
def stuck(directory: Path, tmp_path: Path) -> Path:
    """The same, but for the weights of rank 1: whoever reads what they are waits for ever."""
    copy = shutil.copytree(directory, tmp_path / "engine")
    (copy / "rank1.index.json").unlink()
    os.mkfifo(copy / "rank1.index.json")
    return copy


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Process ids of the ranks that a test starts, none of which it leaves behind."""
    pids, start = list[int](), start_rank

    def note(rank: int, *arguments: str) -> Member:
        member = start(rank, *arguments)
        pids.append(member.process.pid)
        return member

    monkeypatch.setattr(followers, "_start", note)
    yield pids
    assert not dist.is_initialized(), "this process may load another engine"
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.usefixtures("started")
def test_a_rank_that_hangs_while_it_loads_is_named(stuck: Path) -> None:
    begun = time.monotonic()
    message = r"^rank 1: no progress within 2 s \(reads weights\); the engine's ranks cannot go on"
    with pytest.raises(RankError, match=message):
        lead(stuck, read_config(stuck), stall_seconds=2.0)
    assert time.monotonic() - begun < WAIT_SECONDS


def test_a_rank_that_dies_while_it_loads_is_named(
    stuck: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though rank 0 has minutes of its own loading before it."""
    begun = threading.Event()
    killing = threading.Thread(target=lambda: (begun.wait(), os.kill(started[0], signal.SIGKILL)))
    killing.start()

    def load_long(_: Any, __: Any, ranks: Ranks, *___: Any) -> None:
        begun.set()
        for number in range(100_000):  # weights
            ranks.reporter.doing(f"reads weights: {number}")
            time.sleep(0.01)

    monkeypatch.setattr(leader, "load_rank", load_long)
    with pytest.raises(RankError, match=r"^rank 1: its process \d+ has ended with status -9; the engine's ranks"):
        lead(stuck, read_config(stuck))
    killing.join()


@pytest.mark.usefixtures("started")
def test_a_rank_that_dies_before_it_joins_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "_start", START)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    begun = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1: its process \d+ has ended with status 1; the engine's ranks"):
        lead(directory, read_config(directory), timeout_seconds=3600.0)
    assert time.monotonic() - begun < WAIT_SECONDS


@pytest.mark.usefixtures("started")
def test_ranks_do_not_wait_when_rank_0_cannot_load(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CapacityError("rank 0 has no memory")

    monkeypatch.setattr(leader, "load_rank", fail)
    with pytest.raises(CapacityError, match=r"^rank 0 has no memory$"):
        lead(directory, read_config(directory))


@pytest.mark.usefixtures("started")
def test_a_group_that_is_joined_too_late_is_left(
    directory: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 dies while rank 0 joins, in a thread that is left there and joins nevertheless."""
    joined = threading.Event()

    def join_late(several: Followers) -> None:
        os.kill(started[0], signal.SIGKILL)
        wait_for(lambda: several._failure, "the end of rank 1")
        time.sleep(1.0)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        joined.set()

    monkeypatch.setattr(Followers, "_join", join_late)
    with pytest.raises(RankError, match=r"^rank 1: its process \d+ has ended with status -9; the engine's ranks"):
        lead(directory, read_config(directory))
    assert joined.is_set()
    assert not dist.is_initialized()


def gpu_followers(directory: Path, monkeypatch: pytest.MonkeyPatch, case: str, own_case: str) -> Followers:
    """Ranks that would compute on GPUs if there were any: rank 1 does what `case` says once it has joined, rank 0 `own_case`."""

    def over(ranks: Ranks, *_: Any) -> Ranks:
        join(ranks, own_case)
        return ranks

    start: Any = followers._start
    monkeypatch.setattr(followers, "_start", lambda rank: start(rank, case))
    monkeypatch.setattr(followers, "FOLLOWER", "tests.engine.leading.failing_rank")
    monkeypatch.setattr(DeviceRanks, "over", over)
    monkeypatch.setattr(reports, "SETTLE_SECONDS", 1.0)
    return Followers(directory, dataclasses.replace(read_config(directory), device="cuda"), ONE_NODE)


@pytest.mark.parametrize(
    ("case", "own_case", "message"),
    [
        ("fails", "waits", f"^rank 1: cannot sum by NCCL: {REASON}; others wait for it there; the engine's ranks"),
        ("waits", "fails", f"^rank 0: cannot sum by NCCL: {REASON}; others wait for it there; the engine's ranks"),
        ("raises", "waits", "^rank 1: ZeroDivisionError: a fault of the program; the engine's ranks"),
        ("waits", "raises", "^rank 0: ZeroDivisionError: a fault of the program; the engine's ranks"),
    ],
)
def test_a_rank_that_cannot_sum_ends_all(
    case: str,
    own_case: str,
    message: str,
    directory: Path,
    started: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    several = gpu_followers(directory, monkeypatch, case, own_case)
    begun = time.monotonic()
    with pytest.raises(RankError, match=message):
        several.join()
    assert time.monotonic() - begun < WAIT_SECONDS
    several.stop_watching()
    assert len(started) == 1
    assert "the ranks cannot join" in caplog.text, "with its traceback"


def test_ranks_that_fail_alike_go_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take another way to sum; nobody is blamed, however long the rest takes."""
    several = gpu_followers(directory, monkeypatch, "fails", "fails")
    try:
        several.join()
        time.sleep(2.0)
        assert several._reports.loading_fault() == ""
    finally:
        several.close()
        dist.destroy_process_group()
        several.stop_watching()


class World:
    """What rank 0 knows of ranks 1 to 3, which are threads here."""

    def __init__(self, stall_seconds: float) -> None:
        self.store = store = create_store(WAIT_SECONDS)
        self.own = Reporter(stall_seconds)
        self.others = {rank: Reporter(stall_seconds) for rank in (1, 2, 3)}
        for rank, reporter in self.others.items():
            reporter.publish(find_store(store.host, store.port, WAIT_SECONDS), rank)
        self.reports = Reports(find_store(store.host, store.port, WAIT_SECONDS), self.own, (1, 2, 3))

    def fault(self) -> str:
        self.reports.look()
        return self.reports.loading_fault()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], World]]:
    monkeypatch.setattr(reports, "SILENT_SECONDS", 1.5)
    made = list[World]()

    def make(stall_seconds: float) -> World:
        made.append(World(stall_seconds))
        return made[-1]

    yield make
    for one in made:
        for reporter in one.others.values():
            reporter.close()


def test_ranks_that_wait_need_not_get_on_unless_all_do(world: Callable[[float], World]) -> None:
    own = world(1.0)
    for reporter in (own.own, own.others[1], own.others[3]):
        reporter.waiting("waits")
    own.others[2].doing("reads weights")
    assert wait_for(own.fault, "the time limit") == "rank 2: no progress within 1 s (reads weights)"
    own.others[2].waiting("waits")
    assert wait_for(lambda: (fault := own.fault()).startswith("ranks") and fault, "the time limit") == (
        "ranks 0, 1, 2 and 3: each waits for the others, since 1 s"
    )
    own.own.doing("pins rows")
    assert wait_for(own.fault, "the time limit") == "rank 0: no progress within 1 s (pins rows)"


def test_long_work_may_take_longer(world: Callable[[float], World]) -> None:
    own = world(1.0)
    for rank, reporter in own.others.items():
        reporter.doing(f"part {rank}", more=WAIT_SECONDS)
    begun = time.monotonic()
    while time.monotonic() - begun < 2.0:
        assert own.fault() == ""
        time.sleep(0.1)


def test_who_does_not_answer_is_told_from_who_is_behind(world: Callable[[float], World]) -> None:
    own = world(WAIT_SECONDS)
    for _ in range(3):
        for reporter in (own.own, *own.others.values()):
            reporter.step()
    assert own.reports.missing() == []
    for reporter in (own.own, own.others[1], own.others[3]):
        reporter.step()
    own.others[2].doing("Decode")
    assert own.reports.missing() == [2]
    assert own.reports.doing(2) == "Decode"
    for rank in (1, 3):
        own.others[rank].close()
    assert own.reports.missing() == [1, 3]


def test_what_waits_for_other_ranks_can_be_left() -> None:
    def check() -> None:
        if failed.is_set():
            raise RankError("rank 1 has ended")

    failed = threading.Event()
    reporter = Reporter(check=check)
    assert reporter.apart(lambda: 5) == 5
    with pytest.raises(KeyError, match="5"):
        reporter.apart(lambda: {}[5])
    threading.Timer(0.2, failed.set).start()
    assert reporter.has_ended_apart(0.0)
    later = threading.Event()
    with pytest.raises(RankError):
        reporter.apart(later.wait)
    assert not reporter.has_ended_apart(0.1)
    later.set()
    assert reporter.has_ended_apart(WAIT_SECONDS)
    for call in (reporter.doing, reporter.waiting):
        with pytest.raises(RankError):
            call("reads weights")


def test_a_product_of_the_head_is_told_of() -> None:
    ranks = Ranks(0, 2)
    products, weight = RankProducts(Products(torch.float32), ranks, 8), torch.zeros(4, 3)
    for number, make in enumerate((products.linear, products.row_parallel, products.head), 1):
        make(weight)
        assert ranks.reporter.report.doing == f"prepares product {number}"

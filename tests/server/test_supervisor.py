"""Keeping processes running, with small real ones in the place of the server's."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.waiting import is_running, wait_for

from kvseek.server import supervisor as supervisor_module
from kvseek.server.errors import ServerError
from kvseek.server.processes import Program, ending
from kvseek.server.supervisor import Supervisor

TIMEOUT = 30.0


def program(name: str, code: str, **rest: object) -> Program:
    return Program(name, (sys.executable, "-c", code), 5.0, **rest)  # type: ignore[arg-type]


SLEEP = "import time; time.sleep(1000)"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_SECONDS", 0.01)
    started: list[Supervisor] = []

    def make(*programs: Program, restarts: int = 3, settle: bool = True) -> Supervisor:
        supervisor = Supervisor(programs, restarts, tmp_path / "log", tmp_path / "restarts.json")
        started.append(supervisor)
        supervisor.start()
        if settle:
            wait_for(lambda: supervisor.process_ids().keys() >= {p.name for p in programs})
            supervisor.wait_until(lambda: True, TIMEOUT)
        return supervisor

    yield make
    for one in started:
        one.stop()


def test_what_dies_is_started_again_and_counted(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    supervisor = start(program("one", SLEEP), program("two", SLEEP))
    before = supervisor.process_ids()
    os.kill(before["two"], signal.SIGKILL)
    wait_for(lambda: supervisor.process_ids().get("two", before["two"]) != before["two"])
    assert supervisor.process_ids()["one"] == before["one"], "the other goes on"
    assert json.loads((tmp_path / "restarts.json").read_text()) == {"one": 0, "two": 1}
    supervisor.check()
    supervisor.stop()
    assert supervisor.statuses == {"one": -signal.SIGTERM, "two": -signal.SIGTERM}


def test_what_ends_with_another_is_started_again_with_it(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    supervisor = start(program("door", SLEEP), program("behind", SLEEP, ends_with="door"), program("apart", SLEEP))
    before = supervisor.process_ids()
    os.kill(before["door"], signal.SIGKILL)
    wait_for(
        lambda: set(supervisor.process_ids()) == set(before) and supervisor.process_ids()["behind"] != before["behind"]
    )
    assert supervisor.process_ids()["apart"] == before["apart"]
    assert not is_running(before["behind"])
    restarts = {"door": 1, "behind": 0, "apart": 0}
    assert json.loads((tmp_path / "restarts.json").read_text()) == restarts, "those that died by themselves"
    os.kill(supervisor.process_ids()["behind"], signal.SIGKILL)
    wait_for(lambda: json.loads((tmp_path / "restarts.json").read_text())["behind"] == 1)


def test_a_worker_that_dies_ends_its_process(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    """As a model's process of Triton, whose death Triton itself does not notice."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)', 'worker-7'])"
    cleaned: list[int] = []
    supervisor = start(program("parent", code, workers=("worker-7",), clean_up=lambda: cleaned.append(1)))
    wait_for(lambda: "worker-7" in supervisor.process_ids())
    before = supervisor.process_ids()
    os.kill(before["worker-7"], signal.SIGKILL)
    wait_for(lambda: supervisor.process_ids().get("worker-7", before["worker-7"]) != before["worker-7"])
    assert supervisor.process_ids()["parent"] != before["parent"]
    assert not is_running(before["parent"])
    assert cleaned


def test_what_dies_too_often_ends_the_server(start: Callable[..., Supervisor]) -> None:
    other = program("other", SLEEP)
    supervisor = start(program("brief", "import time; time.sleep(0.2); raise SystemExit(7)"), other, restarts=2)
    process = supervisor.process_ids()["other"]
    wait_for(lambda: bool(supervisor.failure))
    with pytest.raises(ServerError, match=r"brief ended with status 7, after 2 restarts in a row \(--restarts\)"):
        supervisor.check()
    supervisor.stop()
    assert not is_running(process)


def test_time_to_start_is_no_steady_running(
    start: Callable[..., Supervisor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that loads for minutes and then dies must not be started again for ever."""
    monkeypatch.setattr(supervisor_module, "STEADY_SECONDS", 0.1)
    code = "import time; time.sleep(0.4); raise SystemExit(7)"
    supervisor = start(program("never-up", code, is_up=lambda: False), restarts=1)
    wait_for(lambda: bool(supervisor.failure))
    assert json.loads((tmp_path / "restarts.json").read_text()) == {"never-up": 1}
    supervisor = start(program("up", code), restarts=1)
    wait_for(lambda: json.loads((tmp_path / "restarts.json").read_text()) == {"up": 3})
    assert not supervisor.failure


def test_restarts_that_cannot_be_written_end_nothing(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    supervisor = start(program("one", SLEEP))
    (tmp_path / "restarts.json").unlink()
    (tmp_path / "restarts.json").mkdir()
    before = supervisor.process_ids()["one"]
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: supervisor.process_ids().get("one", before) != before)
    supervisor.check()


@pytest.mark.parametrize("keep", [True, False])
def test_a_log_that_nobody_asked_for_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    monkeypatch.setattr(supervisor_module, "LOOK_AT_LOG_SECONDS", 0.05)
    monkeypatch.setattr(supervisor_module, "MAX_LOG_BYTES", 10_000)
    code = "import time\nwhile True: print('x' * 999, flush=True); time.sleep(0.001)"
    log, sizes = tmp_path / "log", [0]
    supervisor = Supervisor([program("chatty", code)], 0, log, tmp_path / "restarts.json", keep_output=keep)
    supervisor.start()

    def done() -> bool:
        sizes.append(log.stat().st_size if log.exists() else 0)
        return sizes[-1] > 100_000 if keep else sizes[-1] < sizes[-2]

    wait_for(done)
    supervisor.stop()
    assert (sizes == sorted(sizes)) is keep


def test_a_start_that_fails_says_what_the_process_wrote(start: Callable[..., Supervisor]) -> None:
    supervisor = start(program("engine", "raise SystemExit('error: no such model')"), settle=False)
    with pytest.raises(ServerError, match=r"engine ended with status 1; its log ends:\nerror: no such model"):
        supervisor.wait_until(lambda: False, TIMEOUT)


def test_a_start_that_takes_too_long_is_given_up(start: Callable[..., Supervisor]) -> None:
    supervisor = start(program("slow", SLEEP), settle=False)
    with pytest.raises(ServerError, match=r"not ready after 0\.1 s, see --ready_seconds"):
        supervisor.wait_until(lambda: False, 0.1)


def test_programs_end_in_order(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    """The second is asked to end only when the first has ended: doors outlive the engine that drains."""
    code = (
        "import signal, sys, time\n"
        f"log = open({str(tmp_path / 'order')!r}, 'a')\n"
        "def end(*_):\n"
        "    log.write(sys.argv[1] + ' asked '); log.flush(); time.sleep(0.3)\n"
        "    log.write(sys.argv[1] + ' ended '); log.flush(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "log.write('up '); log.flush()\n"
        "time.sleep(1000)\n"
    )
    programs = [Program(name, (sys.executable, "-c", code, name), 5.0) for name in ("engine", "door")]
    supervisor = start(*programs)
    wait_for(lambda: (tmp_path / "order").exists() and (tmp_path / "order").read_text() == "up up ")
    supervisor.stop()
    assert (tmp_path / "order").read_text() == "up up engine asked engine ended door asked door ended "
    assert supervisor.statuses == {"engine": 0, "door": 0}


def test_what_does_not_end_is_killed_with_its_children(start: Callable[..., Supervisor]) -> None:
    code = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)', 'child-of-it'])\n"
    )
    supervisor = start(Program("deaf", (sys.executable, "-c", code), 0.2, workers=("child-of-it",)))
    wait_for(lambda: "child-of-it" in supervisor.process_ids())
    processes = supervisor.process_ids()
    supervisor.stop()
    assert supervisor.statuses == {"deaf": -signal.SIGKILL}
    wait_for(lambda: not any(is_running(process) for process in processes.values()))


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert ending(log).splitlines() == ["ends:", *(f"line {i}" for i in range(99_970, 100_000))]
    assert ending(None) == "is above"
    assert ending(Path("/dev/full")) == "is /dev/full", "reading it would never end"

"""Keeping processes running, with small real ones in the place of the server's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.waiting import is_running, wait_for

from kvseek.core.liveness import ask
from kvseek.server import processes
from kvseek.server import supervisor as supervisor_module
from kvseek.server.errors import ServerError
from kvseek.server.processes import Ask, Program, Questions, last_words
from kvseek.server.supervisor import Supervisor

TIMEOUT = 60.0


def program(name: str, code: str, **rest: object) -> Program:
    return Program(name, (sys.executable, "-c", code), 5.0, **rest)  # type: ignore[arg-type]


SLEEP = "import time; time.sleep(1000)"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_SECONDS", 0.01)
    started: list[Supervisor] = []

    def make(*programs: Program, restarts: int = 3, settle: bool = True, hang_seconds: float = TIMEOUT) -> Supervisor:
        supervisor = Supervisor(programs, restarts, hang_seconds, tmp_path / "log", tmp_path / "restarts.json")
        started.append(supervisor)
        supervisor.start()
        if settle:
            wait_for(lambda: supervisor.process_ids().keys() >= {p.name for p in programs})
            supervisor.wait_until(lambda: True, TIMEOUT)
        return supervisor

    yield make
    for one in started:
        one.stop()


def replaced(supervisor: Supervisor, name: str, number: int = signal.SIGKILL) -> dict[str, int]:
    """Send a signal to a process and wait for the one that takes its place; returns the process ids that there were."""
    before = supervisor.process_ids()
    os.kill(before[name], number)
    wait_for(lambda: supervisor.process_ids().get(name, before[name]) != before[name])
    return before


def test_what_dies_is_started_again_and_counted(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    supervisor = start(program("one", SLEEP), program("two", SLEEP))
    before = replaced(supervisor, "two")
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
    before = replaced(supervisor, "worker-7")
    assert supervisor.process_ids()["parent"] != before["parent"]
    assert not is_running(before["parent"])
    assert cleaned


def test_what_dies_too_often_ends_the_server(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    other, gone = program("other", SLEEP), tmp_path / "gone"
    code = f"import os, time\nwhile not os.path.exists({str(gone)!r}): time.sleep(0.01)\nraise SystemExit(7)"
    supervisor = start(program("brief", code), other, restarts=2)
    gone.touch()
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
    code, loaded = "import time; time.sleep(0.4); raise SystemExit(7)", tmp_path / "loaded"
    loaded.touch()  # the first time it comes up
    never = program("never-up", code, is_up=loaded.exists, clean_up=lambda: loaded.unlink(missing_ok=True))
    supervisor = start(never, restarts=1)
    wait_for(lambda: bool(supervisor.failure))
    assert json.loads((tmp_path / "restarts.json").read_text()) == {"never-up": 1}
    supervisor = start(program("up", code), restarts=1)
    wait_for(lambda: json.loads((tmp_path / "restarts.json").read_text())["up"] >= 3)
    assert not supervisor.failure


def test_restarts_that_cannot_be_written_end_nothing(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    supervisor = start(program("one", SLEEP))
    (tmp_path / "restarts.json").unlink()
    (tmp_path / "restarts.json").mkdir()
    replaced(supervisor, "one")
    supervisor.check()


@pytest.mark.parametrize("fails", [OSError("busy"), RuntimeError("unforeseen")])
def test_what_cannot_be_cleaned_up_ends_nothing(
    fails: Exception, start: Callable[..., Supervisor], caplog: pytest.LogCaptureFixture
) -> None:
    def clean_up() -> None:
        raise fails

    supervisor = start(program("one", SLEEP, clean_up=clean_up))
    replaced(supervisor, "one")
    supervisor.check()
    assert "one: what it has left behind could not be removed" in caplog.text


@pytest.mark.parametrize("keep", [True, False])
def test_a_log_that_nobody_asked_for_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    monkeypatch.setattr(supervisor_module, "LOOK_AT_LOG_SECONDS", 0.05)
    monkeypatch.setattr(supervisor_module, "MAX_LOG_BYTES", 10_000)
    code = "import time\nwhile True: print('x' * 999, flush=True); time.sleep(0.001)"
    log, sizes = tmp_path / ("log" if keep else "chatty.log"), [0]
    output = log if keep else tmp_path
    supervisor = Supervisor([program("chatty", code)], 0, TIMEOUT, output, tmp_path / "restarts.json")
    supervisor.start()

    def done() -> bool:
        sizes.append(log.stat().st_size if log.exists() else 0)
        return sizes[-1] > 100_000 if keep else sizes[-1] < sizes[-2]

    wait_for(done)
    supervisor.stop()
    assert (sizes == sorted(sizes)) is keep


REFUSES = "import time; time.sleep(0.5); print('all was well'); raise SystemExit('error: no such model')"
CRASHES = "import time; time.sleep(0.5); 1 / 0"
TALKS = "import time\nwhile True: print('all is well', flush=True); time.sleep(0.01)"


@pytest.mark.parametrize(
    ("shared", "code", "message"),
    [
        (True, REFUSES, r"engine ended with status 1: no such model"),
        (False, REFUSES, r"engine ended with status 1: no such model"),
        (
            False,
            CRASHES,
            r"engine ended with status 1: its log ends:\nTraceback(?s:.*)\nZeroDivisionError: division by zero",
        ),
        (False, "raise SystemExit(7)", r"engine ended with status 7: it has written nothing"),
    ],
)
def test_a_start_that_fails_says_what_that_process_wrote(tmp_path: Path, shared: bool, code: str, message: str) -> None:
    """Not what others write meanwhile, at length: in a file that all share, a refusal is found."""
    output = tmp_path / "log" if shared else tmp_path
    (tmp_path / "log").write_text("error: of an earlier server\n")
    programs = [program("other", TALKS), program("engine", code)]
    supervisor = Supervisor(programs, 0, TIMEOUT, output, tmp_path / "restarts.json")
    supervisor.start()
    try:
        with pytest.raises(ServerError) as refused:
            supervisor.wait_until(lambda: False, TIMEOUT)
    finally:
        supervisor.stop()
    assert re.fullmatch(message, str(refused.value)), refused.value


def test_a_start_that_takes_too_long_names_who_is_late(tmp_path: Path, start: Callable[..., Supervisor]) -> None:
    slow = program("slow", "import time; print('loading', flush=True); time.sleep(1000)", is_up=lambda: False)
    supervisor = start(program("quick", SLEEP), slow, settle=False)
    wait_for(lambda: (tmp_path / "log").exists() and "loading" in (tmp_path / "log").read_text())
    late = r"not ready after 0\.5 s, see --ready_seconds: slow is not up; its log ends:\nloading"
    with pytest.raises(ServerError, match=late):
        supervisor.wait_until(lambda: False, 0.5)


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
    programs = [Program(name, (sys.executable, "-c", code, name), TIMEOUT) for name in ("engine", "door")]
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
    assert last_words(log).splitlines() == ["its log ends:", *(f"line {i}" for i in range(99_970, 100_000))]
    assert last_words(log, log.stat().st_size - 11) == "its log ends:\nline 99999"
    assert last_words(log, log.stat().st_size + 1).endswith("line 99999"), "it has been cut since"
    assert last_words(None) == "its log is above"
    assert last_words(Path("/dev/full")) == "its log is /dev/full", "reading it would never end"


def answering(name: str, path: Path, **rest: object) -> Program:
    """A process that answers, from a thread or with a worker that does, as long as it is not stopped."""
    code = f"from pathlib import Path; from kvseek.core.liveness import answer_from_thread as answer; answer(Path({str(path)!r}))"
    return program(name, f"{code}; {SLEEP}", **rest)


def asks(path: Path, *names: str) -> dict[str, Ask]:
    return {name: lambda seconds: ask(path, seconds) is not None for name in names}


def test_what_is_stopped_is_killed_and_started_again(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    one = answering("one", tmp_path / "one.alive", asks=asks(tmp_path / "one.alive", "one"))
    supervisor = start(one, program("two", SLEEP), hang_seconds=2.0)
    before = replaced(supervisor, "one", signal.SIGSTOP)
    assert not is_running(before["one"])
    assert supervisor.process_ids()["two"] == before["two"]
    counts = json.loads((tmp_path / "restarts.json").read_text())
    assert counts["one"] >= 1  # a busy machine may hold up its answers, too
    assert counts["two"] == 0


def test_a_start_that_never_ends_is_given_up_each_time(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    """Of a process that is started again; it has come up the first time."""
    loaded = tmp_path / "loaded"
    slow = program(
        "slow", SLEEP, is_up=loaded.exists, clean_up=lambda: loaded.unlink(missing_ok=True), start_seconds=0.3
    )
    loaded.touch()
    supervisor = start(slow, restarts=2)
    os.kill(supervisor.process_ids()["slow"], signal.SIGKILL)
    wait_for(lambda: bool(supervisor.failure))
    with pytest.raises(ServerError, match=r"slow was not up 0\.3 s after its start .*, after 2 restarts in a row"):
        supervisor.check()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_question_that_is_lost_ends_nothing_and_two_in_a_row_do(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is lost when the supervisor itself was stopped: then nobody has answered in its time, however long that was."""
    monkeypatch.setattr(processes, "ASK_SECONDS", 0.05)
    asked, hang_seconds = list[float](), 0.4

    def ask(seconds: float) -> bool:
        asked.append(seconds)
        if 3 <= len(asked) < 3 + lost:
            time.sleep(2 * hang_seconds)
            return False
        return True

    questions = Questions({"one": ask}, hang_seconds)
    wait_for(lambda: questions.silent or len(asked) > 6)
    questions.end()
    assert questions.silent == ("one" if lost == 2 else "")


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_no_child_outlives_a_killed_launcher(tmp_path: Path, stopped: bool) -> None:
    """Nor a child of a child, though none of them hears what the kernel and the launcher may tell it."""
    deaf = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{deaf}; subprocess.run([sys.executable, '-c', {f'{deaf}; time.sleep(1000)'!r}, 'child-of-it'])"
    launcher = (
        "import time\n"
        "from pathlib import Path\n"
        "from tests.server.test_supervisor import Supervisor, program\n"
        f"one = program('deaf', {code!r}, workers=('child-of-it',))\n"
        f"supervisor = Supervisor([one], 0, 60.0, None, Path({str(tmp_path / 'restarts.json')!r}))\n"
        "supervisor.start()\n"
        "while len(supervisor.process_ids()) < 2: time.sleep(0.05)\n"
        "print(*supervisor.process_ids().values(), flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids if stopped else ():
            os.kill(pid, signal.SIGSTOP)
        process.kill()
        process.stdout.close()
    wait_for(lambda: not any(is_running(pid) for pid in pids), "the end of child and grandchild")

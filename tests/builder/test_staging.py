"""Where an engine is built: what killed builds left is removed, what live ones are at work on is not."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from tests.conftest import RandomModel
from tests.support.checkpoint_files import run_build
from tests.support.random_models import save_random_model
from tests.support.waiting import SECONDS, wait_for

from kvseek.builder import build
from kvseek.builder.atomic_directory import atomic_directory, remove_leftovers
from kvseek.builder.compile.shared import compiling_threads
from kvseek.core.errors import ConfigError
from kvseek.core.manifest import verify

BUILD = [sys.executable, "-m", "kvseek.cli.main", "build", "--method", "full", "--quiet"]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "engine[1]"


@pytest.fixture(scope="module")
def dead() -> int:
    """Id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leave(output: Path, process_id: int | str, kind: str) -> Path:
    directory = output.with_name(f".{output.name}.{process_id}.{kind}")
    (directory / "tokenizer").mkdir(parents=True)
    (directory / "tokenizer/tokenizer.json").write_text("{")
    return directory


@pytest.mark.parametrize("kind", ["partial", "replaced"])
def test_leftovers_of_dead_processes_go(output: Path, dead: int, kind: str) -> None:
    output.mkdir()
    leave(output, dead, kind)
    remove_leftovers(output)
    assert list(output.parent.iterdir()) == [output]


def test_live_and_foreign_directories_stay(output: Path, dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = output.with_name("engine")
    stay = [
        leave(output, os.getppid(), "replaced"),
        leave(output, 1, "partial"),
        leave(output, 10**30, "partial"),
        leave(output, "draft", "partial"),
        leave(output, dead, "backup"),
        leave(ours, dead, "partial"),
        leave(output.with_name("engine1"), dead, "partial"),
    ]
    remove_leftovers(output)
    assert sorted(output.parent.iterdir()) == sorted(stay)

    def refuse(process_id: int, number: int) -> None:
        raise PermissionError  # what another user's process answers

    leave(output, dead, "partial")
    monkeypatch.setattr(os, "kill", refuse)
    remove_leftovers(output)
    assert len(list(output.parent.iterdir())) == len(stay) + 1


def test_an_engine_that_was_moved_away_comes_back(output: Path, dead: int) -> None:
    """A build killed after the first of its two renames leaves the old engine under another name, and nothing in its place."""
    partial, replaced = leave(output, dead, "partial"), leave(output, dead, "replaced")
    (replaced / "old").touch()
    remove_leftovers(output)
    assert list(output.parent.iterdir()) == [output]
    assert (output / "old").exists()
    assert not partial.exists()


def test_leftovers_of_our_own_process_id(output: Path) -> None:
    """In containers every build may have the same one: what bears it is an earlier build's."""
    leave(output, os.getpid(), "partial")
    (leave(output, os.getpid(), "replaced") / "old").touch()
    remove_leftovers(output)
    assert list(output.parent.iterdir()) == [output]
    assert (output / "old").exists()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_engine_comes_back_if_its_place_is_not_taken(
    output: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rename fails, or a signal comes after the first one."""
    output.mkdir()
    (output / "old").touch()
    rename = Path.rename

    def stop(path: Path, target: Path) -> Path:
        if path.name.endswith("partial"):
            raise error
        return rename(path, target)

    def build_all() -> None:
        with atomic_directory(output) as directory:
            (directory / "new").touch()

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(error):
        build_all()
    assert list(output.parent.iterdir()) == [output]
    assert [path.name for path in output.iterdir()] == ["old"]


def test_no_folder_yet(tmp_path: Path) -> None:
    remove_leftovers(tmp_path / "nowhere/engine")
    assert list(tmp_path.iterdir()) == []


def fail(output: Path, beside: Path, error: type[BaseException]) -> None:
    """Begin to build, let somebody put a file somewhere, and stop."""
    with atomic_directory(output) as directory:
        (directory / "file").touch()
        beside.touch()
        raise error


def test_folders_above_go_with_a_failed_build(tmp_path: Path) -> None:
    output = tmp_path / "a/b/engine"
    (tmp_path / "notes").touch()
    with pytest.raises(KeyboardInterrupt):
        fail(output, tmp_path / "notes", KeyboardInterrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    with pytest.raises(KeyError):
        fail(output, tmp_path / "a/notes", KeyError)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["notes"], "what others put there stays"
    with atomic_directory(output) as directory:
        (directory / "file").touch()
    assert (output / "file").exists()


def test_after_a_real_kill(output: Path) -> None:
    """A build that is killed while it writes, another that goes on beside it, and the build that cleans up."""
    model = save_random_model(output.parent / "model", "llama")
    script = (
        "import pathlib, sys, time\nfrom kvseek.builder.atomic_directory import atomic_directory\n"
        "with atomic_directory(pathlib.Path(sys.argv[1])) as directory:\n"
        "    (directory / 'config.json').touch()\n    print('writing', flush=True)\n    time.sleep(1000)\n"
    )
    command = [sys.executable, "-c", script, str(output)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout.readline() == "writing\n"
        left = [output.with_name(f".{output.name}.{child.pid}.partial") for child in children]
        children[0].kill()
        assert children[0].wait() == -signal.SIGKILL
        assert [(directory / "config.json").is_file() for directory in left] == [True, True]
        arguments = ["--model", str(model), "--output_dir", str(output), "--method", "full", "--kernels", "reference"]
        assert build.main([*arguments, "--quiet"]) == 0
        verify(output)
        assert [directory.exists() for directory in left] == [False, True]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert build.main([*arguments, "--quiet"]) == 0, "up to date"
    assert sorted(path.name for path in output.parent.iterdir()) == ["engine[1]", "model"], "nothing else is left"


COMPILER = """#!/bin/sh
# Tells its version, and compiles for long; a compiler that a thread starts after the signal is waited for.
[ "$1" = --version ] && echo 1 && exit 0
echo > "$0.runs"
exec sleep 4
"""


def test_ctrl_c_ends_a_build_with_a_line(random_model: RandomModel, tmp_path: Path) -> None:
    """As from a terminal, which sends SIGINT to the compiler as well."""
    compiler, output, cache = tmp_path / "compiler", tmp_path / "out/engine", tmp_path / "cache"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler), "XDG_CACHE_HOME": str(cache)}
    command = [*BUILD, "--model", str(random_model("llama")), "--output_dir", str(output)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            wait_for((tmp_path / "compiler.runs").exists, "the compiler")
            assert output.parent.exists()
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130
    assert errors == "\nkvseek build: interrupted\n"
    assert not output.parent.exists()
    assert list((cache / "kvseek").iterdir()) == []


def test_an_interrupt_while_work_is_handed_out_does_not_begin_the_rest() -> None:
    free, handed_out = threading.Event(), list[Future[bool]]()  # all threads are busy until `free`

    def interrupted() -> None:
        with compiling_threads() as pool:
            handed_out.extend(pool.submit(free.wait, SECONDS) for _ in range((os.cpu_count() or 1) + 1))
            handed_out[-1].add_done_callback(lambda _: free.set())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert handed_out[-1].cancelled()


@pytest.mark.parametrize(
    ("kilobytes", "file"), [(2, "tokenizer/tokenizer.json"), (100, "rank0-00001-of-00001.safetensors")]
)
def test_a_file_that_cannot_grow_is_named(
    kilobytes: int, file: str, random_model: RandomModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit of file sizes stands for a full disk: writes fail half-way, those of libraries in Rust too."""
    output, model, limits = tmp_path / "engine", random_model("llama"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes << 10, limits[1]))
    try:
        assert run_build(model, output) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = capsys.readouterr().err
    assert f"error: output_dir = {str(output)!r}: File too large while {file} was written, after" in message
    assert "raise the limit of file sizes (ulimit -f)" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "full"), "No space left on device while b was written, after 3 B in all; free space"),
        (OSError(errno.EDQUOT, "full"), "Disk quota exceeded while b was written, after 3 B in all; free space within"),
        (OSError(errno.EIO, "broken"), "broken"),
        (ValueError("no number"), "no number"),
    ],
)
def test_errors_of_a_full_disk(error: Exception, message: str, output: Path) -> None:
    def build_all() -> None:
        with atomic_directory(output) as directory:
            for name, content in (("a", "1"), ("b", "22")):
                (directory / name).write_text(content)
            os.utime(directory / "a", (0, 0))
            raise error

    kind = ConfigError if "while b was written" in message else type(error)
    with pytest.raises(kind, match=message):
        build_all()
    assert list(output.parent.iterdir()) == []

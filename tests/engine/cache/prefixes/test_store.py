"""Faults of the disk, of files and of the directory: each is named, none fails a request."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tests.engine.cache.prefixes.test_cache import LAYERS
from tests.engine.cache.prefixes.test_disk import ORIGIN, SHAPE, DiskMachine, name_of

from kvseek.cli import main as cli
from kvseek.core.errors import ConfigError
from kvseek.engine.cache.prefixes import file as prefix_file
from kvseek.engine.cache.prefixes import folder as prefix_folder
from kvseek.engine.cache.prefixes import store as prefix_store
from kvseek.engine.cache.prefixes.file import (
    FORMAT,
    HEADER_BYTES,
    DamagedFileError,
    Entry,
    ForeignFileError,
    read_data,
    read_entry,
    write_file,
)
from kvseek.engine.cache.prefixes.folder import BusyFolderError, open_folder
from kvseek.engine.cache.prefixes.store import PrefixStore
from kvseek.engine.cache.prefixes.tree import pack_tokens, root_key


class Run(DiskMachine):
    """Requests one after the other; those of other tokens share nothing."""

    def ask(self, tokens: list[int], salt: str | None = None) -> int:
        """Answer a request and return how many tokens of its prompt were not read."""
        self.begin(salt, tokens, len(tokens) + 1)
        ((slot, one),) = self.running.items()
        self.read_first(LAYERS)
        self.end(slot, failed=False)
        return one.reused

    def forget_memory(self) -> None:
        self.prefixes._evict(self.extents.capacity)

    def rewrite(self, name: str, old: str, new: str) -> None:
        """Change as many characters of a file's header."""
        path = self.folder / name
        contents = path.read_bytes()
        assert len(old) == len(new)
        assert contents.count(old.encode()) == 1
        path.write_bytes(contents.replace(old.encode(), new.encode()))


@pytest.fixture
def run() -> Iterator[Run]:
    machine = Run()
    yield machine
    machine.teardown()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond 1,000 bytes; the system refuses it as it refuses a write to a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_are_for_their_user_alone_and_do_not_tell_salts(run: Run) -> None:
    run.ask([1] * 2300, salt="a secret of a tenant")
    assert stat.S_IMODE(run.folder.stat().st_mode) == 0o700
    assert len(run.files()) == 3
    for path in run.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"secret" not in path.read_bytes()
    run.forget_memory()
    assert run.ask([1] * 2300, salt=None) == run.ask([1] * 2300, salt="another") == 0
    run.forget_memory()
    assert run.ask([1] * 2300, salt="a secret of a tenant") == 2299


def test_the_safetensors_package_reads_the_files(run: Run) -> None:
    run.ask([1] * 1500)
    with safe_open(run.folder / name_of(None, [1] * 1028), "pt") as file:
        assert file.metadata()["format"] == FORMAT
        assert file.metadata()["engine"] == ORIGIN.engine
        assert set(file.keys()) == {"tokens", "sink_rows", "rows"}
        assert file.get_slice("rows").get_shape() == [LAYERS, 1, 1024, 2, 2]


def test_the_disk_is_asked_for_what_memory_does_not_have(run: Run) -> None:
    run.ask([1] * 3000)
    run.prefixes._evict(1)
    assert (run.ask([1] * 2990 + [2] * 80), run.store.counts.loaded) == (2990, 1)
    run.forget_memory()
    assert (run.ask([1] * 2990 + [3] * 80), run.store.counts.loaded) == (2990, 4)
    usage = run.store.usage()
    assert (usage.files, usage.counts.written) == (5, 5), "two whole extents, and three different ones behind them"
    assert usage.bytes == sum(path.stat().st_size for path in run.folder.iterdir())


def test_a_few_tokens_are_read_rather_than_loaded(run: Run) -> None:
    run.ask([1] * 1100)
    run.forget_memory()
    assert run.ask([1] * 1090 + [2] * 100) == 1028
    assert run.store.counts.loaded == 1


def test_of_files_with_as_much_of_a_prompt_the_smallest_is_loaded(run: Run) -> None:
    for own in ([2] * 400, [3] * 100):
        run.ask([1] * 600 + own)
    (larger := run.folder / name_of(None, [1] * 600 + [2] * 400)).unlink()
    run.damaged.add(larger.name)
    run.forget_memory()
    assert run.ask([1] * 600 + [4] * 100) == 600


def test_damaged_files_are_removed_by_name(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.ask([1] * 1500)
    run.ask([2] * 1500)
    run.ask([3] * 1500)
    cut, changed, key = name_of(None, [1] * 1028), name_of(None, [2] * 1028), name_of(None, [3] * 1500)
    path = run.folder / cut
    path.write_bytes(path.read_bytes()[:-1])
    path = run.folder / changed
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    run.rewrite(key, '"parent": "', '"farent": "')
    run.damaged.add(changed)
    with caplog.at_level(logging.WARNING):
        run.restart()
        assert all(f"{run.folder / name} is damaged" in caplog.text for name in (cut, key))
        assert run.ask([2] * 1500) == 0
        assert f"{run.folder / changed} is damaged: expected SHA-256" in caplog.text
    assert run.store.usage().damaged == 3
    assert run.files() >= {changed}, "the prompt that was read has been written again"
    run.forget_memory()
    assert run.ask([2] * 1500) == 1499
    assert run.ask([1] * 1500) == 0, "the file behind the damaged one is not found"


def test_files_of_others_are_left_alone(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for token in (1, 2):
        run.ask([token] * 1028)
    other, older = (name_of(None, [token] * 1028) for token in (1, 2))
    run.rewrite(other, f'"engine": "{ORIGIN.engine}"', f'"engine": "{"1" * 32}"')
    run.rewrite(older, FORMAT, FORMAT[:-1] + "0")
    (run.folder / "notes.txt").write_text("mine")
    run.kept["notes.txt"] = (None, [])
    run.damaged |= {other, older, "notes.txt"}  # of which the machine must not say what they stand for
    contents = {path: path.read_bytes() for path in run.folder.iterdir()}
    with caplog.at_level(logging.WARNING):
        run.restart()
    assert caplog.text.count("it is left alone") == 3
    assert "belongs to another engine, 111" in caplog.text
    assert "has the format 'kvseek prefix 0': this kvseek reads 'kvseek prefix 1'" in caplog.text
    assert [run.ask([token] * 1028) for token in (1, 2, 1)] == [0, 0, 1027]
    assert {path: path.read_bytes() for path in run.folder.iterdir()} == contents
    assert run.store.usage().files == 0


def test_a_directory_has_one_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_folder, "LOCK_SECONDS", 0.0)
    with pytest.raises(BusyFolderError, match=r"disk_dir = '.*': .* is in use by another process; stop that"):
        open_folder(run.directory, 1 << 20, ORIGIN, SHAPE)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk_dir = '.*file': cannot be used \(.*\); name a directory"):
        open_folder(tmp_path / "file", 1 << 20, ORIGIN, SHAPE)


class Held:
    """A copy to or from the pool that takes a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.began, copy = threading.Event(), getattr(PrefixStore, name)

        def slowly(store: PrefixStore, *arguments: Any) -> None:
            self.began.set()
            time.sleep(0.1)
            copy(store, *arguments)

        monkeypatch.setattr(PrefixStore, name, slowly)


def test_an_extent_that_is_being_written_is_not_taken_away(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`teardown` compares the file with what it stands for."""
    held = Held(monkeypatch, "_copy_out")
    run.begin(None, [1] * 2300, 2301)
    run.read_first(LAYERS)
    run.end_at_once(0, failed=False)
    held.began.wait()
    run.evict_and_overwrite(9)
    run.settle()
    assert run.files() >= {name_of(None, [1] * 1028)}
    assert run.store.counts.dropped["evicted"] + run.store.counts.written == 3


def test_nothing_is_loaded_to_an_extent_that_was_given_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.ask([1] * 2300)
    run.forget_memory()
    held = Held(monkeypatch, "_copy_in")
    run.begin(None, [1] * 2300, 2301)
    assert run.prefixes.find_more(0, pack_tokens([1] * 2300), None, 2301) is None
    assert not run.prefixes.load(0, pack_tokens([1] * 2300), None)
    held.began.wait()
    run.end_at_once(0, failed=False)
    run.evict_and_overwrite(9)
    run.settle()
    assert run.extents.free == run.extents.capacity
    assert run.cache.rows.pool.rows.isnan().all()


def test_a_full_disk_costs_files_and_nothing_else(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with full_disk():
        assert run.ask([1] * 2300) == 0
    assert run.store.counts.dropped["error"] == 1
    assert run.store.counts.dropped["parent"] == 2
    assert run.files() == set()
    assert caplog.text.count("prefixes are not written to") == 1
    assert run.ask([1] * 2300) == 2299, "it is in memory"
    assert len(run.files()) == 3, "and written when a later request ends that has the same prefix"


def test_a_directory_may_vanish(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.ask([1] * 2300)
    run.forget_memory()
    shutil.rmtree(run.folder)
    assert run.ask([1] * 2300) == 0
    assert run.ask([1] * 2300) == 2299, "memory goes on"
    assert f"{run.folder / name_of(None, [1] * 1028)} cannot be read" in caplog.text
    assert run.store.counts.dropped["error"] > 0


def test_a_disk_that_hangs_holds_nothing_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.ask([1] * 2300)
    run.forget_memory()
    hanging, comes_back, opened = run.folder / name_of(None, [1] * 2052), threading.Event(), prefix_file.open_own_file

    def open_or_hang(path: Path) -> int:
        if path == hanging:
            assert comes_back.wait(60)
            raise OSError("the disk is back, but the file is not")
        return opened(path)

    monkeypatch.setattr(prefix_file, "open_own_file", open_or_hang)
    run.damaged.add(hanging.name)
    monkeypatch.setattr(prefix_store, "STALLED_SECONDS", 0.2)
    run.begin(None, [1] * 2300, 2301)
    run.read_first(LAYERS)
    assert run.running[0].reused == 1028, "what came before"
    assert run.store.load([], []) is None, "nobody else waits"
    comes_back.set()
    run.end(0, failed=False)


def test_no_link_that_somebody_has_planted_is_followed(tmp_path: Path) -> None:
    """Neither to write, nor to read, nor to note when a file was used."""
    victim, folder = tmp_path / "victim", open_folder(tmp_path / "disk", 1 << 30, ORIGIN, SHAPE)
    victim.write_text("somebody's")
    os.utime(victim, (1, 1))
    data, before = memoryview(bytearray(SHAPE.data_bytes(1028, first=True))), root_key(None)

    def write() -> Entry:
        return write_file(folder.path, ORIGIN, SHAPE, before, True, pack_tokens([1] * 1028), data, lambda: None)

    entry = write()
    copy = entry.path.rename(tmp_path / entry.path.name)  # all but its place is right
    folder.add(entry)
    for target in (victim, copy):
        entry.path.symlink_to(target)
        (folder.path / f".{entry.key.hex()}.new").symlink_to(target)
        with pytest.raises(FileExistsError):
            write()
        with pytest.raises(ForeignFileError, match="is a symbolic link"):
            read_entry(entry.path)
        with pytest.raises(DamagedFileError, match="is a symbolic link"):
            read_data(entry, data, lambda: None)
        folder.touch([entry.key])
        folder.save_times()
        assert write().path == entry.path, "in the place of the link"
        entry.path.unlink()
    assert (victim.read_text(), victim.stat().st_mtime) == ("somebody's", 1)
    folder.close()


def test_a_directory_in_which_others_have_a_hand_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o777)
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / ORIGIN.engine).symlink_to(tmp_path / "elsewhere")
    for name, message in (("link", "symbolic link"), ("all", "mode 0777"), ("planted", "symbolic link")):
        with pytest.raises(ConfigError, match=f"disk_dir = '.*/{name}': .*{message}"):
            open_folder(tmp_path / name, 1 << 20, ORIGIN, SHAPE)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_least_recently_used_go_first_also_after_a_restart(run: Run) -> None:
    """Eight whole files fit."""
    for token in (1, 2, 3):
        run.ask([token] * 2052)
    run.ask([1] * 2052 + [4] * 900)
    run.restart()
    run.ask([3] * 2052)
    run.restart()
    run.ask([5] * 2052)
    run.forget_memory()
    assert len(run.files()) == 8
    assert run.ask([2] * 2052) == 1028, "its last file made room; nothing else was used so long ago"
    run.forget_memory()
    assert run.ask([1] * 2952) < 2952
    assert run.store.usage().removed > 0


def test_what_does_not_fit_is_not_written(run: Run) -> None:
    """A file is never removed for one that follows it: that could not be found without it."""
    run.store.folder._most = 2 * (HEADER_BYTES + SHAPE.data_bytes(1028, first=True))
    run.ask([1] * 4000)
    assert run.files() == {name_of(None, [1] * 1028), name_of(None, [1] * 2052)}
    dropped = {reason: count for reason, count in run.store.counts.dropped.items() if count}
    assert dropped == {"disk_bytes": 1, "parent": 1}


def test_the_command_lists_and_drops(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--disk_dir", str(run.directory)]
    for tokens in ([1] * 1500, [1] * 1028 + [2] * 600, [3] * 1028):
        run.ask(tokens)
    assert cli.main(["cache", "list", *flags]) == 0
    shown = capsys.readouterr().out
    assert "tiny, full: 4 files" in shown
    assert "in use" in shown
    assert cli.main(["cache", "drop", "--all", *flags]) == 1
    assert "in use by another process; stop that" in capsys.readouterr().err
    assert len(run.files()) == 4
    run.store.close()
    assert cli.main(["cache", "list", "--json", *flags]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert not engine["in_use"]
    assert sorted(one["tokens"] for one in engine["prefixes"]) == [1028, 1500, 1628]
    for wrong, message in (
        ([], "name what to drop"),
        (["ffff0000ffff"], "is the beginning of 0 prefixes"),
        ([""], "is the beginning of 3 prefixes"),
    ):
        assert cli.main(["cache", "drop", *wrong, *flags]) == 1
        assert message in capsys.readouterr().err
    named = next(one["prefix"] for one in engine["prefixes"] if one["tokens"] == 1500)
    assert cli.main(["cache", "drop", named[:12], *flags]) == 0
    assert run.files() == {name_of(None, tokens) for tokens in ([1] * 1028, [1] * 1028 + [2] * 600, [3] * 1028)}, (
        "what another prefix begins with stays"
    )
    old = run.folder / name_of(None, [3] * 1028)
    os.utime(old, (0, 0))
    for wrong in ("-1", "nan", "inf"):
        assert cli.main(["cache", "drop", "--older_than", wrong, *flags]) == 1
        assert f"--older_than = {wrong}: must be >= 0 and finite" in capsys.readouterr().err
    assert cli.main(["cache", "list", "--engine", "nobody", *flags]) == 1
    assert "--engine = 'nobody': no engine in" in capsys.readouterr().err
    assert cli.main(["cache", "drop", "--older_than", "1", *flags]) == 0
    assert not old.exists()
    (run.folder / "notes.txt").write_text("mine")
    assert cli.main(["cache", "drop", "--all", *flags]) == 0
    assert run.files() == {"notes.txt"}
    (run.folder / "notes.txt").unlink()
    assert cli.main(["cache", "list", "--disk_dir", str(run.directory / "no")]) == 1
    assert "is no directory" in capsys.readouterr().err


FULL, FAULTY, READ_ONLY = (OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EIO, errno.EROFS))


class FailingDisk:
    """Files whose writes and reads fail as the system would say; `after` so many calls of a piece of work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: OSError, after: int) -> None:
        self._error, self._left, pieces = error, after, prefix_file.pieces

        def failing(*arguments: Any) -> Iterator[memoryview]:
            for piece in pieces(*arguments):
                self._left -= 1
                if self._left < 0:
                    raise self._error
                yield piece

        monkeypatch.setattr(prefix_file, "PIECE_BYTES", 4096)  # so that it may fail in the middle of a file
        monkeypatch.setattr(prefix_file, "pieces", failing)

    def mend(self) -> None:
        self._left = sys.maxsize


@pytest.mark.parametrize("after", [0, 9, 30])
@pytest.mark.parametrize("error", [FULL, FAULTY, READ_ONLY], ids=["full", "faulty", "read-only"])
def test_a_disk_that_refuses_files_costs_files_alone(
    error: OSError, after: int, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None is left half-written, requests find what is in memory, and the next that ends writes what is missing."""
    disk = FailingDisk(monkeypatch, error, after)
    assert run.ask([1] * 2300) == 0
    assert run.store.counts.dropped["error"] > 0
    assert error.strerror in caplog.text
    assert not list(run.folder.glob("*.new"))
    assert run.ask([1] * 2300) == 2299
    disk.mend()
    assert run.ask([1] * 2300) == 2299
    assert len(run.files()) == 3
    run.restart()
    assert run.ask([1] * 2300) == 2299


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("how", ["faulty", "cut", "flipped", "emptied", "replaced", "gone"])
def test_a_file_that_cannot_be_read_while_serving_is_named_and_its_prompt_read(
    how: str, after: int, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of three: what lies before it may be used, what lies behind it may not."""
    run.ask([1] * 2300)
    run.forget_memory()
    name = name_of(None, [1] * 2052)
    path = run.folder / name
    contents = bytearray(path.read_bytes())
    contents[-1 - after] ^= 4
    if how == "faulty":
        per_file = -(-SHAPE.data_bytes(1028, first=True) // 4096)
        disk = FailingDisk(monkeypatch, FAULTY, per_file + after)
    elif how == "gone":
        path.unlink()
    elif how == "replaced":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"cut": contents[: -1 - after], "flipped": contents, "emptied": b""}[how])
    run.damaged.add(name)
    assert run.ask([1] * 2300) == 1028
    assert str(path) in caplog.text
    assert run.ask([1] * 2300) == 2299, "memory has it now"
    if how == "faulty":
        disk.mend()
    if how == "replaced":
        path.rmdir()

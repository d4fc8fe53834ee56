"""Finding a tritonserver, its stub and its ports, without starting one; the console command."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.conftest import BuildEngine, RandomModel

from kvseek.cli import main as cli
from kvseek.engine.speculation import Speculation
from kvseek.server import launch
from kvseek.server.errors import ServerError
from kvseek.server.scratch import SHARED_MEMORY_PREFIX, scratch_folder
from kvseek.server.settings import ServeSettings
from kvseek.server.triton import find as triton
from kvseek.server.triton import stub
from kvseek.server.triton.find import STUB


def forget_system_server(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(triton, "SYSTEM_SERVER", folder / "nowhere" / "tritonserver")


class Wheel:
    """An installed distribution whose files lie under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def locate_file(self, path: str) -> Path:
        return self.root / path


def make_wheel(root: Path, stub_versions: tuple[str, ...]) -> Path:
    server = root / "pytriton" / "tritonserver"
    files = ["bin/tritonserver", *(f"backends/python/{name}" for name in triton.BACKEND_FILES)]
    files += [f"python_backend_stubs/{number}/{triton.STUB}" for number in stub_versions]
    for name in files:
        (server / name).parent.mkdir(parents=True, exist_ok=True)
        (server / name).write_bytes(b"")
    return root


def test_a_system_server_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "bin" / "tritonserver"
    (tmp_path / "backends" / "python").mkdir(parents=True)
    binary.parent.mkdir()
    binary.write_bytes(b"")
    monkeypatch.setattr(shutil, "which", lambda name: str(binary))
    server = triton.find_server(tmp_path / "scratch")
    assert (server.binary, server.backends) == (binary, tmp_path / "backends")
    (tmp_path / "backends" / "python").rmdir()
    with pytest.raises(ServerError, match="has no Python backend"):
        triton.find_server(tmp_path / "scratch")


def test_no_server_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    forget_system_server(monkeypatch, tmp_path)
    monkeypatch.setattr(triton, "distribution", absent)
    with pytest.raises(ServerError, match=r"pip install --no-deps nvidia-pytriton==0\.7\.0"):
        triton.find_server(tmp_path)


def test_the_embedded_server_is_assembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "site", (triton.VERSION,))
    own = f"libpython3-1234abcd.{sys.version_info.minor}.so.1.0"
    (wheel / triton.LIBRARIES).mkdir()
    for name in (own, "libpython3-1234abcd.5.so.1.0"):
        (wheel / triton.LIBRARIES / name).write_bytes(b"")
    forget_system_server(monkeypatch, tmp_path)
    monkeypatch.setattr(triton, "distribution", lambda name: Wheel(wheel))
    monkeypatch.setattr(stub, "OPERANDS", {hashlib.sha256(b"").hexdigest(): ()})
    server = triton.find_server(tmp_path / "scratch")
    files = {path.name for path in (server.backends / "python").iterdir()}
    assert files == {*triton.BACKEND_FILES, triton.STUB}
    assert (server.backends / "python" / triton.STUB).stat().st_mode & 0o100
    assert server.binary.stat().st_mode & 0o100, "the wheel's binary was not executable"
    libraries = server.environment["LD_LIBRARY_PATH"].split(":")
    assert libraries[:2] == [str(tmp_path / "scratch" / "lib"), str(wheel / triton.LIBRARIES)]
    names = (triton.shared_libpython().name, own)
    assert {path.name: path.resolve() for path in Path(libraries[0]).iterdir()} == dict.fromkeys(
        names, triton.shared_libpython().resolve()
    )
    assert server.environment["PATH"].startswith(str(Path(sys.prefix) / "bin"))


def test_a_python_without_stub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "site", ("3.8", "3.9"))
    forget_system_server(monkeypatch, tmp_path)
    monkeypatch.setattr(triton, "distribution", lambda name: Wheel(wheel))
    with pytest.raises(ServerError, match=f"no Python backend stub for Python {triton.VERSION}, only for 3.8, 3.9"):
        triton.find_server(tmp_path)


def test_a_static_python_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: {"INSTSONAME": "libpython.a"}.get(name))
    with pytest.raises(ServerError, match=rf"apt-get install libpython{triton.VERSION}.*--enable-shared"):
        triton.shared_libpython()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_start_needs_time(tmp_path: Path, seconds: float) -> None:
    with (
        pytest.raises(ServerError, match=f"--ready_seconds = {seconds}: must be > 0; 180 is the default"),
        launch.running_server(tmp_path, ready_seconds=seconds),
    ):
        pass


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("max_queue_size", "0", "--max_queue_size = 0: must be >= 1; 256 is the default"),
        ("max_num_tokens", "0", "--max_num_tokens = 0: must be >= 1"),
        (
            "default_timeout",
            "0",
            "--default_timeout = 0.0: must be > 0 and <= 604800, a week; leave it out for no limit",
        ),
        ("default_timeout", "inf", "--default_timeout = inf: must be > 0 and <= 604800"),
        ("drain_seconds", "-1", "--drain_seconds = -1.0: must be >= 0 and <= 604800, a week; 20 is the default"),
        ("hang_seconds", "1", "--hang_seconds = 1.0: must be >= 5 and <= 604800, a week; 60 is the default"),
        ("restarts", "-1", "--restarts = -1: must be >= 0; 0 ends the server when a process dies"),
        ("threads", "0", "--threads = 0: must be >= 1; or leave it out"),
        ("speculation", "medusa", "--speculation = 'medusa': must be one of ('ngram', 'mtp'); leave it out for none"),
        ("num_speculative_tokens", "3", "--num_speculative_tokens = 3: must be left out without speculation"),
    ],
)
def test_settings_out_of_range(
    tmp_path: Path, flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--engine_dir", str(tmp_path), f"--{flag}", value]) == 1
    assert message in capsys.readouterr().err


def test_settings_pass_to_other_processes_and_drafts_to_the_engine() -> None:
    assert ServeSettings().drafts is None
    own = ServeSettings(threads=3, default_timeout=2.5, speculation="ngram", num_speculative_tokens=3)
    settings = ServeSettings.from_json(own.to_json())
    assert settings == own
    assert settings.drafts == Speculation("ngram", 3)


def test_an_engine_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(directory: Path) -> None:
        raise PermissionError(13, "Permission denied", str(directory / "weights"))

    monkeypatch.setattr(launch, "verify", refuse)
    assert cli.main(["serve", "--engine_dir", str(tmp_path)]) == 1
    assert f"error: {tmp_path}/weights: Permission denied\n" in capsys.readouterr().err


PORTS = ("--http_port", "0", "--grpc_port", "0", "--metrics_port", "0", "--openai_port", "0")
IS_NO_HOST = r"must be an IPv4 address of this machine, or a name of one \(.+\)"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--disk_dir", "/proc/foo"), r"disk_dir = '/proc/foo': cannot be used \(No such file or directory\); name"),
        (("--disk_dir", "/dev/null"), r"disk_dir = '/dev/null': cannot be used \(Not a directory\); name"),
        (("--disk_dir", "DIR", "--disk_bytes", "10"), r"disk_bytes = 10: must be at least \d+, the rows of one extent"),
        (
            ("--log", "/nonexistent/x.log"),
            r"--log = /nonexistent/x.log: cannot be written \(No such file or directory\)",
        ),
        (("--log", "DIR"), r"--log = \S+: cannot be written \(Is a directory\)"),
        (("--log", "DIR/link"), r"--log = \S+: \S+/link is a symbolic link; name the file that it leads to"),
        (("--log", "DIR/above/x.log"), r"--log = \S+: \S+/above is a symbolic link; name the folder that it leads to"),
        (
            ("--log", "DIR/all/x.log"),
            r"--log = \S+: \S+/all has the mode 0777, so other users may replace what is in it",
        ),
        (("--http_port", "7001", "--grpc_port", "7001"), r"--grpc_port = 7001: must be another port than --http_port"),
        (
            ("--openai_port", "7001", "--metrics_port", "7001"),
            r"--openai_port = 7001: must be another port than --metr",
        ),
        (("--host", "::1"), f"--host = '::1': {IS_NO_HOST}"),
        (("--host", "a..b"), f"--host = 'a..b': {IS_NO_HOST}"),
        (
            ("--host", "192.0.2.1"),
            r"--host = '192.0.2.1': must be an address of this machine, and no interface here has it",
        ),
        (("--otlp_endpoint", "collector:4318"), r"--otlp_endpoint = 'collector:4318': must be a URL of http or https"),
        (("--api_key_file", "/nonexistent"), r"--api_key_file = /nonexistent: cannot be read"),
    ],
)
def test_what_can_be_checked_is_refused_before_a_process_starts(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(launch, "Supervisor", None)
    (tmp_path / "link").symlink_to(tmp_path / "planted.log")
    (tmp_path / "above").symlink_to(tmp_path)
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o777)
    flags = tuple(flag.replace("DIR", str(tmp_path)) for flag in flags)
    assert cli.main(["serve", "--engine_dir", str(directory), *PORTS, *flags]) == 1
    assert re.fullmatch(f"error: {message}.*\n", capsys.readouterr().err)


def test_a_folder_too_deep_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with (
        pytest.raises(ServerError, match=r"TMPDIR = '.*x': sockets there have \d+ bytes: must be <= 107"),
        scratch_folder(),
    ):
        pass
    assert not list(deep.iterdir())


def test_folders_of_killed_servers_are_removed_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # sockets have room in its short path
        check_leftovers(Path(folder), monkeypatch)


def check_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = tmp_path / "kvseek-1000", tmp_path / "kvseek-new"
    for folder in others:  # of engine processes that programs share, and of a server that is just making it
        folder.mkdir()
    with scratch_folder() as used:
        code = f"import os, tempfile; tempfile.tempdir = {str(tmp_path)!r}; from kvseek.server.scratch import scratch_folder"
        code += "; context = scratch_folder(); context.__enter__(); os.kill(os.getpid(), 9)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
        left = next(folder for folder in tmp_path.iterdir() if folder not in (used, *others))
        region = Path("/dev/shm") / f"{SHARED_MEMORY_PREFIX}{left.name}-0"
        region.touch()
        with scratch_folder() as second:
            assert {*tmp_path.iterdir()} == {used, second, *others}
            assert not region.exists()
    assert {*tmp_path.iterdir()} == {*others}


@pytest.mark.server
def test_a_process_that_refuses_to_start_is_quoted_and_no_other(
    random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model("llama")
    directory = build_engine(model, "full", "--max_batch_size", "2", "--max_seq_len", "64", "--cache.reuse", "false")
    capsys.readouterr()  # of saving the model
    assert cli.main(["serve", "--engine_dir", str(directory), *PORTS, "--disk_dir", str(tmp_path / "disk")]) == 1
    refusal = (
        r"error: engine ended with status 1: disk_dir = \S+: must be left out, as the engine keeps no prefixes; .*\n"
    )
    assert re.fullmatch(refusal, capsys.readouterr().err)


def test_serving_what_is_no_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--engine_dir", str(tmp_path)]) == 1
    assert f"error: {tmp_path}" in capsys.readouterr().err


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvseek {version('kvseek')}\n"
    assert cli.main(["--help"]) == 0
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("build", "serve", "chat", "bench"))
    assert cli.main(["sevre"]) == 2
    assert "unknown command 'sevre'" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out


def wheels_stub(version: str) -> Path:
    return Path(
        str(distribution(stub.WHEEL).locate_file(f"pytriton/tritonserver/python_backend_stubs/{version}/{STUB}"))
    )


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_five_operands_differ_with_numpy_2(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = wheels_stub(version).read_bytes()
    monkeypatch.setattr(np, "__version__", "2.4.6")
    stub.copy_stub(wheels_stub(version), tmp_path / STUB)
    changed = (tmp_path / STUB).read_bytes()
    assert len(changed) == len(original)
    differing = [place for place, pair in enumerate(zip(original, changed, strict=True)) if pair[0] != pair[1]]
    assert len(differing) == 5
    assert {(original[place], changed[place]) for place in differing} == {(0x20, 0x28)}
    for place in differing:  # movslq 0x20(%rax),%rax or mov 0x20(%rax),%eax
        assert original[place - 3 : place] == b"\x48\x63\x40" or original[place - 2 : place] == b"\x8b\x40"
    assert os.access(tmp_path / STUB, os.X_OK)


def test_numpy_1_takes_the_stub_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "1.26.4")
    stub.copy_stub(wheels_stub("3.11"), tmp_path / STUB)
    assert (tmp_path / STUB).read_bytes() == wheels_stub("3.11").read_bytes()


def test_no_other_program_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "2.4.6")
    (tmp_path / "other").write_bytes(wheels_stub("3.11").read_bytes() + b"\0")
    with pytest.raises(ServerError, match=r"must be the one of nvidia-pytriton 0\.7\.0.*numpy = 2\.4\.6.*pip install"):
        stub.copy_stub(tmp_path / "other", tmp_path / STUB)
    assert not (tmp_path / STUB).exists()


def test_a_model_does_not_start_with_a_stub_that_misreads_arrays() -> None:
    class Misread:
        def __init__(self, name: str, value: np.ndarray) -> None:
            self.value = value

        def as_numpy(self) -> np.ndarray:
            return np.full_like(self.value, self.value[0])

        @staticmethod
        def from_dlpack(name: str, tensor: Misread) -> Misread:
            return tensor

    with pytest.raises(ServerError, match=r"reads \[1, 1\] for \[1, 2\]; must be < 2.*pip install 'numpy<2'"):
        stub.require_readable_arrays(SimpleNamespace(Tensor=Misread))

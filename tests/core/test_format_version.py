"""Engine directories of other format versions: refused from wherever they are read, before anything else is told of them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.conftest import ROOT, BuildEngine, RandomModel

from kvseek.builder import build
from kvseek.builder.fingerprint import fingerprint
from kvseek.cli import demo
from kvseek.core.config import CONFIG_FILE, FORMAT_VERSION, read_config
from kvseek.core.errors import EngineDirectoryError
from kvseek.core.manifest import verify
from kvseek.engine.engine import Engine
from kvseek.engine.service import EngineService
from kvseek.server.launch import running_server
from kvseek.server.requests.models import LAYOUTS
from kvseek.server.settings import ServeSettings


@pytest.fixture
def engine(tmp_path: Path, random_model: RandomModel, build_engine: BuildEngine) -> Path:
    """An engine directory that a test may change."""
    return Path(shutil.copytree(build_engine(random_model("llama"), "full"), tmp_path / "my engine"))


@pytest.fixture
def outdated(engine: Path) -> Path:
    """An engine whose config.json is of version 1. The manifest is left as it was: the format is told before any checksum."""
    change(engine, format_version=1)
    return engine


def change(directory: Path, **values: object) -> None:
    path = directory / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def message(directory: Path, found: object) -> str:
    return (
        f"{directory / CONFIG_FILE}: format_version = {found!r}: must be {FORMAT_VERSION}, that of kvseek "
        f"{version('kvseek')}; make an engine from the checkpoint with kvseek build"
    )


def triton_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of all models of the repository, with Triton's own module replaced by an empty one."""
    stand_in = ModuleType("triton_python_backend_utils")
    stand_in.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
    spec = importlib.util.spec_from_file_location("repositorys_model", ROOT / "model_repository/model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel()


def serve(directory: Path) -> None:
    with running_server(directory):
        pass


@pytest.mark.parametrize("load", [read_config, Engine.load, EngineService.load, verify, serve])
def test_what_loads_an_engine_refuses_another_version(outdated: Path, load: Callable[[Path], object]) -> None:
    with pytest.raises(EngineDirectoryError) as caught:
        load(outdated)
    assert str(caught.value) == message(outdated, 1)


@pytest.mark.parametrize(
    ("layout", "name"), [(layout.name, name) for layout in LAYOUTS.values() for name in layout.models]
)
def test_the_triton_models_refuse_another_version(
    outdated: Path, layout: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(outdated / "tokenizer")  # the format is told before anything else is read
    values = {"model": name, "engine_dir": str(outdated), "settings": ServeSettings(layout=layout).to_json()}
    parameters = {key: {"string_value": value} for key, value in values.items()}
    with pytest.raises(EngineDirectoryError, match="format_version = 1: must be"):
        triton_model(monkeypatch).initialize({"model_config": json.dumps({"name": name, "parameters": parameters})})


@pytest.mark.parametrize("flags", [("--inspect",), ("--verify",), ("--check", "--output_dir")])
def test_the_builder_refuses_to_look_at_another_version(
    outdated: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    assert build.main([*flags, str(outdated)]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"error: {message(outdated, 1)}\n")


def test_the_demo_refuses_another_version(outdated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--document", "examples/harbour_log.txt", "--question", "Who?"]
    assert demo.main(["--engine_dir", str(outdated), *flags]) == 1
    assert capsys.readouterr().err == f"error: {message(outdated, 1)}\n"


@pytest.mark.parametrize("found", [FORMAT_VERSION + 1, 0, -1, None, True, "2", 2.0, [2]])
def test_what_is_another_version(engine: Path, found: object) -> None:
    change(engine, format_version=found)
    for load in (read_config, verify):
        with pytest.raises(EngineDirectoryError) as caught:
            load(engine)
        assert str(caught.value) == message(engine, found), "not a checksum that differs"


def test_no_version_at_all(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(EngineDirectoryError, match=r"format_version = None: must be .*kvseek build"):
        read_config(tmp_path)


@pytest.mark.parametrize("file", ["config.py", "weight_only.py", "rope.py"])
def test_another_layout_is_another_build(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, original = fingerprint({}, []), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: original(path) + b"#" * (path.name == file))
    assert fingerprint({}, []) != before

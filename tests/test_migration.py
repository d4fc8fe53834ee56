"""Engine directories of other format versions: refused from wherever they are read, with the command that rebuilds them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT, BuildEngine
from random_models import save_random_model

from kvseek.builder import build
from kvseek.builder.checkpoint import open_checkpoint
from kvseek.builder.manifest import fingerprint
from kvseek.builder.options import BuildOptions, parse
from kvseek.cli import demo
from kvseek.engine.config import CONFIG_FILE, FORMAT_VERSION, EngineConfig, ModelConfig
from kvseek.engine.engine import Engine
from kvseek.engine.errors import EngineDirectoryError
from kvseek.engine.manifest import verify
from kvseek.engine.service import EngineService
from kvseek.server.launch import running_server

FLAGS = ("--pariskv.top_k", "20", "--cache.sink", "8", "--max_seq_len", "512", "--kernels", "reference")
MODEL = ModelConfig("llama", 100, 64, 96, 2, 4, 2, 16, 1e-6, 1e6, 200_000)
THIS = f"kvseek {version('kvseek')}"
STEPS = '[{"below_tokens": null, "rho": 0.2, "beta": 0.1}]'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture
def engine(model: Path, tmp_path: Path, build_engine: BuildEngine) -> Path:
    """A copy of an engine directory that a test may change."""
    return Path(shutil.copytree(build_engine(model, "pariskv", *FLAGS), tmp_path / "my engine"))


@pytest.fixture
def outdated(engine: Path) -> Path:
    """The engine as version 1 laid it out. The manifest is left as it was: the format is told before any checksum."""
    write_version_1(engine, EngineConfig.load(engine))
    (engine / "rank0-00001-of-00001.safetensors").rename(engine / "weights-00001-of-00001.safetensors")
    index = (engine / "rank0.index.json").read_text()
    (engine / "weights.index.json").write_text(index.replace("rank0-0", "weights-0"))
    (engine / "rank0.index.json").unlink()
    return engine


def write_version_1(directory: Path, config: EngineConfig, **changes: object) -> None:
    """Write config.json as version 1 had it."""
    document = {"format_version": 1, **dataclasses.asdict(config), **changes}
    directory.mkdir(exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(document, indent=2) + "\n")


def change(directory: Path, **values: object) -> None:
    path = directory / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(directory: Path) -> str:
    with pytest.raises(EngineDirectoryError) as caught:
        EngineConfig.load(directory)
    return str(caught.value)


def parsed(message: str, model: str = "checkpoint") -> BuildOptions:
    """Options of the command that ends a refusal, with MODEL filled in."""
    words = shlex.split(message.splitlines()[-1])
    assert words[:2] == ["kvseek", "build"]
    options = parse([model if word == "MODEL" else word for word in words[2:]])
    assert isinstance(options, BuildOptions)
    return options


def triton_model(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of a model of the repository, with Triton's own module replaced by an empty one."""
    stand_in = ModuleType("triton_python_backend_utils")
    stand_in.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
    spec = importlib.util.spec_from_file_location(f"{name}_model", ROOT / f"model_repository/{name}/1/model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel()


def serve(directory: Path) -> None:
    with running_server(directory):
        pass


@pytest.mark.parametrize("load", [EngineConfig.load, Engine.load, EngineService.load, verify, serve])
def test_what_loads_an_engine_refuses_version_1(outdated: Path, load: Callable[[Path], object]) -> None:
    with pytest.raises(EngineDirectoryError) as caught:
        load(outdated)
    message = str(caught.value)
    assert message.startswith(f"{outdated} is an engine of format version 1, {THIS} reads version 2: config.json")
    assert "pretrained_config and build_config" in message
    assert "rank0-*.safetensors with rank0.index.json" in message
    assert "config.json does not state --tokenizer: add" in message
    assert message.splitlines()[1:] == [
        f"kvseek build --model MODEL --method pariskv --output_dir '{outdated}' --kernels reference --max_seq_len 512 "
        "--cache.sink 8 --pariskv.top_k 20"
    ]


@pytest.mark.parametrize("name", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_the_triton_models_refuse_version_1(outdated: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(outdated / "tokenizer")  # the format is told before anything else is read
    parameters = {"engine_dir": {"string_value": str(outdated)}, "threads": {"string_value": "1"}}
    with pytest.raises(EngineDirectoryError, match="is an engine of format version 1"):
        triton_model(name, monkeypatch).initialize(
            {"model_config": json.dumps({"name": name, "parameters": parameters})}
        )


@pytest.mark.parametrize("flags", [("--inspect",), ("--verify",)])
def test_the_builder_refuses_to_look_at_version_1(
    outdated: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    assert build.main([*flags, str(outdated)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"error: {refusal(outdated)}\n"


def test_the_demo_refuses_version_1(outdated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--document", "examples/harbour_log.txt", "--question", "Who?"]
    assert demo.main(["--engine_dir", str(outdated), *flags]) == 1
    assert capsys.readouterr().err == f"error: {refusal(outdated)}\n"


def test_the_command_builds_over_version_1(model: Path, engine: Path, tmp_path: Path) -> None:
    original = EngineConfig.load(engine)
    write_version_1(engine, original)
    words = shlex.split(refusal(engine).splitlines()[-1])[2:]
    assert build.main([str(model) if word == "MODEL" else word for word in words] + ["--quiet"]) == 0
    verify(engine)
    assert EngineConfig.load(engine) == original
    assert [path.name for path in tmp_path.iterdir()] == [engine.name]


@pytest.mark.parametrize("file", ["config_file.py", "weight_only.py", "rope.py"])
def test_another_layout_is_another_build(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, original = fingerprint({}, []), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: original(path) + b"#" * (path.name == file))
    assert fingerprint({}, []) != before


@pytest.mark.parametrize(
    "flags",
    [
        ("--method", "full"),
        ("--method", "full", "--dtype", "bfloat16", "--max_batch_size", "9", "--prefill_chunk_tokens", "1024"),
        ("--method", "pariskv", "--pariskv.schedule_steps", STEPS, "--pariskv.alpha_correction", "false"),
        ("--method", "pariskv", "--pariskv.group_reduce", "mean", "--max_input_len", "100", "--max_seq_len", "300"),
        (
            "--method",
            "clusterkv",
            "--clusterkv.top_k",
            "512",
            "--cache.sink",
            "64",
        ),  # the engine's default, not the method's
        ("--method", "prkv", "--prkv.box_radius", "0.5", "--prkv.share_rule", "auto", "--prkv.page", "16"),
        (
            *("--method", "ctkvr", "--device", "cuda", "--dtype", "float16", "--cache.offload", "always"),
            *("--cache.kv_cache_host_memory_bytes", "1000000"),
        ),
        ("--method", "flat", "--kernels", "reference", "--cache.full_threshold", "0"),
    ],
)
def test_the_command_has_the_flags_of_the_build(tmp_path: Path, flags: tuple[str, ...]) -> None:
    directory = tmp_path / "engine"
    options = parse(["--model", "checkpoint", "--output_dir", str(directory), *flags])
    assert isinstance(options, BuildOptions)
    config = options.engine_config(MODEL)
    write_version_1(directory, config)
    found = parsed(refusal(directory))
    assert found.limits.pop("max_seq_len") == config.max_seq_len
    options.limits.pop("max_seq_len", None)  # stated even where it was not given: its default depends on the model
    assert found == options
    assert found.method_config == options.method_config


def test_the_defaults_are_left_out(tmp_path: Path) -> None:
    write_version_1(tmp_path / "engine", EngineConfig(MODEL, "full"))
    command = f"kvseek build --model MODEL --method full --output_dir {tmp_path}/engine --max_seq_len 8192"
    assert refusal(tmp_path / "engine").splitlines()[-1] == command


def test_flags_that_config_json_never_had_are_named(tmp_path: Path) -> None:
    write_version_1(tmp_path / "engine", EngineConfig(MODEL, "full", device="cuda"))
    assert "does not state --tokenizer and --cuda_archs: add what the engine was built with" in refusal(
        tmp_path / "engine"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "parisqv"}, "method = 'parisqv': unknown; choose one of full"),
        ({"method": ["full"]}, "config.json: method = ['full']: must be str"),
        ({"method_config": {"top_k": 5}}, "full: unknown key 'top_k'"),
        ({"cache": {"sink": -1}}, "cache.sink = -1: must be >= 0"),
        ({"colour": "red"}, "config.json: unknown key 'colour'"),
        ({"model": None}, "config.json: model = None: must be an object"),
    ],
)
def test_a_garbled_version_1_says_which_flags_are_lost(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    directory = tmp_path / "an engine"
    write_version_1(directory, EngineConfig(MODEL, "full"), **changes)
    message = refusal(directory)
    assert "is an engine of format version 1" in message
    assert f"its flags cannot be read ({reason}" in message
    assert message.splitlines()[-1] == f"kvseek build --model MODEL --method METHOD --output_dir '{directory}'"


@pytest.mark.parametrize(
    ("values", "writer"), [({}, THIS), ({"version": "7.1"}, "kvseek 7.1"), ({"version": 7}, "a newer kvseek")]
)
def test_a_version_of_the_future(
    engine: Path, capsys: pytest.CaptureFixture[str], values: dict[str, object], writer: str
) -> None:
    change(engine, format_version=FORMAT_VERSION + 1, **values)
    message = (
        f"{engine} is an engine of format version 3, written by {writer}; {THIS} reads version 2: install the "
        "kvseek that wrote it or a newer one, or build an engine with this one"
    )
    assert refusal(engine) == message
    for flag in ("--inspect", "--verify"):
        assert build.main([flag, str(engine)]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("found", [0, -1, None, True, "1", 2.0, [2]])
def test_what_is_no_version(engine: Path, found: object) -> None:
    change(engine, format_version=found)
    message = (
        f"format_version = {found!r}: must be a whole number >= 1, 2 for this kvseek; the file is damaged or was edited"
    )
    assert message in refusal(engine)
    with pytest.raises(EngineDirectoryError) as caught:
        verify(engine)
    assert message in str(caught.value), "not a checksum that differs"


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        ({"version": "1.0", "pretrained_config": {}, "build_config": {}}, "the engine that trtllm-build wrote"),
        ({"architectures": ["LlamaForCausalLM"]}, "a model's checkpoint"),
    ],
)
def test_no_version_at_all(tmp_path: Path, document: dict[str, object], kind: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps(document))
    message = refusal(tmp_path)
    assert f"{tmp_path / CONFIG_FILE} has no format_version: {tmp_path} is no engine directory of kvseek" in message
    assert f"if it is {kind}, make an engine with kvseek build" in message


def test_this_version_is_read(model: Path, engine: Path) -> None:
    config = EngineConfig.load(engine)
    verify(engine)
    assert config.model == open_checkpoint(model).config
    assert config.max_seq_len == 512

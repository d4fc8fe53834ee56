"""`kvseek build --runtime tensorrt`: engine directories with real plans of TensorRT for RTX, of which none is run."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine
from tests.support.random_models import ARCHITECTURES, save_random_model
from tests.support.tensorrt_stand_ins import with_plugin_layers

from kvseek.builder import build
from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import weight_reader
from kvseek.builder.tensorrt.plans import weight_bytes, write_plans
from kvseek.core.config import EngineConfig, TensorRtConfig, read_config
from kvseek.core.errors import KernelError
from kvseek.core.manifest import read_manifest, verify
from kvseek.core.model_config import ModelConfig
from kvseek.engine.model.weights import list_weights
from kvseek.engine.tensorrt.plan_files import PLANS_FILE
from kvseek.plugins.tensorrt.fields import AttentionFields


def read_index(directory: Path) -> dict[str, Any]:
    """What rank0.plans.json says."""
    index: dict[str, Any] = json.loads((directory / PLANS_FILE).read_text())
    return index


def read_files(directory: Path) -> list[bytes]:
    """The plans of a directory, in order."""
    return [(directory / segment["file"]).read_bytes() for segment in read_index(directory)["segments"]]


def check_weights(plans: list[bytes], checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Fail unless every matrix lies, bit for bit, in the segments that use it and in none beside them.

    Copies farther away would show in the size of the plans; searching all plans for all matrices takes minutes.
    """
    read, tied = weight_reader(checkpoint, dtype), checkpoint.config.tie_word_embeddings
    for weight in list_weights(checkpoint.config):
        rearranged = "gate_up" in weight.name and dtype != torch.float32  # TensorRT stores it in an order of its own
        if len(weight.shape) == 2 and not rearranged:
            values = read(weight.name)
            expected = home(weight.name, len(plans), tied)
            near = {number + step for number in expected for step in (-1, 0, 1)} & set(range(len(plans)))
            assert {number for number in near if holds(plans[number], values)} == expected, weight.name


def holds(plan: bytes, weight: torch.Tensor) -> bool:
    """Whether a plan has a weight's values, bit for bit and in order: it keeps matrices as they were given."""
    return weight.contiguous().view(torch.uint8).numpy().tobytes() in plan


def home(name: str, segments: int, tied: bool) -> set[int]:
    """Segments that use a matrix: `qkv` comes before a layer's attention, what follows it is in the next segment."""
    if name == "embed.weight":
        return {0, segments - 1} if tied else {0}
    if name == "lm_head.weight":
        return {segments - 1}
    _, layer, part, _ = name.split(".")
    return {int(layer) + (part != "qkv")}


def check_products(plans: list[bytes], model: ModelConfig) -> None:
    """Fail unless every segment has the matrix products of its layers, and no other layer's."""
    found = [products(plan) for plan in plans]
    expected: list[set[bytes]] = [set() for _ in plans]
    for layer in range(model.num_layers):
        expected[layer].add(f"layers.{layer}.qkv".encode())
        expected[layer + 1] |= {f"layers.{layer}.{part}".encode() for part in ("o", "gate_up", "down")}
    expected[-1].add(b"lm_head")
    assert found == expected


def products(plan: bytes) -> set[bytes]:
    """Names of a plan's matrix products.

    In 16 bits gate_up and what follows it are one operation, of a name of TensorRT's own; its result keeps the layer's.
    """
    names = set(re.findall(rb'fully_connected={ name="([^"]*)"', plan))
    own = {name for name in names if name.startswith(b"__mye")}
    results = set(re.findall(rb"slice\((layers\.\d+\.gate_up)_output\)", plan))
    assert len(own) in (0, len(results)), own
    return names - own | results


def check_profile(plans: list[bytes], index: dict[str, Any]) -> None:
    """Fail unless every plan has the names and the largest sizes that the index states, and computes without TF32."""
    tokens, rows = (index["limits"][name]["maximum"] for name in ("tokens", "rows"))
    for number, (plan, segment) in enumerate(zip(plans, index["segments"], strict=True)):
        assert f"segment_{number}".encode() in plan
        assert all(name.encode() in plan for name in (*segment["inputs"], *segment["outputs"]))
        assert b"tf32=1" not in plan
        assert f"is out of bounds [1, {tokens}]".encode() in plan
    assert f"is out of bounds [1, {rows}]".encode() in plans[-1]


def expected_segments(config: EngineConfig) -> list[dict[str, Any]]:
    """What the index must say of the segments of an engine."""
    model = config.model
    kind = {"float32": "FLOAT", "bfloat16": "BF16", "float16": "HALF"}[config.dtype]

    def tensor(*shape: int, dtype: str = kind) -> dict[str, Any]:
        return {"dtype": dtype, "shape": [-1, *shape]}

    heads, rows = tensor(model.num_heads, model.head_dim), tensor(model.num_kv_heads, model.head_dim)
    hidden, ids = tensor(model.hidden_size), tensor(dtype="INT32")
    rotation = dict.fromkeys(("cos", "sin"), tensor(1, model.head_dim // 2))
    made = {"queries": heads, "keys": rows, "values": rows, "next_hidden": hidden}
    taken = {"attended": heads, "hidden": hidden}
    first = {"inputs": {"ids": ids, "positions": ids}, "outputs": made | rotation}
    middle = {"inputs": taken | rotation, "outputs": made}
    logits = {"logits": tensor(model.vocab_size, dtype="FLOAT")}
    last = {"inputs": taken | {"rows": ids}, "outputs": logits}
    parts = [first, *[middle] * (model.num_layers - 1), last]
    names = [f"rank0/segment-{number:05}-of-{len(parts):05}.plan" for number in range(len(parts))]
    return [{"file": name, **part} for name, part in zip(names, parts, strict=True)]


api = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed: pip install tensorrt-rtx-cu13")

CUDA = ("--device", "cuda", "--cuda_archs", "90", "--dtype", "bfloat16")
SEGMENTS = (*CUDA, "--runtime", "tensorrt", "--tensorrt.module", "tensorrt_rtx", "--tensorrt.form", "segments")
LIMITS = ("--max_batch_size", "8", "--max_seq_len", "128", "--max_input_len", "100", "--prefill_chunk_tokens", "64")
PLAN_OVERHEAD = 1 << 20  # bytes that a plan takes at most beside weights and tables: code; these take 0.7 MB each


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tied = save_random_model(folder / "tied", "llama", tie_word_embeddings=True)
    return {"tied": tied} | {name: save_random_model(folder / name, name) for name in ARCHITECTURES}


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cubins are of no interest here, and take longer than plans."""
    monkeypatch.setattr(build, "cached_cubins", lambda *arguments: {90: b"cubin"})


def run(model: Path, output_dir: Path, *flags: str) -> int:
    return build.main(["--model", str(model), "--method", "full", "--output_dir", str(output_dir), "--quiet", *flags])


def check_engine(directory: Path, model: Path) -> None:
    """Fail unless an engine of segments is its model's, as far as files tell."""
    verify(directory)
    config, index, checkpoint = read_config(directory), read_index(directory), open_checkpoint(model)
    assert config.model == checkpoint.config
    assert (config.runtime, config.tensorrt.module, config.tensorrt.form) == ("tensorrt", "tensorrt_rtx", "segments")
    assert (index["module"], index["version"], index["form"]) == ("tensorrt_rtx", api.__version__, "segments")
    assert (index["dtype"], index["max_seq_len"]) == (config.dtype, config.max_seq_len)
    most = max(config.max_batch_size, min(config.prefill_chunk_tokens, config.max_input_len))
    batch = config.max_batch_size
    assert index["limits"] == {
        "tokens": {"minimum": 1, "optimum": batch, "maximum": most},
        "rows": {"minimum": 1, "optimum": batch, "maximum": batch},
    }
    assert index["segments"] == expected_segments(config)
    plans = read_files(directory)
    check_profile(plans, index)
    check_products(plans, config.model)
    check_weights(plans, checkpoint, getattr(torch, config.dtype))
    written = {path.relative_to(directory).as_posix() for path in directory.glob("**/*") if path.is_file()}
    assert written == {*read_manifest(directory).files, "manifest.json"}
    assert {name for name in written if "rank0" in name} == {
        "rank0.plans.json",
        *(segment["file"] for segment in index["segments"]),
    }
    assert not [name for name in written if name.startswith("weights")]
    tables = config.max_seq_len * config.model.head_dim * getattr(torch, config.dtype).itemsize
    beside = sum(len(plan) for plan in plans) - weight_bytes(config) - tables
    assert 0 < beside < len(plans) * PLAN_OVERHEAD


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*((name, "bfloat16") for name in ARCHITECTURES), ("llama", "float32"), ("qwen2", "float16"), ("tied", "bfloat16")],
)
def test_segments(architecture: str, dtype: str, models: dict[str, Path], tmp_path: Path, no_kernels: None) -> None:
    assert run(models[architecture], tmp_path / "engine", *SEGMENTS, *LIMITS, "--dtype", dtype) == 0
    check_engine(tmp_path / "engine", models[architecture])
    assert (tmp_path / "engine/kernels/sm_90.cubin").read_bytes() == b"cubin"


def test_needle_model(needle_folder: Path, tmp_path: Path, no_kernels: None) -> None:
    """A trained Qwen3 model."""
    assert run(needle_folder / "model", tmp_path / "engine", *SEGMENTS, "--max_seq_len", "4096") == 0
    check_engine(tmp_path / "engine", needle_folder / "model")


@pytest.fixture
def plugin_api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TensorRT for RTX under the name of `tensorrt`, with plugin layers that pass on their queries."""
    module = with_plugin_layers(api)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module


def test_one_plan(
    models: dict[str, Path],
    tmp_path: Path,
    plugin_api: Any,
    no_kernels: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of form "engine" but attention itself: TensorRT for RTX builds the plan, with plugin layers stood in for."""
    directory = tmp_path / "engine"
    limits = ("--max_batch_size", "8", "--max_seq_len", "128", "--max_input_len", "100")
    assert run(models["qwen3"], directory, *CUDA, "--runtime", "tensorrt", *limits) == 0
    verify(directory)
    config, index = read_config(directory), read_index(directory)
    assert (config.tensorrt.module, config.tensorrt.form) == ("tensorrt", "engine")
    assert config.prefill_chunk_tokens == config.max_input_len == 100, "a prompt is one call"
    assert (index["module"], index["version"], index["form"]) == ("tensorrt", "10.13", "engine")
    assert index["limits"]["tokens"] == {"minimum": 1, "optimum": 8, "maximum": 100}
    ids, logits = {"dtype": "INT32", "shape": [-1]}, {"dtype": "FLOAT", "shape": [-1, 384]}
    inputs = dict.fromkeys(("ids", "positions", "rows"), ids)
    assert index["segments"] == [{"file": "rank0.engine", "inputs": inputs, "outputs": {"logits": logits}}]
    (network,) = plugin_api.networks
    found = [(layer.name, inputs, plugin.fields) for layer, inputs, plugin in network.plugins]
    shapes = [(-1, 6, 32), (-1, 2, 32), (-1, 2, 32)]
    assert found == [
        (f"layers.{layer}.attention", shapes, AttentionFields(layer, 6, 2, 32, "bfloat16")) for layer in range(3)
    ]
    (plan,) = read_files(directory)
    assert len(plan) > weight_bytes(config)
    assert b"is out of bounds [1, 100]" in plan
    assert not (directory / "rank0").exists()
    assert build.main(["--inspect", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "rank0.engine" in text
    assert "1 to 100, best at 8" in text


def test_the_other_form_is_another_engine(
    models: dict[str, Path], tmp_path: Path, plugin_api: Any, no_kernels: None
) -> None:
    directory, whole = tmp_path / "engine", (*CUDA, "--runtime", "tensorrt", "--max_seq_len", "128")
    for form, plans in (("engine", 1), ("segments", 4), ("engine", 1)):
        assert run(models["llama"], directory, *whole, "--tensorrt.form", form) == 0
        verify(directory)
        assert read_config(directory).tensorrt.form == form
        assert len(read_files(directory)) == plans
        assert (directory / "rank0.engine").exists() == (form == "engine")


@pytest.mark.parametrize(("name", "package"), [("tensorrt", "tensorrt-cu13"), ("tensorrt_rtx", "tensorrt-rtx-cu13")])
def test_absent_module(
    name: str,
    package: str,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Known before the tokenizer is read or a kernel compiled."""
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(build, "atomic_directory", None)
    flags = (*CUDA, "--runtime", "tensorrt", "--tensorrt.module", name, "--tensorrt.form", "segments")
    assert run(models["llama"], tmp_path / "engine", *flags) == 1
    message = capsys.readouterr().err
    assert f"cannot import {name}: " in message
    assert f"pip install {package}" in message


@pytest.fixture(scope="module")
def built(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("built") / "engine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "cached_cubins", lambda *arguments: {90: b"cubin"})
        assert run(models["qwen2"], directory, *SEGMENTS, *LIMITS) == 0
    return directory


@pytest.fixture
def engine(built: Path, tmp_path: Path, no_kernels: None) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(built, tmp_path / "engine"))


def test_built_again_with_another_version(
    engine: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan runs with the version that built it alone; the same flags and version are up to date."""
    first = read_manifest(engine).fingerprint
    before = engine.stat().st_ino
    assert run(models["qwen2"], engine, *SEGMENTS, *LIMITS) == 0
    assert engine.stat().st_ino == before
    newer: Any = ModuleType("tensorrt_rtx")
    newer.__dict__.update({key: value for key, value in vars(api).items() if not key.startswith("__")})
    newer.__version__ = "9.9"
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", newer)
    assert run(models["qwen2"], engine, *SEGMENTS, *LIMITS) == 0
    assert engine.stat().st_ino != before
    assert read_manifest(engine).fingerprint != first
    assert read_index(engine)["version"] == "9.9"


def test_a_failure_leaves_the_old_engine(
    engine: Path,
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = read_index(engine)

    class Broken:
        def __init__(self, logger: Any) -> None:
            raise TypeError("factory function returned nullptr")

    monkeypatch.setattr(api, "Builder", Broken)
    assert run(models["qwen2"], engine, *SEGMENTS, *LIMITS, "--force") == 1
    assert "cannot begin to build with tensorrt_rtx" in capsys.readouterr().err
    assert [path.name for path in engine.parent.iterdir()] == ["engine"]
    verify(engine)
    assert read_index(engine) == before


def test_inspect_and_verify(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--inspect", str(engine), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plans"] == read_index(engine)
    assert document["tensorrt"] == {"module": "tensorrt_rtx", "form": "segments"}
    assert build.main(["--inspect", str(engine)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "runtime tensorrt",
        f"version {api.__version__}",
        "tokens of a call 1 to 64, best at 8",
        "ids INT32 [*]",
    ):
        assert part in text
    assert text.count("next_hidden BF16") == 2, "segments that are alike are listed together"
    assert build.main(["--verify", str(engine)]) == 0
    plan = engine / "rank0/segment-00002-of-00004.plan"
    content = bytearray(plan.read_bytes())
    content[len(content) // 2] ^= 1
    plan.write_bytes(content)
    capsys.readouterr()
    assert build.main(["--verify", str(engine)]) == 1
    assert "damaged  rank0/segment-00002-of-00004.plan" in capsys.readouterr().out


def test_damaged_index(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What else may be wrong with it: tests/engine/tensorrt/test_runtime.py."""
    (engine / "rank0.plans.json").write_text('{"module": "tensorrt"}')
    assert build.main(["--inspect", str(engine)]) == 1
    found = capsys.readouterr().err
    assert "rank0.plans.json" in found
    assert "key 'version' is missing" in found
    (engine / "rank0.plans.json").unlink()
    assert build.main(["--inspect", str(engine)]) == 1
    assert "rank0.plans.json is missing; build the engine again" in capsys.readouterr().err


def test_torch_engines_have_no_plans(
    models: dict[str, Path], build_engine: BuildEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = build_engine(models["llama"], "full", "--kernels", "reference")
    assert build.main(["--inspect", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"] is None


def test_weight_of_another_shape_is_an_error(models: dict[str, Path], tmp_path: Path) -> None:
    checkpoint, progress = open_checkpoint(models["qwen2"]), list[int]()
    runtime = {"runtime": "tensorrt", "tensorrt": TensorRtConfig("tensorrt_rtx", "segments")}
    config = EngineConfig(checkpoint.config, "full", device="cuda", max_seq_len=128, max_input_len=100, **runtime)
    read = weight_reader(checkpoint, torch.float32)

    def wrong(name: str) -> torch.Tensor:
        return read(name)[:, :-1] if name == "layers.1.down.weight" else read(name)

    with pytest.raises(
        KernelError, match=r"layer layers\.1\.down of network .segment_2. is refused by tensorrt_rtx .*dim"
    ):
        write_plans(api, config, wrong, tmp_path, progress.append)
    assert progress == [1] * 2, "two segments were written"

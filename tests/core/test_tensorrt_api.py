"""Loading of TensorRT's modules, who never meets it, and the sizes that plans are made for: what needs no TensorRT."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import RandomModel

from kvseek.builder import build
from kvseek.builder.tensorrt.plans import limits_of, plan_count, weight_bytes, write_plans
from kvseek.core.config import EngineConfig, TensorRtConfig
from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.model_config import ModelConfig
from kvseek.core.tensorrt_api import PACKAGES, import_tensorrt
from kvseek.engine.tensorrt.plan_files import Sizes


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    return random_model("llama")


@pytest.mark.parametrize("name", PACKAGES)
def test_absent_module_names_its_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(KernelError, match=f"cannot import {name}: .*pip install {PACKAGES[name]}"):
        import_tensorrt(name)


def test_other_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="TensorRT module = 'json': must be one of tensorrt_rtx, tensorrt"):
        import_tensorrt("json")


@pytest.mark.parametrize("sizes", [(0, 1, 2), (2, 1, 3), (1, 4, 3)])
def test_sizes_out_of_order_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="minimum <= optimum <= maximum"):
        Sizes(*sizes)


@pytest.mark.parametrize(
    ("form", "chunk", "input_len", "most"),
    [
        *(("segments", 64, 100, 64), ("segments", 200, 100, 100), ("segments", 4, 100, 8)),
        *(("engine", 4, 100, 100), ("engine", 4, 5, 8)),
    ],
)
def test_sizes_of_plans(form: str, chunk: int, input_len: int, most: int) -> None:
    """A call holds a token of each request or, if that is more, a chunk of a prompt; of one plan a whole prompt."""
    model = ModelConfig("llama", 100, 64, 128, 2, 4, 2, 16, 1e-5, 1e4, 128)
    limits = {"max_batch_size": 8, "prefill_chunk_tokens": chunk, "max_input_len": input_len, "max_seq_len": 128}
    plans = {"device": "cuda", "runtime": "tensorrt", "tensorrt": TensorRtConfig(form=form)}
    found = limits_of(EngineConfig(model, "full", **plans, **limits))
    assert (found.tokens, found.rows) == (Sizes(1, 8, most), Sizes(1, 8, 8))


def test_bytes_of_the_weights() -> None:
    """A tied head's matrix, 100 × 64, is in two segments; one plan holds it once."""
    model = ModelConfig("llama", 100, 64, 128, 2, 4, 2, 16, 1e-5, 1e4, 8192)
    sizes = {}
    for tied in (False, True):
        for form in ("engine", "segments"):
            own = dataclasses.replace(model, tie_word_embeddings=tied)
            options = {"device": "cuda", "runtime": "tensorrt", "tensorrt": TensorRtConfig(form=form)}
            config = EngineConfig(own, "full", dtype="bfloat16", **options)
            sizes[tied, form] = weight_bytes(config)
            assert plan_count(config) == {"engine": 1, "segments": 3}[form]
    matrix = 100 * 64 * 2
    layers = 2 * 2 * (2 * 64 + 64 * 128 + 64 * 64 + 3 * 64 * 128)
    assert sizes[False, "engine"] == sizes[False, "segments"] == sizes[True, "segments"] == 2 * matrix + layers + 64 * 2
    assert sizes[True, "engine"] == matrix + layers + 64 * 2


WITHOUT_IT = """
import dataclasses, sys
from pathlib import Path

sys.modules["cuda"] = None  # an import of it fails
import kvseek.core.cuda
import torch
from kvseek.builder import build
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.engine.loading.runtime import load_runtime

def met():
    parts = ("builder", "engine", "plugins")
    return [name for name in sys.modules if name.startswith(tuple(f"kvseek.{part}.tensorrt" for part in parts))]

directory, basis = Path(sys.argv[2]), ["--model", sys.argv[1], "--method", "full"]
assert build.main([*basis, "--output_dir", str(directory), "--kernels", "reference", "--no-check", "--quiet"]) == 0
assert build.main(["--inspect", str(directory)]) == 0
assert build.main(["--plan", *basis, "--gpu_memory", "4GiB", "--host_memory", "4GiB"]) == 0
engine = Engine.load(directory)
engine.generate([Request((5, 6, 7), 3)])
config = dataclasses.replace(engine.config, device="cuda", kernels="native")
assert load_runtime(directory, config, torch.device("cpu"))[0].weights > 0
assert not met(), met()
import kvseek.plugins.tensorrt.plugin
assert met(), "these are the names"
assert not {"tensorrt", "tensorrt_rtx"} & set(sys.modules), "nor does the plugin import it before it is asked to"
"""


def test_engines_without_it_never_meet_it(model: Path, tmp_path: Path) -> None:
    """Building, inspecting, asking what fits, loading and generating import nothing of it for engines of runtime torch.

    And those for the CPU nothing of cuda, where core.cuda can be imported too.
    """
    command = [sys.executable, "-c", WITHOUT_IT, str(model), str(tmp_path / "engine")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_script_finds_tensorrts_own_module(model: Path, tmp_path: Path) -> None:
    """Python searches the folder of builder/build.py first, in which there is a folder tensorrt/."""
    (tmp_path / "tensorrt.py").write_text("raise ImportError('not that of the builder')")
    command = [sys.executable, str(Path(build.__file__)), "--model", str(model), "--method", "full", "--device", "cuda"]
    flags = ["--runtime", "tensorrt", "--tensorrt.module", "tensorrt", "--output_dir", str(tmp_path / "engine")]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [*command, *flags], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert run.returncode == 1
    assert "cannot import tensorrt: not that of the builder; pip install tensorrt-cu13" in run.stderr


def test_tensorrt_without_a_gpu(tmp_path: Path) -> None:
    """The bindings of a TensorRT that finds no GPU answer with a null pointer, and tell the logger why."""

    class ILogger:
        Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2, INFO=3)

    def builder(logger: Any) -> None:
        logger.log(3, "chatter")
        logger.log(1, "no CUDA device")
        raise TypeError("factory function returned nullptr")

    api: Any = ModuleType("tensorrt")
    api.__version__, api.ILogger, api.Builder = "11.0", ILogger, builder
    config = EngineConfig(ModelConfig("llama", 100, 64, 128, 2, 4, 2, 16, 1e-5, 1e4, 8192), "full")
    with pytest.raises(KernelError, match=r"with tensorrt 11\.0: no CUDA device \(.*nullptr\); tensorrt needs a GPU"):
        write_plans(api, config, torch.zeros, tmp_path)

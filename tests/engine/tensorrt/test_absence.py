"""Engines of runtime torch never meet TensorRT's code."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import BuildEngine, RandomModel

SCRIPT = """
import dataclasses, pathlib, sys, torch
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.engine.loading.runtime import load_runtime

def met():
    return [name for name in sys.modules if name.startswith(("kvseek.engine.tensorrt", "kvseek.plugins.tensorrt"))]

directory = pathlib.Path(sys.argv[1])
engine = Engine.load(directory)
engine.generate([Request((5, 6, 7), 3)])
config = dataclasses.replace(engine.config, device="cuda", kernels="native")
assert load_runtime(directory, config, torch.device("cpu"))[0].weights > 0
assert not met(), met()
import kvseek.engine.tensorrt.runtime
assert met(), "these are the names"
"""


def test_loading_and_running_import_nothing_of_it(random_model: RandomModel, build_engine: BuildEngine) -> None:
    directory = build_engine(random_model("llama"), "full", "--kernels", "reference")
    command = [sys.executable, "-c", SCRIPT, str(directory)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr

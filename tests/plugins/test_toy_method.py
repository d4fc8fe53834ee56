"""A method is one folder: laid into a copy of the tree, it is in the wheel, and answers a prompt where that is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.support.random_models import save_random_model

pytestmark = pytest.mark.slow

SERVE = """
import json, sys
import kvseek.plugins.toy as toy
from kvseek import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    (output,) = llm.generate(range(5, 305), SamplingParams(max_tokens=8, ignore_eos=True))
    print(json.dumps({"method": llm.config.method, "tokens": len(output.token_ids), "from": toy.__file__}))
"""


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=os.environ | environment, cwd="/"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_a_folder_is_all_that_a_method_takes(tmp_path: Path) -> None:
    copy, wheels, bare = tmp_path / "copy", tmp_path / "wheels", tmp_path / "bare"
    folders = [path.parent.name for path in ROOT.glob("[a-z]*/__init__.py")]
    for name in (*folders, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(source, copy / name)
    shutil.copytree(ROOT / "tests/plugins/toy_method", copy / "plugins/toy")
    run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, copy)
    (wheel,) = wheels.glob("*.whl")
    run("-m", "pip", "install", "-q", "--no-deps", "--target", bare, wheel)
    model = save_random_model(tmp_path / "model", "llama")
    flags = ["--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32"]
    command = ["-m", "kvseek.cli.main", "build", "--model", model, "--method", "toy", "--toy.top_k", "20", *flags]
    run(*command, "--output_dir", tmp_path / "engine", "--quiet", PYTHONPATH=str(bare))
    answer = json.loads(run("-c", SERVE, tmp_path / "engine", PYTHONPATH=str(bare)))
    assert answer == {"method": "toy", "tokens": 8, "from": str(bare / "kvseek/plugins/toy/__init__.py")}

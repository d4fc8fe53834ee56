"""The first command on a machine: which Python `make` takes, and what a machine without a fitting one is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.conftest import ROOT

PREFLIGHT = ROOT / "examples/preflight.py"


def interpreters() -> dict[str, str]:
    """Pythons of this machine since 3.6, by their version; shims of version managers that have none behind them are left out."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    folders += (Path.home() / ".pyenv/versions").glob("*/bin")
    found = {}
    for name in (f"python3.{minor}" for minor in range(6, 20)):
        for path in (folder / name for folder in folders):
            if path.exists():
                answer = subprocess.run([path, "-c", "print(1)"], capture_output=True, check=False)
                if answer.returncode == 0:
                    found.setdefault(name, str(path))
    return found


def test_the_preflight_runs_under_every_python() -> None:
    found = interpreters()
    assert found
    for name, path in found.items():
        result = subprocess.run([path, PREFLIGHT], capture_output=True, text=True, check=False)
        assert "Traceback" not in result.stderr, name
        if name in ("python3.11", "python3.12", "python3.13"):
            assert "must be 3.11" not in result.stderr
        else:
            assert result.returncode == 1
            version = name.removeprefix("python")
            assert re.fullmatch(
                rf"error: Python {version}: must be 3.11, 3.12 or 3.13, .*; apt-get install .*\n", result.stderr
            )


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"python3": True, "python3.12": True}, "python3"),
        ({"python3": False, "python3.13": True, "python3.12": True, "python3.11": True}, "python3.13"),
        ({"python3": False, "python3.12": True, "python3.11": True}, "python3.12"),
        ({"python3": False, "python3.11": True}, "python3.11"),
        ({"python3.12": False}, "python3"),
    ],
)
def test_make_takes_a_python_that_fits(there: dict[str, bool], taken: str, tmp_path: Path) -> None:
    """Stand-ins that say whether their version fits."""
    for name in ("sh", "make", "echo"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    for name, fits in there.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {int(not fits)}\n")
        (tmp_path / name).chmod(0o755)
    command = ["make", "--no-print-directory", "--eval", "shown: ; @echo $(PYTHON)", "shown"]
    environment = {"PATH": str(tmp_path)}
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == taken


def test_all_places_name_the_same_versions() -> None:
    supported = re.search(r"SUPPORTED = (.*)", PREFLIGHT.read_text())
    assert f"({supported[1]})" in (ROOT / "Makefile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "Python 3.11, 3.12 or 3.13" in (ROOT / "README.md").read_text()
    assert sys.version_info[:2] in ((3, 11), (3, 12), (3, 13))

"""Installs kvseek into a virtual environment: the steps of the Dockerfile. `make check-install` runs those of target cpu.

The two steps are separate because the first one, which takes minutes, needs no sources: Docker repeats it only when
pyproject.toml or constraints.txt change.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
TARGETS = ("cpu", "gpu")
EXTRAS = ("guided", "otel", "replicas")  # of pyproject.toml, in both images
SERVER = "nvidia-pytriton"  # carries the tritonserver of target cpu; its own dependencies are not needed


def requirements(project: dict[str, object], target: str) -> list[str]:
    """What pyproject.toml's [project] table demands for a target, and setuptools, which builds the project."""
    extras = project["optional-dependencies"]
    cuda = extras["cuda"] if target == "gpu" else []  # type: ignore[index]
    others = [each for name in EXTRAS for each in extras[name]]  # type: ignore[index]
    return ["setuptools", *project["dependencies"], *others, *cuda]  # type: ignore[misc]


def keep_torch(constraints: str, installed: str) -> str:
    """Constraints that allow the base image's torch alone: pip then keeps it, or fails if pyproject.toml excludes it."""
    lines = [line for line in constraints.splitlines() if not line.startswith("torch==")]
    return "\n".join([*lines, f"torch=={installed}", ""])


def install_dependencies(target: str, environment: Path) -> None:
    """Create `environment` and install everything but the project; on gpu beside the base image's packages."""
    venv.create(environment, system_site_packages=target == "gpu", symlinks=True, clear=True)
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    constraints = (SOURCE / "constraints.txt").read_text(encoding="utf-8")
    if target == "gpu":
        constraints = keep_torch(constraints, installed_torch(environment))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "constraints.txt"
        file.write_text(constraints, encoding="utf-8")
        pip(environment, "-c", str(file), *requirements(project, target))
        if target == "cpu":
            pip(environment, "-c", str(file), "--no-deps", SERVER)


def install_project(environment: Path) -> None:
    """Install kvseek, model repository included, and the health check."""
    pip(environment, "--no-deps", "--no-build-isolation", str(SOURCE))
    shutil.copy(SOURCE / "docker" / "healthcheck.py", environment)


def installed_torch(environment: Path) -> str:
    """Version of the torch that `environment` sees; raises SystemExit if there is none."""
    command = [
        str(environment / "bin" / "python"),
        "-c",
        "from importlib.metadata import version; print(version('torch'))",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit("error: the base image has no torch; start from one of NVIDIA's trtllm-python-py3 images")
    return result.stdout.strip()


def pip(environment: Path, *arguments: str) -> None:
    """Install with this Python's pip into `environment`, which has none of its own; nothing is cached."""
    variables = {
        name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"
    }  # the base image's versions
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*command, "--no-cache-dir", *arguments], env=variables, check=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("step", choices=("dependencies", "project"))
    parser.add_argument("environment", type=Path, help="folder of the virtual environment; dependencies replaces it")
    arguments = parser.parse_args(argv)
    if arguments.step == "dependencies":
        install_dependencies(arguments.target, arguments.environment)
    else:
        install_project(arguments.environment)


if __name__ == "__main__":
    main()

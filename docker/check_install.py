"""Runs the Dockerfile's installation of target cpu without Docker, in a temporary folder: `make check-install`.

The commands are read from the Dockerfile, so nothing is written down twice: its RUN lines that call docker/install.py see
exactly the files that they see in the image, and its ENTRYPOINT, CMD and HEALTHCHECK serve a tiny engine.
What stays unchecked is the base image itself.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT, SOURCE, ENGINE = "/opt/kvseek", "/source", "/engine"  # folders in the image


def main() -> None:
    """Install and check; raises CalledProcessError if a step fails."""
    recipe = Recipe.read(ROOT / "Dockerfile", "cpu")
    with tempfile.TemporaryDirectory(prefix="kvseek-install-") as name:
        folder = Path(name)
        places = {ENVIRONMENT: folder / "environment", SOURCE: folder / "source", ENGINE: folder / "engine"}
        for number, step in enumerate(recipe.install_steps):
            places[SOURCE] = folder / f"source-{number}"
            for source, target in step.files:
                copy(ROOT / source, places[SOURCE] / target)
            run(translate(step.command, places), {}, places[SOURCE])
        healthcheck = [place(word, places) for word in recipe.healthcheck]
        command = [place(word, places) for word in recipe.command]
        check = [str(ROOT / "docker" / "check_engine.py"), str(folder), healthcheck[-1], *command]
        environment = {
            "PYTHONPATH": str(ROOT / "tests/support"),
            "PATH": f"{places[ENVIRONMENT] / 'bin'}:{os.environ['PATH']}",
        }
        run(shlex.join(["python3", *check]), environment, folder)


def place(word: str, places: dict[str, Path]) -> str:
    """A word of a command with a folder of the image replaced by its stand-in here."""
    for inside, outside in places.items():
        if word == inside or word.startswith(f"{inside}/"):
            return f"{outside}{word.removeprefix(inside)}"
    return word


def translate(command: str, places: dict[str, Path]) -> str:
    """`place` for every word of a RUN instruction; python3 is the Python that runs this, as the image has but one."""
    words = [place(word, places) for word in shlex.split(command)]
    return shlex.join([sys.executable if word == "python3" else word for word in words])


def copy(source: Path, target: Path) -> None:
    """A file or folder of the checkout, without what .dockerignore leaves out."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    else:
        shutil.copy(source, target)


def run(command: str, environment: dict[str, str], folder: Path) -> None:
    """Run a command of the image and say how long it took."""
    started = time.monotonic()
    subprocess.run(["sh", "-c", command], check=True, cwd=folder, env={**os.environ, **environment})
    print(f"{time.monotonic() - started:.0f} s: {command[:120]}", flush=True)


if __name__ == "__main__":
    main()

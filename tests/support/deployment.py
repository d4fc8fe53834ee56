"""What the tests of the images and manifests read: docker/, the Dockerfile, pyproject.toml."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from types import ModuleType
from typing import Any

import yaml
from tests.conftest import ROOT

from kvseek.server import serve

DOCKER = ROOT / "docker"
TARGETS = ("cpu", "gpu")
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def load(name: str) -> ModuleType:
    """A script of docker/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


install, recipe = load("install"), load("recipe")


def read(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def target(name: str) -> Any:
    return recipe.Recipe.read(ROOT / "Dockerfile", name)


def size(text: str) -> int:
    """Bytes of Docker's 1gb, 80g and Kubernetes' 80Gi, 1Gi."""
    number, unit = re.fullmatch(r"(\d+)([kmg]?)(?:i|b)?", text.lower()).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def serve_arguments(command: list[str]) -> Any:
    """What `kvseek serve` makes of an image's command."""
    assert command[:2] == ["kvseek", "serve"]
    return serve.parse_arguments(command[2:])

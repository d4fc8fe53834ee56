"""A method is a folder of its own: what it imports of plugins/ is shared with all, never another method."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvseek.plugins
from kvseek.plugins.registry import METHODS, PEERS

PLUGINS = Path(kvseek.plugins.__path__[0])
PACKAGES = METHODS | PEERS


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    package = ["kvseek", "plugins", *path.relative_to(PLUGINS).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("method", PACKAGES)
def test_a_method_imports_no_other(method: str) -> None:
    others = tuple(package for other, package in PACKAGES.items() if other != method)
    files = list((PLUGINS / PACKAGES[method].removeprefix("kvseek.plugins.").replace(".", "/")).rglob("*.py"))
    assert files
    for path in files:
        found = {name for name in imported(path) if f"{name}.".startswith(tuple(f"{other}." for other in others))}
        assert not found, f"{path.name} imports {found}"


def test_nothing_that_methods_share_imports_a_method() -> None:
    for path in PLUGINS.rglob("*.py"):
        if path.relative_to(PLUGINS).parts[0] not in METHODS:
            found = {
                name for name in imported(path) if f"{name}.".startswith(tuple(f"kvseek.plugins.{m}." for m in METHODS))
            }
            assert not found, f"{path.name} imports {found}"

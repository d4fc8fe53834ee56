"""Every module of tests/gpu can be imported on a machine without a GPU, where none of its tests is collected."""

from __future__ import annotations

import importlib
import pkgutil

import tests.gpu


def test_every_module_of_tests_gpu_is_imported() -> None:
    found = [module.name for module in pkgutil.walk_packages(tests.gpu.__path__, "tests.gpu.")]
    assert {"tests.gpu.engine.test_engine", "tests.gpu.plugins.test_nested"} <= set(found)
    for name in found:
        importlib.import_module(name)

"""Imports inside functions: they hide circles and slow the first call down, so each has its reason here."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tests.conftest import ROOT

FOLDERS = ("core", "kernels", "plugins", "engine", "builder", "server", "client", "cli", "kvseek")
# Other packages: heavy, or optional, and used by few of those who import the module.
HEAVY = {
    "accelerate": "seconds; builds that are checked",
    "cuda": "an extra: engines on a GPU, and their builds",
    "cudnn": "an extra: prompts in FP8",
    "gguf": "GGUF checkpoints alone",
    "huggingface_hub": "models that are named, and not files",
    "llguidance": "an extra: guided decoding",
    "opentelemetry": "an extra: tracing",
    "safetensors": "checkpoints of this format alone",
    "tokenizers": "checkpoints of GGUF, and the first tokenizer",
    "torch": "parts of it that only one GPU's kind or several ranks have",
    "transformers": "seconds; checkpoints, checks and chat templates",
}
OWN = {
    ("engine/loading/runtime.py", "kvseek.engine.tensorrt.runtime"): "engines without TensorRT never meet it",
    ("builder/weight_storage.py", "kvseek.builder.tensorrt.storage"): "the same of builds",
    ("kvseek/engine_cache.py", "kvseek.builder.build"): "an engine that is there needs no builder",
    ("kvseek/engine_cache.py", "kvseek.builder.options"): "an engine that is there needs no builder",
}
FILES = [
    path for folder in FOLDERS for path in sorted((ROOT / folder).glob("**/*.py" if folder != "kvseek" else "*.py"))
]


@cache
def imports_in_functions(path: Path) -> set[str]:
    """Modules that functions of a file import; a relative name begins with its dots."""
    text = path.read_text(encoding="utf-8")
    if not re.search(r"^\s+(import|from)\s", text, re.MULTILINE):
        return set()
    functions = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    nodes = [node for function in functions for node in ast.walk(function)]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_import_what_has_a_reason(folder: str) -> None:
    files = [path for path in FILES if path.relative_to(ROOT).parts[0] == folder]
    assert files
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        for module in imports_in_functions(path):
            own = module.startswith((".", "kvseek"))
            allowed = (name, module) in OWN if own else module.partition(".")[0] in HEAVY
            assert allowed, f"{name}: {module}: import it at the top of the file, or say here why not"


def test_every_reason_is_of_use() -> None:
    found = {(path.relative_to(ROOT).as_posix(), module) for path in FILES for module in imports_in_functions(path)}
    assert set(OWN) <= found
    assert set(HEAVY) <= {module.partition(".")[0] for _, module in found}

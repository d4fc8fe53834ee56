"""A digest of everything that a build depends on, to tell whether an engine directory is what the build would make."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvseek.builder
import kvseek.core.config
import kvseek.core.manifest
import kvseek.core.model_config
import kvseek.core.rope
import kvseek.core.weight_only
import kvseek.kernels
import kvseek.plugins
from kvseek.core.errors import EngineDirectoryError
from kvseek.core.manifest import read_manifest, verify
from kvseek.plugins.sources import files_digest

SOURCE_SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh")
# Modules outside of the builder whose results lie in an engine directory: configuration, manifest, 8-bit weights, and the
# tables of angles in TensorRT plans.
BUILT_IN = (
    kvseek.core.config,
    kvseek.core.manifest,
    kvseek.core.model_config,
    kvseek.core.weight_only,
    kvseek.core.rope,
)


def fingerprint(settings: dict[str, Any], model_files: Iterable[Path]) -> str:
    """Compute the SHA-256 of everything that a build depends on.

    Parameters
    ----------
    settings : dict
        Settings of the build, as JSON values.
    model_files : iterable of Path
        Files compared by name, size and time of modification, because reading them would take as long as the build.
    """
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in model_files]
    document = {"version": version("kvseek"), "settings": settings, "files": stats, "sources": _digest_of_sources()}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def up_to_date(directory: Path, build_fingerprint: str) -> bool:
    """Whether `directory` holds an intact engine of this fingerprint; False for a damaged engine."""
    try:
        if read_manifest(directory).fingerprint != build_fingerprint:
            return False
        verify(directory)
    except EngineDirectoryError:
        return False
    return True


def _digest_of_sources() -> str:
    """Digest of kvseek's code that decides what an engine directory holds, kernels included.

    The engine's code is not in it: it runs when an engine is served.
    """
    roots = [Path(root) for package in (kvseek.builder, kvseek.kernels, kvseek.plugins) for root in package.__path__]
    paths = [path for root in roots for path in sorted(root.rglob("*")) if path.suffix in SOURCE_SUFFIXES]
    return files_digest([*paths, *(Path(str(module.__file__)) for module in BUILT_IN)])

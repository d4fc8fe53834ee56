"""Writes manifest.json, and says whether an engine directory is what a build would make."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvseek.builder
import kvseek.core.config
import kvseek.core.config_file
import kvseek.engine
import kvseek.engine.model.rope
import kvseek.engine.model.weight_only
import kvseek.plugins
from kvseek.core.errors import EngineDirectoryError
from kvseek.core.manifest import HASH_THREADS, MANIFEST_FILE, FileRecord, Manifest, read_manifest, sha256, verify

SOURCE_SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh")
# Modules of the engine whose results lie in an engine directory: configuration, 8-bit weights, plans' tables of angles.
BUILT_IN = (
    kvseek.core.config,
    kvseek.core.config_file,
    kvseek.engine.model.weight_only,
    kvseek.engine.model.rope,
)


def fingerprint(settings: dict[str, Any], model_files: Iterable[Path]) -> str:
    """SHA-256 over everything that a build depends on.

    Parameters
    ----------
    settings : dict
        What was asked for, JSON values.
    model_files : iterable of Path
        Told apart by name, size and time of modification: reading them would take as long as the build.
    """
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in model_files]
    document = {"version": version("kvseek"), "settings": settings, "files": stats, "sources": _digest_of_sources()}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def write_manifest(directory: Path, source_model: str, build_fingerprint: str) -> None:
    """Record size and SHA-256 of every file below `directory` in its manifest.json."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = list(pool.map(sha256, paths))
    files = {
        path.relative_to(directory).as_posix(): FileRecord(path.stat().st_size, digest)
        for path, digest in zip(paths, digests, strict=True)
    }
    manifest = Manifest(version("kvseek"), source_model, build_fingerprint, files)
    text = json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"
    (directory / MANIFEST_FILE).write_text(text, encoding="utf-8")


def up_to_date(directory: Path, build_fingerprint: str) -> bool:
    """Whether `directory` holds an intact engine of this fingerprint. An engine that is damaged is not."""
    try:
        if read_manifest(directory).fingerprint != build_fingerprint:
            return False
        verify(directory)
    except EngineDirectoryError:
        return False
    return True


def _digest_of_sources() -> str:
    """Digest of kvseek's code that decides what an engine directory holds, kernels included."""
    roots = [Path(root) for package in (kvseek.builder, kvseek.plugins) for root in package.__path__]
    paths = [path for root in roots for path in sorted(root.rglob("*")) if path.suffix in SOURCE_SUFFIXES]
    # Most of the engine's Python code runs when an engine is served; its kernels and what BUILT_IN lists are built in.
    kernels = [path for root in kvseek.engine.__path__ for path in sorted(Path(root).rglob("*.cu*"))]
    digest = hashlib.sha256()
    for path in [*paths, *kernels, *(Path(str(module.__file__)) for module in BUILT_IN)]:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()

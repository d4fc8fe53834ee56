"""Writes the repository of Triton's models for an engine: kvseek's two models, filled in."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path

from kvseek.core.config import EngineConfig
from kvseek.server.requests.served_request import MODELS
from kvseek.server.settings import ServeSettings


def write_repository(
    target: Path, engine_dir: Path, config: EngineConfig, socket: Path, settings: ServeSettings
) -> Path:
    """Write the models into the folder `target`, as clients of the engine process at `socket`; returns the folder."""
    values = {
        "engine_dir": str(engine_dir.resolve()),
        "socket": str(socket),
        "max_queue_size": str(settings.max_queue_size),
        "max_batch_size": str(config.max_batch_size),
    }
    with as_file(files("kvseek.model_repository")) as source:
        for model in MODELS:
            shutil.copytree(source / model, target / model, ignore=shutil.ignore_patterns("__pycache__"))
            _fill_in(target / model / "config.pbtxt", values)
    return target


def _fill_in(path: Path, values: Mapping[str, str]) -> None:
    text = path.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"${{{name}}}", value)
    path.write_text(text, encoding="utf-8")

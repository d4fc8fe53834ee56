"""Refuses engine directories of another format version: they have to be built again."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .config import CONFIG_FILE, FORMAT_VERSION
from .errors import EngineDirectoryError


def check_format(directory: Path) -> None:
    """Raise EngineDirectoryError if config.json of `directory` states another format version.

    A config.json that is missing or no JSON object passes, because it states no version: the checksums report it.
    """
    try:
        document = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(document, dict):
        refuse_other_format(document, directory)


def refuse_other_format(document: dict[str, Any], directory: Path) -> None:
    """Raise EngineDirectoryError unless `document`, config.json of `directory`, is of this format version."""
    found = document.get("format_version")
    if type(found) is not int or found != FORMAT_VERSION:
        raise EngineDirectoryError(
            f"{directory / CONFIG_FILE}: format_version = {found!r}: must be {FORMAT_VERSION}, that of kvseek "
            f"{version('kvseek')}; make an engine from the checkpoint with kvseek build"
        )
